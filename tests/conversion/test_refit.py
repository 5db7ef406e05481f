"""Refitting what layers write to the residual stream, against least squares on gathered activations."""

import copy
import resource

import pytest
import torch
from recorded import recorded_inputs
from slow_fit import slow_fit, weights_of
from tiny_families import TINIES, build, inputs, make_rotary
from tiny_words import bert_config, word_tokenizer
from transformers import AutoModel, BertModel

from collab_compress import (
    CalibrationOptions,
    Compression,
    CompressionError,
    Solver,
    compress,
    mix_heads_,
    prune_heads_,
)
from collab_compress.calibration.batches import split_held_back
from collab_compress.conversion import layers
from collab_compress.conversion import sequential as module
from collab_compress.conversion.feed_forward import narrower_config
from collab_compress.conversion.inventory import Inventory, find_feed_forward
from collab_compress.conversion.layers import HiddenStateStore
from collab_compress.conversion.refit import refit, refit_
from collab_compress.conversion.sequential import DAMPINGS, install_refits
from collab_compress.errors import CalibrationError, HeadError, UnsupportedModelError

LINEARS = ("attention.output.dense", "output.dense")
SUMS = [
    f"encoder.layer.{layer}.{part}"
    for layer in range(2)
    for part in ("attention.output.LayerNorm", "output.LayerNorm")
]
NAMES = [f"encoder.layer.{layer}.{linear}" for layer in range(2) for linear in LINEARS]


def batches(count=6, seed=0):
    """Return batches of random tokens whose sequences have different lengths."""
    made = []
    for place in range(count):
        generator = torch.Generator().manual_seed(seed + place)
        mask = (torch.arange(9) < torch.tensor([[9], [7], [5]])).long()
        made.append({"input_ids": torch.randint(5, 61, (3, 9), generator=generator), "attention_mask": mask})
    return made


def pair(make_tiny, family="bert", **options):
    dense = make_tiny(family)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=6, dv=12, solver=Solver(sweeps=5), **options), calibration=None)
    return model, dense


def shown(model, batch):
    """Return each layer's inputs, and the sum that its outputs are added to, by path, at unpadded tokens."""
    modules = {part: model.get_submodule(part) for part in (*NAMES, *SUMS)}
    calls, real = recorded_inputs(model, batch, modules), batch["attention_mask"].bool()
    return {
        name: tuple(calls[part][0][real].double() for part in (name, total))
        for name, total in zip(NAMES, SUMS, strict=True)
    }


def change_(layer, fit):
    with torch.no_grad():
        layer.weight += fit[0].T
        layer.bias += fit[1]


def slow_refit(model, dense, used, held_back):
    """Refit one layer after the other, running both models anew for each; count those that changed."""
    changed = 0
    for name in NAMES:
        groups = []
        for group in (used, held_back):
            pairs = [(shown(model, batch)[name], shown(dense, batch)[name]) for batch in group]
            inputs, ours, theirs = (
                torch.cat(parts) for parts in zip(*((*one, other[1]) for one, other in pairs), strict=True)
            )
            groups.append((inputs, theirs - ours, weights_of(theirs)))
        fit = slow_fit(*groups)
        if fit is not None:
            change_(model.get_submodule(name), fit)
            changed += 1
    return changed


def assert_same_layer(actual, expected, name):
    for ours, theirs in zip(
        actual.get_submodule(name).parameters(), expected.get_submodule(name).parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_layers_are_fitted_one_after_the_other(make_tiny):
    """The errors that are reported are those of the stream after each layer."""
    model, dense = pair(make_tiny)
    slow = copy.deepcopy(model)
    used, held_back = batches(24), batches(6, seed=100)
    results = refit(model, dense, used, held_back)
    assert [result.report.name for result in results] == NAMES
    assert any(result.report.error_after < 0.99 * result.report.error_before for result in results)
    target = [shown(dense, batch) for batch in held_back]
    for result in results:
        name = result.report.name
        before = [shown(model, batch) for batch in held_back]
        install_refits(model, [result])
        after = [shown(model, batch) for batch in held_back]
        streams = [torch.cat([notes[name][1] for notes in group]) for group in (before, after, target)]
        root = weights_of(streams[2]).sqrt()[:, None]
        parts = [(notes[name][1], weights_of(notes[name][1])[:, None]) for notes in target]
        spread = sum(((part - (part * by).sum(0) / by.sum()).square() * by).sum() for part, by in parts) ** 0.5
        errors = result.report.error_before, result.report.error_after
        expected = [(((stream - streams[2]) * root).norm() / spread).item() for stream in streams[:2]]
        assert errors == pytest.approx(expected, rel=2e-3)
        assert result.report.vectors == sum(int(batch["attention_mask"].sum()) for batch in used)
    assert slow_refit(slow, dense, used, held_back) >= 3
    for name in NAMES:
        assert_same_layer(model, slow, name)


def slow_choice(inputs, outputs, weights, count):
    """Keep the neurons without which a ridge regression of the outputs on all others has the largest loss."""
    by = weights[:, None]
    inputs, outputs = ((part - (part * by).sum(0) / by.sum()) * by.sqrt() for part in (inputs, outputs))
    ridge = (DAMPINGS[0] * inputs.square().sum() / inputs.shape[1]) ** 0.5
    stacked = torch.cat([inputs, ridge * torch.eye(inputs.shape[1], dtype=torch.float64)])
    right = torch.cat([outputs, outputs.new_zeros(inputs.shape[1], outputs.shape[1])])
    losses = []
    for neuron in range(inputs.shape[1]):
        others = stacked[:, [other for other in range(inputs.shape[1]) if other != neuron]]
        fitted = others @ torch.linalg.lstsq(others, right).solution
        losses.append((right - fitted).square().sum())
    return torch.stack(losses).topk(count).indices.sort().values


def test_narrower_blocks_are_those_of_least_squares(make_tiny):
    """In the first layer, whose inputs are the dense model's."""
    dense, data, name = make_tiny("bert"), batches(24), "encoder.layer.0.output.dense"
    model = copy.deepcopy(dense)
    compress(model, Compression(dff=12), data)
    weight = dense.get_submodule(name).weight.detach().double().T
    groups = []
    for part in split_held_back(data):
        inputs, streams = (
            torch.cat(parts) for parts in zip(*(shown(dense, batch)[name] for batch in part), strict=True)
        )
        groups.append((inputs, weights_of(streams)))
    (inputs, weights), _ = groups
    kept = slow_choice(inputs, inputs @ weight, weights, 12)
    removed = [neuron for neuron in range(len(weight)) if neuron not in kept]
    fit = slow_fit(*((inputs[:, kept], inputs[:, removed] @ weight[removed], some) for inputs, some in groups))
    slow = copy.deepcopy(dense)
    layer, up = slow.get_submodule(name), slow.encoder.layer[0].intermediate.dense
    layer.weight = torch.nn.Parameter(layer.weight[:, kept])
    change_(layer, fit)
    up.weight, up.bias = torch.nn.Parameter(up.weight[kept]), torch.nn.Parameter(up.bias[kept])
    for part in (name, "encoder.layer.0.intermediate.dense"):
        assert_same_layer(model, slow, part)


def test_all_neurons_are_exact(make_tiny):
    dense, data = make_tiny("bert"), batches()
    model = copy.deepcopy(dense)
    report = compress(model, Compression(dff=32), data)
    assert all(fit.error_after < 1e-5 for fit in report.refits)
    with torch.no_grad():
        torch.testing.assert_close(model(**data[0])[0], dense(**data[0])[0], atol=1e-5, rtol=1e-5)
    report = compress(model, Compression(dv=24), data)  # exact too, so that other layers stay as they are
    assert all(fit.error_before < 1e-5 for fit in report.refits)
    down = "encoder.layer.1.output.dense.weight"
    assert torch.equal(model.state_dict()[down], dense.state_dict()[down])


def test_shared_layers_are_fitted_to_all_their_calls(make_tiny):
    """ALBERT's calls each get the dense model's stream, and one change is fitted to all of them."""
    model, dense = pair(make_tiny, "albert")
    slow = copy.deepcopy(model)
    used, held_back = batches(24), batches(6, seed=100)
    results = refit(model, dense, used, held_back)
    install_refits(model, results)
    inner = "encoder.albert_layer_groups.0.albert_layers.0"
    assert [result.report.name for result in results] == [f"{inner}.attention.dense", f"{inner}.ffn_output"]
    tokens = sum(int(batch["attention_mask"].sum()) for batch in used)
    assert [result.report.vectors for result in results] == [3 * tokens] * 2
    groups = []
    for group in (used, held_back):
        pairs = [call for batch in group for call in attended(slow, dense, f"{inner}.attention", batch)]
        groups.append(tuple(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    fit = slow_fit(*groups)
    assert fit is not None
    change_(slow.get_submodule(f"{inner}.attention.dense"), fit)
    assert_same_layer(model, slow, f"{inner}.attention.dense")


def attended(model, dense, name, batch):
    """Return the inputs of a converted output projection at each dense call, and the missing outputs."""
    real, calls, pairs = batch["attention_mask"].bool(), [], []
    module, other = model.get_submodule(name), dense.get_submodule(name)
    notes = {}
    handles = [
        other.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True),
        other.LayerNorm.register_forward_pre_hook(lambda _, args: calls.append(args[0])),
        module.dense.register_forward_pre_hook(lambda _, args: notes.update(inputs=args[0])),
        module.LayerNorm.register_forward_pre_hook(lambda _, args: notes.update(sum=args[0])),
    ]
    with torch.no_grad():
        dense(**batch)
        for (args, kwargs), target in zip(calls[::2], calls[1::2], strict=True):
            module(*args, **kwargs)
            lacking, streams = (target - notes["sum"])[real].double(), target[real].double()
            pairs.append((notes["inputs"][real].double(), lacking, weights_of(streams)))
    for handle in handles:
        handle.remove()
    return pairs


def test_compress_refits_to_batches_and_lowers_output_error(make_tiny):
    dense = make_tiny("bert")
    data = batches(30)
    errors, reports = [], []
    for wanted in (False, None):
        model = copy.deepcopy(dense)
        reports.append(compress(model, Compression(dk=6, dv=12, solver=Solver(sweeps=5, refit=wanted)), data))
        errors.append(reports[-1].output_error.relative_error)
    assert not reports[0].refits
    assert len(reports[1].refits) == 4
    assert errors[1] < 0.97 * errors[0]
    assert all(fit.error_after <= fit.error_before for fit in reports[1].refits)
    with torch.no_grad():
        weights = model.encoder.layer[1].output.dense.weight
        assert not torch.equal(weights, dense.encoder.layer[1].output.dense.weight)


@pytest.mark.parametrize(
    ("options", "refits", "warned"),
    [({"dk": 4}, 0, False), ({"dk": 4, "solver": Solver(sweeps=1, refit=True)}, 4, False), ({"dff": 16}, 4, True)],
)
def test_random_tokens_refit_only_where_asked(options, refits, warned):
    tokenizer = word_tokenizer()
    model = BertModel(bert_config(tokenizer))
    sequences = CalibrationOptions(sequences=40)
    report = compress(model, Compression(**options), "synthetic", tokenizer, calibration_options=sequences)
    assert len(report.refits) == refits
    words = "neurons were chosen on random tokens alone, which loses more; calibrate on texts like yours"
    assert [words in warning for warning in report.warnings] == [True] * warned


def test_neurons_chosen_on_few_vectors_are_warned_of(make_tiny):
    report = compress(make_tiny("bert"), Compression(dff=16), batches(6))
    assert [fit.vectors for fit in report.refits] == [112] * 4
    (warning,) = report.warnings
    assert "layer.0.output.dense and 1 more modules saw few calibration vectors: 112 of width 32" in warning
    assert compress(make_tiny("bert"), Compression(dff=16), batches(24)).warnings == ()


def test_what_cannot_be_refitted_is_refused_and_nothing_changes(make_tiny, batch):
    model = make_tiny("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CompressionError, match="at least two sequences"):
        compress(model, Compression(dk=6, solver=Solver(refit=True)), calibration=None)
    with pytest.raises(CalibrationError, match="one of them held back"):
        refit(*pair(make_tiny), [batch], [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("edit", [lambda m: prune_heads_(m, {"encoder.layer.0.attention.self": [1]}), mix_heads_])
def test_edited_models_get_narrower_blocks_too(edit, make_tiny, tmp_path):
    """In two steps, of which the second counts."""
    model, data = make_tiny("bert"), batches()
    edit(model)
    compress(model, Compression(dff=20), data)
    report = compress(model, Compression(dff=12), data)
    assert model.config.intermediate_size == 12
    assert [block.width for block in report.of("dff")] == [12, 12]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(AutoModel.from_pretrained(tmp_path)(**data[0])[0], model(**data[0])[0])


@pytest.mark.parametrize("family", ["bert", "albert", "t5"])
def test_hidden_states_in_files_give_the_same(family, monkeypatch):
    models, reports = [build(family), build(family)], []
    kept, keep = [], HiddenStateStore.keep

    def noted(store, tensor):
        kept.append(store.taken)
        return keep(store, tensor)

    monkeypatch.setattr(HiddenStateStore, "keep", noted)
    for model, size in zip(models, (2**31, 4000), strict=True):
        monkeypatch.setattr(HiddenStateStore.__init__, "__defaults__", (size,))
        kept.clear()
        reports.append(compress(model, Compression(dff=16), [inputs(family, seed) for seed in range(8)]))
        assert max(kept) <= size
    assert reports[0].refits == reports[1].refits
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))


def test_the_store_is_given_back():
    with HiddenStateStore(100) as store:
        first = store.keep(torch.zeros(10))
        second = store.keep(torch.ones(20))
        assert store.taken == 40
        del first
        third = store.keep(torch.ones(20))
        assert store.taken == 80
        assert torch.equal(second, third)
        view = third[5:]
        del third
        assert store.taken == 80
        del view
        assert store.taken == 0


def test_the_store_leaves_memory_of_the_device_to_layers(monkeypatch):
    free = {"bytes": 1000}
    monkeypatch.setattr(layers, "free_memory", lambda device: free["bytes"])
    with HiddenStateStore(1000) as store:
        first = store.keep(torch.ones(20))
        free["bytes"] = 100
        second = store.keep(torch.ones(20))  # in a file
        assert store.taken == first.nbytes
        assert torch.equal(first, second)


def test_a_full_disk_is_told(make_tiny, monkeypatch):
    model = make_tiny("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(HiddenStateStore.__init__, "__defaults__", (1000,))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(
            CalibrationError, match=r"cannot be written to temporary files \(.*\); pass fewer sequences"
        ):
            compress(model, Compression(dff=16), batches())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("step", ["fit", "fill_"])
def test_an_error_leaves_models_as_they_were(step, make_tiny, monkeypatch):
    model, dense = pair(make_tiny)
    before, take, calls = copy.deepcopy(model.state_dict()), getattr(module, step), []

    def failing(*args, **options):
        if calls:
            raise KeyboardInterrupt
        calls.append(take(*args, **options))
        return calls[0]

    monkeypatch.setattr(module, step, failing)
    with pytest.raises(KeyboardInterrupt):
        refit_(model, dense, None, batches())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in dense.modules())


@pytest.mark.parametrize(
    ("name", "normalised"),
    [
        ("bert", True),
        ("wav2vec2", True),
        ("glm4", True),  # whose outputs are normalised before they are added
        ("vit", False),
        ("switch_transformers", False),  # where experts write to the stream after all linear layers that are found
        ("patchtst", False),  # whose norms are those of batches
    ],
)
def test_tokens_are_weighted_where_a_norm_divides_by_their_size(name, normalised, batch):
    model, data = (build(name), inputs(name)) if name in TINIES else (make_rotary(name), batch)
    linears = Inventory(model, data).residual_linears
    assert len(linears) >= 4
    assert {linear.normalised for linear in linears} == {normalised}


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("widths", [{"dff": 16}, {"dv": 8}, {"keep": 0.6}])
def test_outputs_of_zero_that_are_normalised_change_nothing(part, widths):
    model = make_rotary("glm4")
    with torch.no_grad():
        model.model.layers[1].get_submodule(part).weight.zero_()
    data = batches(12)
    assert compress(model, Compression(**widths), data).refits
    assert model(**data[0]).logits.isfinite().all()


def test_residual_linears_are_layers_whose_outputs_are_added(make_tiny, batch):
    model = make_tiny("bert")
    linears = Inventory(model, batch).residual_linears
    assert [(linear.at, linear.shown) for linear in linears] == [(total, "inputs") for total in SUMS]
    for linear in linears:
        torch.testing.assert_close(linear.gain, torch.ones(24), atol=1e-3, rtol=0)


def test_models_that_are_not_finite_are_refused(make_tiny):
    model, dense = pair(make_tiny)
    dense.encoder.layer[0].output.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(HeadError, match="of the dense model holds NaN"):
        refit_(model, dense, None, batches())


@pytest.mark.parametrize(
    ("part", "factor", "bias"),
    [
        ("output.dense", 0.0, 0.0),
        ("output.dense", 1e-30, 0.5),
        ("output.dense", 1e-9, 0.0),
        ("intermediate.dense", 0.0, 0.5),
        ("intermediate.dense", 1e-30, 0.0),
        ("intermediate.dense", 1e-9, 0.5),
    ],
)
def test_blocks_that_hardly_write_are_narrowed_too(part, factor, bias, make_tiny):
    model, data = make_tiny("bert"), batches(24)
    with torch.no_grad():
        layer = model.encoder.layer[0].get_submodule(part)
        layer.weight *= factor
        layer.bias.fill_(bias)
    dense = copy.deepcopy(model)
    report = compress(model, Compression(dff=8), data)
    assert [block.width for block in report.of("dff")] == [8, 8]
    assert {fit.name: fit.error_after for fit in report.refits}["encoder.layer.0.output.dense"] < 1e-5
    with torch.no_grad():
        layers = [net.encoder.layer[0] for net in (model, dense)]
        outputs = [layer.output.dense(layer.intermediate(torch.zeros(1, 24))) for layer in layers]
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


def test_the_default_device_does_not_matter(make_tiny):
    model, data = make_tiny("bert"), batches()
    with torch.device("meta"):
        report = compress(model, Compression(dk=8, dv=12, dff=16), data)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert [block.width for block in report.of("dff")] == [16, 16]


def test_a_layer_that_a_width_also_sets_is_named(make_tiny):
    model = make_tiny("bert")
    blocks = find_feed_forward(model, batches()[0])
    with pytest.raises(UnsupportedModelError, match=r"intermediate_size sets that of encoder\.layer\.1\..* too"):
        narrower_config(model, blocks[:1], 8)


def test_padding_alone_cannot_be_held_back(make_tiny):
    model, dense = pair(make_tiny)
    *used, held_back = batches()
    held_back["attention_mask"] = torch.zeros_like(held_back["attention_mask"])
    with pytest.raises(CalibrationError, match=r"saw no token of the sequences held back.*; pass more data"):
        refit(model, dense, used, [held_back])


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
@pytest.mark.parametrize("options", [{"dff": 16}, {"keep": 0.6, "solver": Solver(sweeps=2)}, {"layers": 1}], ids=str)
def test_feed_forward_blocks_that_run_in_chunks_are_converted_alike(family, options, make_tiny):
    if family == "albert" and "layers" in options:  # calls one layer several times
        return
    reports, models = [], []
    for size in (0, 3):
        model = make_tiny(family)
        for part in model.modules():
            if hasattr(part, "chunk_size_feed_forward"):
                part.chunk_size_feed_forward = size
        reports.append(compress(model, Compression(**options), batches()))
        models.append(model)
        blocks = [one for one in model.modules() if hasattr(one, "chunk_size_feed_forward")]
        assert blocks
        assert all(block.chunk_size_feed_forward == size for block in blocks)
    vectors = [[fit.vectors for fit in report.refits] for report in reports]
    assert vectors[0]
    assert vectors[0] == vectors[1]
    for name, weight in models[0].state_dict().items():
        assert torch.allclose(models[1].state_dict()[name], weight, atol=1e-3), name


@pytest.mark.parametrize("repeated", ["output.dense", "intermediate.dense"])
def test_a_linear_layer_that_is_called_twice_in_its_layer_is_refused(repeated, make_tiny):
    model = make_tiny("bert")
    layer = model.encoder.layer[1]

    class Twice(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            linear = self.get_submodule(repeated)
            again = linear(hidden_states.repeat(1, 1, 2)[..., : linear.in_features])
            return super().forward(hidden_states + 0 * again.sum(), *args, **kwargs)

    layer.__class__ = Twice
    with pytest.raises(UnsupportedModelError, match=rf"encoder\.layer\.1\.{repeated} is called"):
        compress(model, Compression(dff=16), batches())
    if repeated == "output.dense":
        with pytest.raises(UnsupportedModelError, match="called several times in its layer"):
            compress(model, Compression(layers=1), batches())
        report = compress(model, Compression(dv=12), batches())
        assert "no layer was refitted" in report.warnings[0]
        assert repeated in report.warnings[0]


def test_products_in_bfloat16_change_little(make_tiny, set_bfloat16):
    """By less than a tenth of what the conversion itself changes."""
    dense, data, test = make_tiny("bert"), batches(48), batches(8, seed=200)

    @torch.no_grad()
    def outputs(model):
        return torch.cat([model(**batch).last_hidden_state[batch["attention_mask"] == 1] for batch in test])

    expected, results = outputs(dense), []
    for bf16 in (False, True):
        model = copy.deepcopy(dense)
        compress(model, Compression(dk=12, dv=12, dff=16, solver=Solver(bf16=bf16)), data)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        results.append(outputs(model))
    exact, rounded = (float((result - expected).norm() / expected.norm()) for result in results)
    assert not torch.equal(*results)
    assert rounded == pytest.approx(exact, rel=0.1)
