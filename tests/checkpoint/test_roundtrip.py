"""A converted model saved and loaded by stock means, with the package and without."""

import json

import pytest
import torch
from forms import outputs
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from collab_compress import CheckpointError, Compression, compress, read_factors
from collab_compress.checkpoint import EditConfig


# 24 = D = H·d: the shapes of dense and converted projections agree
@pytest.mark.parametrize(("dk", "dv"), [(24, 9), (5, 24)])
def test_every_auto_class(family, auto_class, dk, dv, make_tiny, batch, tmp_path, load_cleanly, capfd):
    torch.manual_seed(0)
    model = auto_class.from_config(make_tiny(family).config).eval()
    compress(model, Compression(dk=dk, dv=dv), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(auto_class, tmp_path)
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert not getattr(loaded, "is_quantized", False)
    assert "collab" not in capfd.readouterr().err.lower()  # no warning either


def test_saving_twice_changes_nothing(family, make_tiny, tmp_path):
    model = make_tiny(family)
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path / "one")
    AutoModel.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_body_and_head_exchange_checkpoints(make_tiny, batch, tmp_path):
    """A classifier's checkpoint loads as a bare model, and a bare one under a classifier."""
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(make_tiny("bert").config).eval()
    compress(classifier, Compression(dk=5), calibration=None)
    classifier.save_pretrained(tmp_path / "classifier")
    body = AutoModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(outputs(body, batch), outputs(classifier.bert, batch))
    body.save_pretrained(tmp_path / "body")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "body")
    assert read_factors(again).keys() == read_factors(classifier).keys()
    for name, factors in read_factors(again).items():
        assert torch.equal(factors.query, read_factors(classifier)[name].query)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.bfloat16) for family in ("albert", "bert", "distilbert", "marian")), ("bert", torch.float16)],
)
def test_half_precision(family, dtype, make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny(family).to(dtype)
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(AutoModel, tmp_path, dtype="auto")
    assert loaded.dtype == dtype
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert load_cleanly(AutoModel, tmp_path, dtype=torch.float32).half().dtype == torch.float16


def test_shards_and_device_map(make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(outputs(load_cleanly(AutoModel, tmp_path, device_map="cpu"), batch), outputs(model, batch))
    automatic = load_cleanly(AutoModel, tmp_path, device_map="auto")
    assert torch.equal(outputs(automatic, batch).cpu(), outputs(model, batch))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_can_be_chosen_at_loading(implementation, make_tiny, batch, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation=implementation)
    assert loaded.config._attn_implementation == implementation
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), atol=1e-5, rtol=1e-4)


def test_a_newer_format_is_refused(make_tiny, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"version 99 .* upgrade collab-compress"):
        AutoModel.from_pretrained(tmp_path)


def test_an_unknown_edit_is_refused():
    with pytest.raises(CheckpointError, match=r"edit of kind 'telepathy'; this package knows .*collaborative"):
        EditConfig([{"kind": "telepathy"}])


def test_config_describes_the_edits(make_tiny, tmp_path):
    model = make_tiny("albert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    stored = AutoConfig.from_pretrained(tmp_path).quantization_config
    assert stored["quant_method"] == "collab_compress"
    assert stored["version"] == 2
    (edit,) = stored["edits"]
    assert edit["kind"] == "collaborative"
    assert [spec["rank"] for spec in edit["modules"].values()] == [5]
    assert EditConfig(stored["edits"]).to_dict() == stored
