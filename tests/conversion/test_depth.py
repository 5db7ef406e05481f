"""Removing layers: the refit across a gap against least squares, the choice against whole passes, and refusals."""

import copy
import re

import pytest
import tiny_families
import torch
from recorded import recorded_inputs
from slow_fit import slow_fit, weights_of
from tiny_families import build, inputs, make_rotary
from torch import nn
from torch.nn.functional import layer_norm
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from collab_compress import Compression, CompressionError, Solver, UnsupportedModelError, compress
from collab_compress.calibration.batches import split_held_back
from collab_compress.conversion import depth, inventory, layer_search
from collab_compress.conversion.refit import refit_
from collab_compress.errors import HeadError

LINEARS = {"bert": "encoder.layer.{}.output.dense", "gpt2": "h.{}.mlp.c_proj"}
SUMS = {"bert": "encoder.layer.{}.output.LayerNorm".format, "gpt2": lambda layer: f"h.{layer + 1}"}  # reads the sum
STACKS = {"bert": "encoder.layer", "gpt2": "h"}


def make(name, layers=4):
    torch.manual_seed(0)
    if name == "bert":
        model = BertModel(BertConfig(**tiny_families.ENCODER | {"num_hidden_layers": layers}))
    else:
        model = GPT2Model(GPT2Config(**tiny_families.GPT2 | {"n_layer": layers}))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):  # that of each layer is another
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_(std=0.3)
    return model.eval()


def layers_of(model):
    return model.encoder.layer if isinstance(model, BertModel) else model.h


def batches(count=24):
    return [inputs("bert", seed) for seed in range(count)]


def removing(monkeypatch, *names):
    """Let the choice fall on these layers."""
    monkeypatch.setattr(layer_search, "choose_layers", lambda *_, **__: list(names))


def shown(model, name, layer, batch):
    """Return the inputs (n, N) of a layer's last linear and the stream (n, D) after it, at unpadded tokens."""
    modules = [model.get_submodule(path) for path in (LINEARS[name].format(layer), SUMS[name](layer))]
    calls = recorded_inputs(model, batch, dict(enumerate(modules)))
    return [calls[part][0][batch["attention_mask"].bool()].double() for part in (0, 1)]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("gap", [[1], [1, 2]])
def test_the_residual_linear_before_a_gap_is_fitted_to_the_stream_behind_it(name, gap, monkeypatch):
    """By least squares, with the ridge that is best on held-back sequences; BERT's norm takes each token's length."""
    dense, data = make(name), batches()
    model = copy.deepcopy(dense)
    removing(monkeypatch, *(f"{STACKS[name]}.{number}" for number in gap))
    compress(model, Compression(layers=4 - len(gap)), data)
    groups = []
    for part in split_held_back(data):
        rows = []
        for batch in part:
            read, stream = shown(dense, name, 0, batch)
            _, target = shown(dense, name, gap[-1], batch)
            if name == "bert":
                spread, mean = stream.std(1, correction=0, keepdim=True), stream.mean(1, keepdim=True)
                target = layer_norm(target, target.shape[1:], eps=0) * spread + mean
            rows.append(
                (read, target - stream, weights_of(target) if name == "bert" else stream.new_ones(len(stream)))
            )
        groups.append([torch.cat(columns) for columns in zip(*rows, strict=True)])
    expected = slow_fit(*groups)
    before, after = (one.get_submodule(LINEARS[name].format(0)) for one in (dense, model))
    weight = (after.weight - before.weight).mT if name == "bert" else after.weight - before.weight
    torch.testing.assert_close(weight, expected[0].float(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(after.bias - before.bias, expected[1].float(), atol=1e-4, rtol=1e-3)
    norms = [one.state_dict() for one in layers_of(dense)]
    if name == "bert":  # where a norm comes last, it is that of the last removed layer
        assert torch.equal(layers_of(model)[0].output.LayerNorm.weight, norms[gap[-1]]["output.LayerNorm.weight"])
        assert torch.equal(
            layers_of(model)[0].attention.output.LayerNorm.weight, norms[0]["attention.output.LayerNorm.weight"]
        )
    else:
        assert torch.equal(layers_of(model)[0].ln_2.weight, norms[0]["ln_2.weight"])


def moved(model, dense, held_back):
    """Return the mean over channels of the squared error of directions over their variance."""
    stacks = []
    for one in (model, dense):
        last, tokens = layers_of(one)[-1], []
        handle = last.register_forward_hook(
            lambda *call, tokens=tokens: tokens.append(call[2][0] if isinstance(call[2], tuple) else call[2])
        )
        with torch.no_grad():
            for batch in held_back:
                one(**batch)
        handle.remove()
        real = [states[batch["attention_mask"].bool()] for states, batch in zip(tokens, held_back, strict=True)]
        stacks.append(nn.functional.normalize(torch.cat(real).double(), dim=1))
    ours, theirs = stacks
    return ((ours - theirs).square().mean(0) / theirs.var(0, correction=0)).mean().item()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_layers_are_chosen_by_what_the_last_hidden_states_move(name):
    """One after the other, each by whole passes without it."""
    dense, data = make(name, layers=5), batches(8)
    model = copy.deepcopy(dense)
    report = compress(model, Compression(layers=3, solver=Solver(refit=False)), data)
    held_back = split_held_back(data)[1]
    kept = list(range(5))
    for _ in range(2):
        losses = {}
        for number in kept:
            shallow = copy.deepcopy(dense)
            for gone in sorted({*range(5)} - {*kept} | {number}, reverse=True):
                del layers_of(shallow)[gone]
            losses[number] = moved(shallow, dense, held_back)
        kept.remove(min(losses, key=losses.get))
    assert set(report.removed_layers) == {f"{STACKS[name]}.{number}" for number in {*range(5)} - {*kept}}
    assert not report.refits
    for ours, number in zip(layers_of(model), kept, strict=True):
        theirs = layers_of(dense)[number].state_dict()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.state_dict().items())


def test_warnings_name_modules_of_the_converted_model(monkeypatch):
    """Layer 0 goes, so that layer 1, whose queries and keys saw fewest vectors for their width, is 0 afterwards."""
    model = make("bert", layers=3)
    removing(monkeypatch, "encoder.layer.0")
    report = compress(model, Compression(layers=2, dk=6, modules="*layer.1*"), batches(3))
    (warning,) = [warning for warning in report.warnings if "few calibration vectors" in warning]
    assert warning.startswith("encoder.layer.0.")


def test_without_refits_no_linear_is_looked_for(monkeypatch):
    """A model whose linears cannot be refitted loses layers all the same."""
    monkeypatch.setattr(inventory.Inventory, "residual_linears", property(lambda _: pytest.fail("looked for")))
    model = make("bert")
    assert len(compress(model, Compression(layers=3, solver=Solver(refit=False)), batches(8)).removed_layers) == 1


def test_gaps_are_refitted_only_where_something_changed(monkeypatch):
    model, rounds, solve, remove_one = make("gpt2", 6), [], layer_search.solve, layer_search._Search.remove_one
    for part in (model.h[4].attn.c_proj, model.h[4].mlp.c_proj):  # it computes nothing, so it goes first
        part.weight.data.zero_()
        part.bias.data.zero_()
    monkeypatch.setattr(layer_search, "solve", lambda *args: rounds[-1].append(args[1].layer) or solve(*args))
    monkeypatch.setattr(layer_search._Search, "remove_one", lambda search: rounds.append([]) or remove_one(search))
    assert "h.4" in compress(model, Compression(layers=4), batches(12)).removed_layers
    assert rounds == [["h.0", "h.1", "h.2", "h.3", "h.4"], ["h.2", "h.3"]]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_refit_brings_the_outputs_nearer(name, monkeypatch):
    removing(monkeypatch, f"{STACKS[name]}.2")
    errors = [
        compress(make(name), Compression(layers=3, solver=Solver(refit=refit)), batches()).output_error.relative_error
        for refit in (False, None)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_a_stack_may_begin_with_a_gap(monkeypatch):
    model, dense = make("bert"), make("bert")
    removing(monkeypatch, "encoder.layer.0", "encoder.layer.1")
    report = compress(model, Compression(layers=2), batches())
    assert report.refits[0].error_before > 0.1  # of the hidden states of a layer with other inputs
    names = [refit.name for refit in report.refits]
    assert names == [f"encoder.layer.{place}.{part}output.dense" for place in (0, 1) for part in ("attention.", "")]
    assert torch.equal(model.encoder.layer[0].output.LayerNorm.bias, dense.encoder.layer[2].output.LayerNorm.bias)


def test_kinds_of_layers_follow(monkeypatch):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    monkeypatch.setitem(tiny_families.ROTARY_SIZES, "num_hidden_layers", 4)
    monkeypatch.setitem(tiny_families.LAYER_KINDS, "layer_types", kinds)
    model = make_rotary("gemma3_text")
    removing(monkeypatch, "model.layers.1")
    compress(model, Compression(layers=3), batches(2))
    assert model.config.num_hidden_layers == 3
    assert model.config.layer_types == [kinds[0], *kinds[2:]]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    def failing(*_):
        raise RuntimeError("no")

    model = make("bert")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    monkeypatch.setattr("collab_compress.conversion.compress.record_maps_", failing)
    with pytest.raises(RuntimeError, match="no"):
        compress(model, Compression(layers=2, dff=16), batches(4))
    assert model.config.to_dict() == config
    assert type(model.encoder.layer) is nn.ModuleList
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_refusals():
    data = batches(4)
    with pytest.raises(CompressionError, match="layers is 4, and the deepest stack of BertModel has 4; pass fewer"):
        compress(make("bert"), Compression(layers=4), "no-such-file.txt")  # before data are read
    with pytest.raises(CompressionError, match="layers is 0; expected at least 1"):
        Compression(layers=0)
    with pytest.raises(CompressionError, match="leave those and layers out"):
        Compression(layers=2, keep=0.5)
    with pytest.raises(CompressionError, match="calibration data of at least two sequences"):
        compress(make("bert"), Compression(layers=2), None)
    with pytest.raises(UnsupportedModelError, match="AlbertModel calls one layer 2 times, so that none can be"):
        compress(build("albert"), Compression(layers=1), data)
    edited = make("bert")
    compress(edited, Compression(dv=12), data)
    with pytest.raises(CompressionError, match="BertModel is edited already; pass layers with the first widths"):
        compress(edited, Compression(layers=2), data)


def test_layers_that_depend_on_their_numbers_are_refused(monkeypatch):
    scaled = GPT2Model(GPT2Config(**tiny_families.GPT2, scale_attn_by_inverse_layer_idx=True))
    with pytest.raises(UnsupportedModelError, match="h cannot be removed: attention is scaled by their numbers"):
        compress(scaled, Compression(layers=1), batches(2))
    settings = tiny_families.TINIES["switch_transformers"].settings
    for name, value in (("num_sparse_encoder_layers", 2), ("num_layers", 4), ("num_decoder_layers", 4)):
        monkeypatch.setitem(settings, name, value)
    mixed = build("switch_transformers")  # every second layer of the encoder has experts
    removing(monkeypatch, "encoder.block.1", "decoder.block.3")
    message = "no SwitchTransformersModel has the 3 layers that would stay: is_sparse of its encoder.block.1 is True"
    with pytest.raises(UnsupportedModelError, match=message):
        compress(mixed, Compression(layers=3), [inputs("t5", seed) for seed in range(2)])


def test_a_shallower_model_cannot_be_refitted_to_the_dense_one():
    model, dense = make("bert"), make("bert")
    compress(model, Compression(layers=3), batches(4))
    with pytest.raises(HeadError, match="BertModel has 3 layers, and 4 in the dense model"):
        refit_(model, dense, None, batches(4))


def deep_whisper():
    model = build("whisper", "WhisperForConditionalGeneration")
    sizes = {"encoder_layers": 4, "decoder_layers": 4, "num_hidden_layers": 4}
    return type(model)(type(model.config)(**model.config.to_dict() | sizes)).eval()


def test_alignment_heads_follow_the_layers_that_stay(monkeypatch):
    removing(monkeypatch, "model.encoder.layers.0", "model.decoder.layers.1")
    data = [inputs("whisper", seed) for seed in range(3)]
    for heads, expected, words in (
        ([[0, 1], [3, 2]], [[0, 1], [2, 2]], ""),
        ([[1, 0], [2, 1]], [[1, 1]], "1 of the 2 heads .* word timestamps come from the others"),
        ([[1, 0]], None, "1 of the 1 heads .* there are no word timestamps any more"),
    ):
        model = deep_whisper()
        settings = model.generation_config
        settings.alignment_heads = heads
        report = compress(model, Compression(layers=3, solver=Solver(refit=False)), data)
        assert getattr(model.generation_config, "alignment_heads", None) == expected
        assert settings.alignment_heads == heads
        notes = [note for note in report.warnings if "alignment_heads" in note]
        assert re.search(words, notes[0]) if words else not notes


@pytest.mark.parametrize("holder", ["config", "generation_config"])
def test_settings_that_name_layers_by_number_are_refused(holder):
    name = {"config": "feature_layer", "generation_config": "dola_layers"}[holder]
    model = deep_whisper()
    for value, refused in (([2, 3], True), (None, False)):
        setattr(getattr(model, holder), name, value)
        words = f"{name} of the configs names layers by number"
        assert depth._why_fixed(model, "model.encoder.layers", [model.config]) == (words if refused else "")
        if refused:
            with pytest.raises(UnsupportedModelError, match=words):
                compress(model, Compression(layers=3), [inputs("whisper")])


def test_layers_that_return_another_shape_are_refused_by_name():
    model = make("bert")

    class Pooling(type(model.encoder.layer[1])):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs)[:, :4]

    model.encoder.layer[3].__class__ = Pooling
    data = [{"input_ids": batch["input_ids"]} for batch in batches(4)]
    shapes = r"encoder\.layer\.3 reads hidden states of shape \(\d, \d+, 24\) and returns \(\d, 4, 24\)"
    with pytest.raises(UnsupportedModelError, match=shapes):
        compress(model, Compression(layers=2), data)


def test_weights_for_each_layer_are_named_where_they_keep_layers_from_going():
    model = build("wav2vec2", "Wav2Vec2ForSequenceClassification")
    config = type(model.config)(**model.config.to_dict() | {"use_weighted_layer_sum": True, "num_hidden_layers": 3})
    model = type(model)(config).eval()
    with pytest.raises(UnsupportedModelError, match="Wav2Vec2ForSequenceClassification has weights for each layer"):
        compress(model, Compression(layers=2), [inputs("wav2vec2", seed) for seed in range(3)])


def test_groups_of_layers_are_not_called_a_stack():
    model = build("albert")
    sizes = {"num_hidden_layers": 6, "num_hidden_groups": 3}
    model = type(model)(type(model.config)(**model.config.to_dict() | sizes)).eval()
    for layers in (2, 3, 4):
        with pytest.raises(
            UnsupportedModelError, match="calls 3 layers in turn, 6 times, so that none can be removed"
        ):
            compress(model, Compression(layers=layers), [inputs("albert")])
