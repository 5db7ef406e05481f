"""Whose edits a config describes, and that nothing but the package rebuilds them."""

import copy
import json

import pytest
import torch
from forms import outputs, randomise_
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, PretrainedConfig, PreTrainedModel

from collab_compress import Compression, compress, expand, merge_alphas_, mix_heads_, prune_heads_
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.quantizer import describe_edits_when_saving

FIRST = "encoder.layer.0.attention.self"


def mixed(model):
    mix_heads_(model)
    randomise_(model)


EDITS = {
    "shared": lambda model: compress(model, Compression(dk=5), calibration=None),
    "full": lambda model: compress(model, Compression(dk=24), calibration=None),
    "narrow": lambda model: compress(model, Compression(dk=5, dv=9), calibration=None),
    "alphas": mixed,
    "pruned": lambda model: prune_heads_(model, {FIRST: [1]}),
}


@pytest.fixture(params=sorted(EDITS))
def edit(request):
    return EDITS[request.param]


NO_FLAG_HELPS = """
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertModel
ways = [
    lambda: AutoModel.from_pretrained(sys.argv[1]),
    lambda: AutoModel.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True),
    lambda: BertModel.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True),
    lambda: BertModel.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True, use_safetensors=True),
    lambda: AutoModelForSequenceClassification.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True),
    lambda: AutoModelForSequenceClassification.from_pretrained(
        sys.argv[1], ignore_mismatched_sizes=True, device_map="cpu", trust_remote_code=False),
    lambda: AutoModel.from_pretrained(sys.argv[1], config=AutoConfig.from_pretrained(sys.argv[1]),
                                      ignore_mismatched_sizes=True),
]
for way in ways:
    try:
        way()
        print("LOADED")
    except OSError as error:
        print("install-collab-compress-0.1.0-and-import-collab_compress" in str(error))
"""


def test_no_flag_loads_it_without_the_package(edit, make_tiny, tmp_path, stock_python):
    model = make_tiny("bert")
    edit(model)
    for name, options in (("whole", {}), ("shards", {"max_shard_size": "10KB"})):
        model.save_pretrained(tmp_path / name, **options)
        done = stock_python(NO_FLAG_HELPS, tmp_path / name)
        assert done.stdout.split() == ["True"] * 7, done.stderr
        first = next(line for line in done.stderr.splitlines() if "quantization" in line)
        assert "`import collab_compress` before loading" in first.partition("To remove the warning")[0]
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("reader", [AutoConfig, BertConfig])
def test_a_config_that_is_read_and_saved_keeps_its_guard(edit, reader, make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert")
    edit(model)
    model.save_pretrained(tmp_path / "model")
    before = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    config = reader.from_pretrained(tmp_path / "model")
    for _ in range(2):
        config.save_pretrained(tmp_path / "model")
        assert json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8")) == before
    for options in ({}, {"config": config}, {"config": copy.deepcopy(config)}):
        loaded = load_cleanly(AutoModel, tmp_path / "model", **options)
        assert torch.equal(outputs(loaded, batch), outputs(model, batch))
        assert edits_of(loaded) == edits_of(model)
        assert not hasattr(loaded.config, "quantization_config")
    loaded = BertModel.from_pretrained(None, config=config, state_dict=model.state_dict())
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))


def test_a_stock_config_is_read_as_it_was(make_tiny, tmp_path):
    make_tiny("bert").save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is BertConfig
    config, rest = BertConfig.from_pretrained(tmp_path, return_unused_kwargs=True, other=1)
    assert (type(config), rest) == (BertConfig, {"other": 1})


def test_no_tensor_is_empty(edit, make_tiny):
    model = make_tiny("bert")
    edit(model)
    assert all(tensor.numel() for tensor in model.state_dict().values())


def test_models_of_one_config_do_not_share_edits(edit, make_tiny, batch, tmp_path, load_cleanly):
    config = make_tiny("bert").config
    first, second = BertModel(config).eval(), BertModel(config).eval()
    before = copy.deepcopy(vars(config))
    edit(first)
    assert vars(config) == before
    later = [BertModel(one).eval() for one in (config, first.config, copy.deepcopy(first.config))]
    for name, dense in enumerate([second, *later]):
        assert edits_of(dense) == []
        dense.save_pretrained(tmp_path / str(name))
        stored = json.loads((tmp_path / str(name) / "config.json").read_text(encoding="utf-8"))
        assert not {"quantization_config", "transformers_weights"} & set(stored)
        assert torch.equal(outputs(load_cleanly(AutoModel, tmp_path / str(name)), batch), outputs(dense, batch))
    compress(second, Compression(dk=8), calibration=None)
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
        loaded = load_cleanly(AutoModel, tmp_path / name)
        torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch))
        assert edits_of(loaded) == edits_of(model)


def test_weights_given_for_saving_are_saved(make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path / "model")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    for saver in (model, load_cleanly(AutoModel, tmp_path / "model")):
        saver.save_pretrained(tmp_path, state_dict=other.state_dict())
        assert torch.equal(outputs(load_cleanly(AutoModel, tmp_path), batch), outputs(other, batch))


def test_an_edited_model_carries_no_marks_of_quantization(edit, make_tiny, tmp_path):
    model = make_tiny("bert")
    model.save_pretrained(tmp_path / "stock")
    edit(model)
    model.save_pretrained(tmp_path / "edited")
    stock = {"made": make_tiny("bert"), "loaded": AutoModel.from_pretrained(tmp_path / "stock")}
    for way, one in (("made", model), ("loaded", AutoModel.from_pretrained(tmp_path / "edited"))):
        assert set(vars(one)) == {*vars(stock[way]), "collab_edits"}
        assert not {"_is_quantized", "transformers_weights"} & set(vars(one.config))


def test_undoing_leaves_a_stock_model(make_tiny, tmp_path):
    stock = make_tiny("bert")
    model = copy.deepcopy(stock)
    compress(model, Compression(dk=24), calibration=None)
    mix_heads_(model)
    model.save_pretrained(tmp_path / "edited")
    stock.save_pretrained(tmp_path / "stock")
    ways = (
        (model, stock),
        (AutoModel.from_pretrained(tmp_path / "edited"), AutoModel.from_pretrained(tmp_path / "stock")),
    )
    for undone, stock in ways:
        merge_alphas_(undone)
        expand(undone)
        for (name, one), (_, other) in zip(undone.named_modules(), stock.named_modules(), strict=True):
            assert type(one) is type(other), name
            assert set(vars(one)) == set(vars(other)), name
        assert undone._no_split_modules == stock._no_split_modules
        assert type(undone.config) is type(stock.config)
        known = ("_name_or_path", "architectures", "dtype")
        one, other = ({**vars(model.config)} for model in (undone, stock))
        assert {name for name in {*one, *other} if one.get(name) != other.get(name)} <= set(known)
        undone.save_pretrained(tmp_path / "undone")
        texts = [(tmp_path / name / "config.json").read_bytes() for name in ("undone", "stock")]
        assert texts[0] == texts[1]


def test_saving_is_wrapped_once():
    before = PreTrainedModel.save_pretrained, PretrainedConfig.to_diff_dict
    describe_edits_when_saving()
    assert (PreTrainedModel.save_pretrained, PretrainedConfig.to_diff_dict) == before
