"""What a checkpoint stores of its edits is checked when it is read."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel, GPT2Config, GPT2Model

from collab_compress import CheckpointError, Compression, compress, mix_heads_, prune_heads_
from collab_compress.attention import NarrowConfig, RotaryConfig
from collab_compress.checkpoint import EditConfig

NAME = "encoder.layer.0.attention.self"
SCORES = {"heads": 3, "head_width": 8, "rank": 8, "content_bias": True, "reads": 3}
ROTARY = RotaryConfig(3, 8, 16, key_heads=3, rotated=8, pairs="halves", frequencies=tuple(range(4)) * 2).to_dict()
VALUES = NarrowConfig(heads=3, head_width=8, size=4, value_bias=True).to_dict()
PRUNED = {
    "kept": [0, 2],
    "before": 3,
    "head_width": 8,
    "value_width": 8,
    "heads": "num_attention_heads",
    "query": "query",
    "key": "key",
    "value": "value",
    "output": "output.dense",
}
STORED = {"collaborative": SCORES, "rotary": ROTARY, "narrow-values": VALUES, "pruned": PRUNED, "alphas": 3}
DAMAGED = [
    ("collaborative", {"heads": 0}, "heads 0; expected at least 1"),
    ("collaborative", {"rank": 10**12}, "rank 1000000000000; expected int"),
    ("collaborative", {"content_bias": 1}, "content_bias 1; expected bool"),
    ("collaborative", {"rank": None}, "rank None; expected int"),
    ("collaborative", {"scale": float("nan")}, "scale nan; expected float | None"),
    ("collaborative", {"scale": -1.0}, "scale -1.0; expected a number above 0"),
    ("collaborative", {"scale": 1.0}, "scale 1.0; expected none, as the mixing matrix is trained"),
    ("collaborative", {"colour": 3}, "a field 'colour', which is not known"),
    ("collaborative", {"reads": 9}, "reads 9; expected 1 to 8"),
    ("rotary", {"head_width": 7}, "head_width 7; expected an even number"),
    ("rotary", {"key_heads": 2}, "key_heads 2; expected a divisor of 3"),
    ("rotary", {"rotated": 9}, "rotated 9; expected an even number up to 8"),
    ("rotary", {"rank": 12}, "rank 12; expected a multiple of 8"),
    ("rotary", {"pairs": "odd"}, "pairs 'odd'; expected one of 'halves'"),
    ("rotary", {"frequencies": [0]}, "frequencies (0,); expected 8 numbers, one a channel pair"),
    ("rotary", {"frequencies": [4] * 8}, "expected numbers below 4"),
    ("narrow-values", {"group": 2}, "group 2; expected a divisor of the 3 heads"),
    ("narrow-values", {"size": 9}, "size 9; expected 1 to 8"),
    ("pruned", {"kept": []}, "kept (); expected heads that stay, ascending"),
    ("pruned", {"kept": [2, 0]}, "kept (2, 0); expected heads that stay, ascending"),
    ("pruned", {"kept": [0, 3]}, "kept (0, 3); expected heads below 3"),
    ("pruned", {"value_width": 0}, "value_width 0; expected at least 1"),
]


EDITS = {
    "alphas": mix_heads_,
    "pruned": lambda model: prune_heads_(model, {NAME: [1]}),
    "shared": lambda model: compress(model, Compression(dk=8), calibration=None),
    "values": lambda model: compress(model, Compression(dv=12), calibration=None),
}


@pytest.fixture
def stored(tmp_path):
    """Return a function that saves an edited model and changes its stored config."""

    def store(model, edit, change):
        EDITS[edit](model)
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        change(config)
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path

    return store


def edit_in(config):
    (edit,) = config["quantization_config"]["edits"]
    return edit


def read(kind, modules):
    return EditConfig([{"kind": kind, "modules": modules}])


@pytest.mark.parametrize("kind", STORED)
def test_edits_without_valid_modules_are_refused(kind):
    assert read(kind, {NAME: STORED[kind]}).edits[0].modules
    for modules in (None, [], {}, {NAME: None}, {NAME: [3]}, {NAME: 2**40}):
        with pytest.raises(CheckpointError, match="stored edit of") as caught:
            read(kind, modules)
        assert "expected" in str(caught.value)


@pytest.mark.parametrize(("kind", "entries", "words"), DAMAGED)
def test_the_field_is_named(kind, entries, words):
    with pytest.raises(CheckpointError) as caught:
        read(kind, {NAME: {**STORED[kind], **entries}})
    assert f"the stored edit of {NAME} has " in str(caught.value)
    assert words in str(caught.value)


def test_a_field_that_is_missing_is_named():
    with pytest.raises(CheckpointError, match=f"the stored edit of {NAME} lacks the field rank"):
        read("collaborative", {NAME: {name: value for name, value in SCORES.items() if name != "rank"}})


@pytest.mark.parametrize("edits", [3, "x", {}, [3], [None], [{}], [{"kind": []}], [{"kind": "telepathy"}]])
def test_a_list_that_is_none(edits):
    words = "this package knows .*collaborative" if isinstance(edits, list) else "expected a list"
    with pytest.raises(CheckpointError, match=f"the checkpoint .*{words}"):
        EditConfig(edits)


def test_a_newer_format_is_refused(make_tiny, stored):
    folder = stored(make_tiny("bert"), "shared", lambda config: config["quantization_config"].update(version=99))
    with pytest.raises(CheckpointError, match=r"version 99 .* upgrade collab-compress"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("edit", "entries", "words"),
    [
        ("shared", {"head_width": 5}, "3 heads, each 5 wide, so .* would have 15 channels; the model has 24"),
        ("values", {"head_width": 5}, "3 heads, each 5 wide, so .* would have 15 channels; the model has 24"),
        ("pruned", {"head_width": 10**9}, "got 24 output channels; expected 3 heads × 1000000000"),
        ("pruned", {"value_width": 10**9}, "got 24 output channels; expected 3 heads × 1000000000"),
    ],
)
def test_edits_of_other_sizes_are_refused(edit, entries, words, make_tiny, stored):
    def change(config):
        for form in edit_in(config)["modules"].values():
            form.update(entries)

    with pytest.raises(CheckpointError, match=words):
        AutoModel.from_pretrained(stored(make_tiny("bert"), edit, change))


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_other_modules_are_refused(edit, make_tiny, stored):
    def change(config):
        modules = edit_in(config)["modules"]
        edit_in(config)["modules"] = {f"nowhere.{name}": form for name, form in modules.items()}

    error, words = CheckpointError, "BertModel: the checkpoint describes converted attention, but holds no"
    if edit == "pruned":  # the tensors are of another shape than the model's, as Transformers says
        error, words = RuntimeError, "ignore_mismatched_sizes"
    with pytest.raises(error, match=words):
        AutoModel.from_pretrained(stored(make_tiny("bert"), edit, change))


@pytest.mark.parametrize("edit", ["shared", "values", "alphas"])
@pytest.mark.parametrize("path", [None, "elsewhere"])
def test_weights_of_an_edit_that_the_config_does_not_describe_are_refused(edit, path, make_tiny, stored):
    def change(config):
        if path is None:
            config["quantization_config"]["edits"] = []
        else:
            edit_in(config)["modules"] = {path: next(iter(edit_in(config)["modules"].values()))}

    with pytest.raises(CheckpointError, match=r"BertModel: the checkpoint holds .* in place of .* restore the"):
        AutoModel.from_pretrained(stored(make_tiny("bert"), edit, change))


@pytest.mark.parametrize("edit", EDITS)
def test_a_config_with_another_number_of_heads_is_refused(edit, make_tiny, stored):
    folder = stored(make_tiny("bert"), edit, lambda config: config.update(num_attention_heads=6))
    with pytest.raises(CheckpointError, match=r"the stored edit of .* has 3 heads, but the config makes 6; restore"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("change", ["shared", "values", "alphas"])
def test_a_state_dict_of_the_dense_model_is_refused(change, family, make_tiny):
    """As `Trainer` loads a checkpoint from before the conversion, without asking for all weights."""
    tiny = GPT2Config(n_embd=24, n_head=3, n_layer=1, n_positions=8, vocab_size=11)
    model = make_tiny("bert") if family == "bert" else GPT2Model(tiny)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    EDITS[change](model)
    with pytest.raises(CheckpointError, match=r"the state dict is a dense model's: it holds .*\.weight, which"):
        model.load_state_dict(dense, strict=False)
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("number", [-1, 7])
def test_channels_that_there_are_not_are_refused(number, make_tiny, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=7), calibration=None)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("qk.channels"))
    weights[name][0, 0] = number
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the channels .* expected 0 to 6; the checkpoint is damaged"):
        AutoModel.from_pretrained(tmp_path)
