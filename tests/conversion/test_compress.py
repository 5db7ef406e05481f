import copy
import gc
import itertools
import json
import logging
import pkgutil
import re
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from collab_compress_cli.pretrained import find_directory
from tiny_words import sentences, word_tokenizer
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import (
    AutoConfig,
    AutoModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    LlamaConfig,
    LlamaModel,
)
from transformers.models.bert.modeling_bert import BertEncoder

from collab_compress import (
    CalibrationError,
    CalibrationOptions,
    CheckpointError,
    CollabCompressError,
    Compression,
    CompressionError,
    HeadMask,
    Solver,
    UnsupportedModelError,
    alphas_of,
    compress,
    devices,
    expand,
    head_importance,
    merge_alphas_,
    mix_heads_,
    prune_heads_,
    read_factors,
)
from collab_compress.analysis import plan
from collab_compress.architectures import find_dense_attention
from collab_compress.attention import is_converted
from collab_compress.calibration import gather
from collab_compress.calibration.batches import split_held_back
from collab_compress.checkpoint import edits_of
from collab_compress.conversion.agreement import measure_output_error
from collab_compress.conversion.compress import working_device
from collab_compress.conversion.refit import refit_
from collab_compress.factorization import factorize
from collab_compress.heads import DropHead, HeadGates, Recorder


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_factors_are_those_of_the_decomposition(family, make_tiny):
    model = make_tiny(family)
    site = find_dense_attention(model)[0]
    expected = factorize(
        site.query_heads(), site.key_heads(), 7, query_bias=site.query_bias(), solver=Solver(sweeps=3)
    ).factors
    compress(model, Compression(dk=7, solver=Solver(sweeps=3)), calibration=None)
    factors = read_factors(model)[site.name]
    assert factors.query.shape == (24, 7)
    assert factors.key.shape == (24, 7)
    assert factors.mixing.shape == (3, 7)
    assert factors.content_bias.shape == (3, 24)
    for name in ("query", "mixing", "key", "content_bias"):
        torch.testing.assert_close(getattr(factors, name), getattr(expected, name).float())


@pytest.mark.parametrize("family", ["albert", "bert", "marian"])
def test_report(family, make_tiny, calibration):
    model = make_tiny(family)
    before = model.num_parameters()
    report = compress(model, Compression(dk=8), calibration)
    assert report.parameters_before == before
    assert report.parameters_after == model.num_parameters()
    saved = sum(module.parameters_before - module.parameters_after for module in report.of("dk"))
    assert before - report.parameters_after == saved
    for module in report.of("dk"):
        assert 0 < module.data_error < 1
        assert module.weight_error > 0
        assert module.macs_after != module.macs_before
    assert report.output_error.output == "last_hidden_state"
    assert (report.sequences, report.output_error.sequences) == (28, 4)
    used, _ = split_held_back(calibration)
    real, target = (
        sum(int(batch.get(name, batch["attention_mask"]).sum()) for batch in used)
        for name in ("attention_mask", "decoder_attention_mask")
    )
    for module in report.of("dk"):
        passes = 3 if family == "albert" else 1
        query = real if family != "marian" or "encoder.layers" in module.name else target
        key = target if "decoder" in module.name and "encoder_attn" not in module.name else real
        assert module.vectors == (passes * query, passes * key)
    assert report.warnings == ()
    assert json.loads(json.dumps(report.to_dict()))["parts"][0]["head_dim"] == 8  # 7 channels and the content bias
    without = compress(make_tiny(family), Compression(dk=8), calibration=None)
    assert (without.of("dk")[0].vectors, without.sequences) == ((0, 0), 0)
    assert without.output_error is without.of("dk")[0].data_error is None


def test_output_error_is_measured_on_held_back_data(make_tiny, calibration):
    dense = make_tiny("bert")
    model = copy.deepcopy(dense)
    report = compress(model, Compression(dk=8), calibration)
    joined = {name: torch.cat([batch[name] for batch in calibration])[4::8] for name in calibration[0]}
    mask = joined["attention_mask"].bool()
    with torch.no_grad():
        one, other = (net(**joined).last_hidden_state[mask] for net in (dense, model))
    assert report.output_error.relative_error == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-4)


def test_a_compiled_forward_pass_does_not_hide_the_output_error(make_tiny, calibration):
    """`torch.compile(model.forward)` is a function that runs the model itself, not its copy."""
    model = make_tiny("bert")
    expected = compress(copy.deepcopy(model), Compression(dk=8, dff=16), calibration).output_error
    model.forward = torch.compile(model.forward, backend="eager")
    assert compress(model, Compression(dk=8, dff=16), calibration).output_error == expected


def test_what_torch_compile_returned_is_the_model_inside(make_tiny, calibration):
    model, same = make_tiny("bert"), make_tiny("bert")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(**calibration[0])
        report, expected = (compress(each, Compression(dk=8, dff=16), calibration) for each in (compiled, same))
        assert report.output_error == expected.output_error
        assert [module.name for module in report.parts] == [module.name for module in expected.parts]
        assert torch.equal(compiled(**calibration[0])[0], same(**calibration[0])[0])
        prune_heads_(compiled, {"encoder.layer.0.attention.self": [1]})
        assert torch.equal(compiled(**calibration[0])[0], model(**calibration[0])[0])


@pytest.mark.parametrize("path", ["encoder.layer.0", ""])
def test_a_replaced_forward_pass_is_refused_and_named(path, make_tiny, calibration):
    """A copy would run the model's own modules, or lose what the function does."""
    model = make_tiny("bert")
    module = model.get_submodule(path)
    stock = module.forward
    module.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    for data in (calibration, None):
        with pytest.raises(UnsupportedModelError, match=rf"forward pass of {path or 'BertModel'} was replaced by a"):
            compress(model, Compression(dk=8), data)
    module.forward = torch.compile(module.forward, backend="eager")
    with pytest.raises(UnsupportedModelError, match="was replaced by a function"):
        compress(model, Compression(dk=8), calibration)


def test_a_model_may_run_while_it_is_converted(make_tiny, calibration, make_batch, monkeypatch):
    expected, model = make_tiny("bert"), make_tiny("bert")
    report = compress(expected, Compression(keep=0.6, solver=Solver(sweeps=2)), calibration)
    other, run, outputs = make_batch("bert", batch=2, length=7), gather.run_batch, []

    def also_run(of, batch):
        assert of is not model
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        with torch.no_grad():
            outputs.append(model(**other).last_hidden_state)
        return run(of, batch)

    for place in ("calibration.gather", "conversion.layers"):
        monkeypatch.setattr(f"collab_compress.{place}.run_batch", also_run)
    again = compress(model, Compression(keep=0.6, solver=Solver(sweeps=2)), calibration)
    assert again.output_error == report.output_error
    assert equal(state(model), state(expected))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.usefixtures("decomposed_anew")
def test_same_seed_same_bits(make_tiny, calibration, monkeypatch):
    """Under the caller's autocast, and where the device of the model has no float64."""

    def made():
        model = make_tiny("bert")
        compress(model, Compression(dk=8, dv=12, solver=Solver(sweeps=5)), calibration)
        return state(model)

    expected = made()
    assert equal(made(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(made(), expected)
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("cpu",))  # the decomposition is left to the CPU
    assert equal(made(), expected)


@pytest.mark.parametrize("chooses", [True, False])
def test_progress_names_every_step(chooses, make_tiny, calibration):
    running, fitted = ("running the model on calibration data", 0, None), ("fitted all layers", 2, 2)
    measuring, fitting = ([(f"{verb} encoder.layer.{n}", n, 2) for n in (0, 1)] for verb in ("measuring", "fitting"))
    chosen = [running, *measuring, ("measured all layers", 2, 2), running, *fitting, fitted]
    expected = [*chosen, ("measuring output error", 0, None)]
    if not chooses:
        expected = [*((f"{name}.attention.self", *counts) for name, *counts in fitting), fitted]
    compression, data = (Compression(keep=0.5), calibration) if chooses else (Compression(dk=8), None)
    steps = []
    compress(make_tiny("bert"), compression, data, progress=lambda *step: steps.append(step))
    assert steps == [("reading calibration data", 0, None), *expected]


def test_dtype_mode_and_what_is_frozen_are_kept(make_tiny):
    model = make_tiny("bert").to(torch.bfloat16).train().requires_grad_(False)
    compress(model, Compression(dk=8), calibration=None)
    kept = {(parameter.dtype, parameter.requires_grad) for parameter in model.parameters()}
    assert kept == {(torch.bfloat16, False)}
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("step", "wrapped", "call"),
    [
        ("attention.shared.factorize", False, 2),
        ("conversion.sequential.install_", False, 2),  # in the copies
        ("conversion.sequential.install_", False, 4),
        ("conversion.compress.install_refits", False, 1),
        ("conversion.compress.adopt_", True, 1),
        ("conversion.maps.record_edit_", True, 1),
        ("conversion.maps.record_edit_", False, 1),
    ],
)
def test_nothing_changes_when_interrupted_after_a_step(
    step, wrapped, call, make_tiny, calibration, monkeypatch, tmp_path
):
    around = make_tiny("bert", BertForSequenceClassification)
    model = around.bert if wrapped else around
    before, config = state(around), around.config.to_dict()
    target, calls = f"collab_compress.{step}", itertools.count(1)
    take = pkgutil.resolve_name(target)
    attributes = {name: set(vars(part)) for name, part in around.named_modules()}

    def interrupt(*args, **options):
        result = take(*args, **options)
        if next(calls) == call:
            raise KeyboardInterrupt
        return result

    compression = Compression(dk=8, dv=12, dff=16, solver=Solver(sweeps=1))
    with monkeypatch.context() as patched:
        patched.setattr(target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(model, compression, calibration)
    assert equal(before, state(around))
    assert around.config is around.bert.config
    assert around.config.to_dict() == config
    assert attributes == {name: set(vars(part)) for name, part in around.named_modules()}
    assert not is_converted(around.bert.encoder.layer[0].attention.self)
    report = compress(model, compression, calibration)
    assert report.parameters_after < report.parameters_before
    around.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).intermediate_size == 16


def test_models_of_one_config_stay_apart(make_tiny, calibration):
    model = make_tiny("bert")
    other = BertModel(model.config)
    compress(model, Compression(dff=16), calibration)
    assert (model.config.intermediate_size, other.config.intermediate_size) == (16, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: Compression(dk=0), "dk is 0; expected at least 1"),
        (lambda: Compression(dk=np.float64(3.5)), r"^dk is 3\.5; "),  # not np.float64(3.5)
        (lambda: Solver(damping=np.float64(-1)), r"^damping is -1\.0; "),
        (lambda: Compression(dk=8, solver=Solver(device="abacus")), "device 'abacus' cannot be used"),
        (lambda: Compression(dk=25), r"dk is 25, but 3 heads × 8 = 24 is exact already; pass dk between 1 and 24"),
        (lambda: Compression(dk=8, solver=Solver(method="magic")), "unknown solver 'magic'; expected one of als"),
        (lambda: Compression(dk=8, solver=Solver(sweeps=10**30)), f"sweeps is {10**30}; expected at most 1,000,000"),
        (lambda: Compression(dv=8, head_dim=4), "head_dim, solver and sweeps apply to queries and keys; pass dk"),
        (
            lambda: Compression(dk=8, head_dim=4, solver=Solver(method="parafac")),
            "with parafac heads read all channels; leave out head_dim, or pass solver als",
        ),
        (lambda: CalibrationOptions(length=2.5), r"length is 2\.5; expected a whole number"),
        (
            lambda: Compression(dk=8, solver=Solver(damping=1e308)),
            r"damping is 1e\+308; expected 0 or more, up to 1e\+06",
        ),
        (lambda: Compression(dk=8, solver=Solver(seed=2**32)), "seed is 4294967296; expected at most 4,294,967,295"),
        (lambda: Compression(dk=8, solver=Solver(refit="no")), "refit is 'no'; expected True, False or None"),
        (lambda: Compression(dk=8, solver=Solver(bf16="yes")), "bf16 is 'yes'; expected True or False"),
        (lambda: Compression(dk=1, modules=["*"]), r"modules is of type list: \['\*'\]; expected str"),
        (lambda: Compression(dk=8, modules="nothing*"), r"nothing\*"),
        (lambda: {"dk": 12}, "compression is of type dict: .*; expected Compression"),
    ],
)
def test_bad_options_say_what_to_do(make_tiny, options, message):
    with pytest.raises(CollabCompressError, match=message):
        compress(make_tiny("bert"), options(), calibration=None)


def test_widths_may_be_numbers_of_numpy(make_tiny, tmp_path):
    model = make_tiny("bert")
    compression = Compression(dk=np.int64(8), dv=np.int32(12), solver=Solver(seed=np.int64(3)))
    compress(model, compression, calibration=None)
    model.save_pretrained(tmp_path)
    assert {factors.rank for factors in read_factors(AutoModel.from_pretrained(tmp_path)).values()} == {8}


def test_converting_a_module_twice_is_refused(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(dk=8, modules="*layer.1*"), calibration=None)
    before = state(model)
    with pytest.raises(
        CompressionError,
        match=r"^encoder\.layer\.1\..*: its queries and keys are already converted; leave",
    ):
        compress(model, Compression(dk=8), calibration=None)
    assert equal(before, state(model))


def test_dense_modules_can_be_converted_later(make_tiny, make_batch, tmp_path, load_cleanly):
    """Ranks and forms by kind and layer: the same as each by itself, through a checkpoint, and back."""
    dense, batch = make_tiny("marian"), make_batch("marian")
    parts = [
        Compression(dk=7, modules="encoder.layers.0*"),
        Compression(dk=24, modules="encoder.layers.1*"),
        Compression(dk=9, head_dim=4, modules="decoder*self_attn"),
        Compression(dk=12, modules="*encoder_attn"),
    ]
    model, factors = copy.deepcopy(dense), {}
    for part in parts:
        alone = copy.deepcopy(dense)
        expected = compress(alone, part, calibration=None)
        before = model.num_parameters()
        report = compress(model, part, calibration=None)
        assert [replace(module, seconds=0) for module in report.of("dk")] == [
            replace(module, seconds=0) for module in expected.of("dk")
        ]
        assert (report.parameters_before, report.parameters_after) == (before, model.num_parameters())
        factors |= read_factors(alone)
    loaded = read_factors(model)
    assert loaded.keys() == factors.keys()
    assert sorted(module_factors.rank for module_factors in loaded.values()) == [7, 9, 9, 12, 12, 24]
    assert all(torch.equal(loaded[name].key, factors[name].key) for name in loaded)
    model.save_pretrained(tmp_path)
    again = load_cleanly(type(model), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model(**batch)[0])
    expand(again)
    assert edits_of(again) == []
    assert again.state_dict().keys() == dense.state_dict().keys()


def test_output_error_of_a_second_conversion_is_that_of_the_second_alone(make_tiny, calibration):
    model = make_tiny("bert")
    compress(model, Compression(dk=8, modules="*layer.0*"), calibration)
    report = compress(model, Compression(dk=24, modules="*layer.1*"), calibration)
    assert report.output_error.relative_error < 1e-5


def test_a_sentence_transformer_is_converted_by_its_transformers_model(minilm_path, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(minilm_path), device="cpu")
    texts = ["a dog runs", "two men play a long game of chess in the park"]
    dense = model.encode(texts)
    report = compress(
        model,
        Compression(dk=96, solver=Solver(sweeps=1, refit=False)),
        calibration_options=CalibrationOptions(sequences=16, length=16),
    )
    assert report.output_error.sequences == 2
    converted = model.encode(texts)
    assert len(read_factors(model)) == 6
    assert not np.allclose(converted, dense, atol=1e-3)
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode(texts), converted, atol=1e-6)
    expand(again)
    assert read_factors(again) == {}


def test_the_towers_of_a_router_are_converted_one_after_the_other(make_tiny, tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    for name, seed in (("query", 1), ("document", 2)):
        make_tiny("bert", seed=seed).save_pretrained(tmp_path / name)
        tokenizer = word_tokenizer()
        tokenizer.save_pretrained(tmp_path / name)
    query, document = ([Transformer(str(tmp_path / name)), Pooling(24)] for name in ("query", "document"))

    def routed(query_modules, document_modules):
        router = Router.for_query_document(query_modules=query_modules, document_modules=document_modules)
        return SentenceTransformer(modules=[router], device="cpu")

    model = routed(query, document)
    paths = ("0.sub_modules.query.0", "0.sub_modules.document.0")
    message = re.escape(f"pass one after the other: model.get_submodule({paths[0]!r}), model.get_submodule(")
    with pytest.raises(UnsupportedModelError, match=message):
        compress(model, Compression(dff=16))
    for path in paths:
        compress(model.get_submodule(path), Compression(dff=16), sentences(32))  # with its own tokenizer
    widths = [part.out_features for name, part in model.named_modules() if name.endswith("intermediate.dense")]
    assert widths == [16] * 4
    shared = routed(query, [query[0], Pooling(24)])
    assert compress(shared, Compression(dv=12), sentences(32)).of("dv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"it holds models in .*document, .*query: pass one of them"):
        find_directory(str(tmp_path))


def test_values_that_are_all_zero(make_tiny, calibration):
    model = make_tiny("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0 if ".self.value." in name else 1)
    report = compress(model, Compression(dv=12), calibration)
    assert report.output_error.relative_error < 1e-6
    assert [part.data_error for part in report.of("dv")] == [0, 0]


def test_a_width_that_keep_chose_is_not_called_rounded():
    torch.manual_seed(0)
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 2, "max_position_embeddings": 40}
    model = BartModel(BartConfig(vocab_size=61, pad_token_id=0, init_std=0.4, **sizes)).eval()
    draws = [torch.randint(5, 61, (4, 12)) for _ in range(8)]
    batches = [{"input_ids": ids, "decoder_input_ids": ids.flip(1)} for ids in draws]
    report = compress(model, Compression(keep=0.6), batches)
    assert len({part.width for part in report.of("dv")}) > 1
    assert not [warning for warning in report.warnings if "rounded" in warning]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "^Linear is no Transformers model; pass a transformers.PreTrainedModel"),
        (nn.Sequential(nn.Linear(2, 2)), "^Sequential is no Transformers model; pass a"),
        (nn.Sequential(), "^Sequential is no Transformers model; pass a"),
        (None, "^NoneType is no Transformers model; pass a"),
        (BertEncoder(BertConfig(num_hidden_layers=1)), "^BertEncoder is no Transformers model; pass a"),
        (SimpleNamespace(module=SimpleNamespace(config=1)), "pass the model inside, model.module"),
    ],
)
def test_other_objects_than_transformers_models_are_refused(model, message):
    for function in (
        lambda: compress(model, Compression(dk=8), calibration=None),
        lambda: expand(model),
        lambda: read_factors(model),
        lambda: mix_heads_(model),
        lambda: alphas_of(model),
        lambda: merge_alphas_(model),
        lambda: prune_heads_(model, {}),
        lambda: head_importance(model, []),
        lambda: HeadMask(model),
        lambda: Recorder(model),
        lambda: DropHead(model, 0.1),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            function()


def test_few_calibration_vectors_are_warned_of(make_tiny, calibration, caplog):
    few = [{name: value[:3, :6] for name, value in batch.items()} for batch in calibration[:2]]
    with caplog.at_level(logging.WARNING, logger="collab_compress"):
        report = compress(make_tiny("bert"), Compression(dk=8), few)
    assert len(report.warnings) == 1
    count = report.of("dk")[0].vectors[0]
    assert (
        f"self and 1 more modules saw few calibration vectors: {count} of width 24, where 4 times the width would "
        "be 96" in report.warnings[0]
    )
    assert report.warnings[0] in caplog.messages
    assert report.to_dict()["warnings"] == report.warnings


@pytest.mark.usefixtures("decomposed_anew")
@pytest.mark.parametrize("broken", [1, 10**6])
def test_breakdowns_of_the_solver_are_warned_of(make_tiny, monkeypatch, caplog, broken):
    cholesky, calls = torch.linalg.cholesky_ex, itertools.count()

    def fails(matrix, **options):
        root, info = cholesky(matrix, **options)
        return (root, torch.ones_like(info)) if next(calls) < broken else (root, info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    model = make_tiny("bert")
    report = compress(model, Compression(dk=8, modules="*layer.0*"), calibration=None)
    assert report.of("dk")[0].breakdowns == 1
    assert report.of("dk")[0].converged == (broken == 1)
    assert "layer.0.attention.self: 1 sweeps of the solver met a singular system; it " in report.warnings[0]
    assert report.warnings[0] in caplog.messages
    assert all(torch.isfinite(value).all() for value in state(model).values())


def test_output_error_holds_the_outputs_of_one_batch(make_tiny, calibration):
    model, alive, most = make_tiny("bert", BertForMaskedLM), [], []

    def watch(_, __, output):
        gc.collect()
        alive.append(weakref.ref(output.logits))
        most.append(sum(reference() is not None for reference in alive))

    model.register_forward_hook(watch)
    assert measure_output_error(model, model, calibration).sequences == len(calibration) * len(
        calibration[0]["input_ids"]
    )
    assert len(most) == 2 * len(calibration)
    assert max(most) == 2


class Offset(nn.Module):
    def __init__(self, head, offset):
        super().__init__()
        self.head, self.offset = head, offset

    def forward(self, hidden):
        return self.head(hidden) + self.offset


@pytest.mark.parametrize(
    ("model_class", "head"),
    [(BertForMaskedLM, "cls.predictions.decoder"), (BertForTokenClassification, "classifier")],
)
def test_output_error_of_logits_is_that_of_log_probabilities(model_class, head, make_tiny, calibration):
    dense = make_tiny("bert", model_class)
    dense.get_submodule(head).weight.data *= 20
    shifted, other = copy.deepcopy(dense), copy.deepcopy(dense)
    for model in (shifted, other):
        model.set_submodule(head, Offset(copy.deepcopy(model.get_submodule(head)), 100.0))
    assert measure_output_error(shifted, dense, calibration).relative_error < 1e-5
    torch.manual_seed(1)
    weight = other.get_submodule(head).head.weight
    weight.data = torch.randn_like(weight) * weight.std()
    output_error = measure_output_error(other, shifted, calibration)
    assert output_error.output == "log probabilities"
    assert output_error.relative_error > 0.5
    squares = torch.zeros(2)
    for batch in calibration:
        mask = batch["attention_mask"].bool()
        with torch.no_grad():
            old, new = (model(**batch).logits[mask].log_softmax(-1) for model in (shifted, other))
        squares += torch.stack([(new - old).square().sum(), (old - old.mean(-1, True)).square().sum()])
    assert output_error.relative_error == pytest.approx(float(squares[0] / squares[1]) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "regression")])
def test_logits_without_classes_are_compared_as_they_are(labels, problem, calibration):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=61, hidden_size=24, num_attention_heads=3, num_hidden_layers=1)
    config.num_labels, config.problem_type = labels, problem
    dense = BertForSequenceClassification(config).eval()
    other = copy.deepcopy(dense)
    other.classifier = Offset(other.classifier, 1.0)
    output_error = measure_output_error(other, dense, calibration)
    assert output_error.output == "logits"
    assert output_error.relative_error > 1


@pytest.mark.parametrize(
    ("device", "rank", "expected"),
    [("cuda", "1", "cuda:1"), ("cuda", "7", "cuda"), ("cuda:0", "1", "cuda:0"), ("cuda", "", "cuda")],
)
def test_cuda_is_the_gpu_of_each_process(monkeypatch, device, rank, expected):
    tried = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda *_, device, **__: tried.append(device) or torch.ones(1))
    assert working_device(device) == expected
    assert tried == [expected]


@pytest.mark.parametrize("shape", [(4, 1, 12, 12), (4, 12, 12)])
def test_masks_of_other_shapes_are_refused(make_tiny, calibration, shape):
    batch = {**calibration[0], "attention_mask": torch.ones(shape)}
    message = r"a calibration batch's attention_mask has shape \(4, .*expected an attention mask \(batch, "
    with pytest.raises(CalibrationError, match=message):
        compress(make_tiny("bert"), Compression(dk=8), [batch, batch])
    listed = {**calibration[0], "attention_mask": calibration[0]["attention_mask"].tolist()}
    with pytest.raises(CalibrationError, match="attention_mask is a list; expected an attention mask"):
        compress(make_tiny("bert"), Compression(dk=8), [listed, listed])


class WithAdapter(nn.Linear):
    """A linear layer that does more."""

    def forward(self, x):
        return super().forward(x) + 1


def first(model):
    return model.encoder.layer[0].attention.self


REFUSED = {
    "quantized": (
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "bitsandbytes"}),
        "BertModel is quantized; convert the unquantized checkpoint",
    ),
    "flex attention": (
        lambda model: setattr(model.config, "_attn_implementation", "flex_attention"),
        r"the model is set to 'flex_attention'; call model\.set_attn_implementation\('sdpa'\) first",
    ),
    "config": (
        lambda model: setattr(model.config, "lock", threading.Lock()),
        r"BertModel cannot be copied, .* \(cannot pickle",
    ),
    "attribute": (
        lambda model: setattr(model.encoder, "lock", threading.Lock()),
        r"BertModel cannot be copied, .*remove the hook",
    ),
    "hook of a model": (
        lambda model: model.encoder.register_forward_hook(partial(print, threading.Lock())),
        r"BertModel cannot be copied, .*remove the hook",
    ),
    "not finite": (
        lambda model: torch.nn.init.constant_(first(model).key.weight, float("inf")),
        r"layer\.0\.attention\.self\.key\.weight holds NaN or infinite",
    ),
    "of eight bits": (
        lambda model: first(model).query.to(torch.float8_e4m3fn),
        "self.query: weights are .* of torch.float8_e4m3fn; convert before",
    ),
    "other class": (
        lambda model: setattr(first(model), "query", WithAdapter(24, 24)),
        "got WithAdapter, expected a plain Linear",
    ),
    "buffer": (
        lambda model: first(model).value.register_buffer("extra", torch.ones(2)),
        r"layer\.0\.attention\.self\.value \(Linear\) has extra, a parameter, buffer or module of its own",
    ),
    "converted": (
        lambda model: compress(model, Compression(dk=8), calibration=None),
        r"layer\.0\.attention\.self: its queries and keys are already converted",
    ),
}


def unread():
    pytest.fail("data were read")
    yield


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_is_checked_before_data_are_read_whatever_is_chosen(case, make_tiny):
    spoil_, message = REFUSED[case]
    model = make_tiny("bert")
    spoil_(model)
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    for options in ({"dk": 8, "dv": 12, "dff": 16}, {"keep": 0.5}):
        with pytest.raises(CollabCompressError, match=message):
            compress(model, Compression(**options), unread())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == weights
    if case in ("quantized", "flex attention", "config"):
        with pytest.raises(CollabCompressError, match=message):
            plan(model, unread())


class TwoBodies(BertPreTrainedModel):
    """A model with attention outside its base model."""

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.other = BertModel(config), BertModel(config)
        self.post_init()


def test_attention_outside_the_base_model_is_refused_before_anything_changes(make_tiny):
    model = TwoBodies(make_tiny("bert").config)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=r"other\.encoder.* lies outside the base model 'bert'"):
        compress(model, Compression(dk=8), calibration=None)
    assert equal(before, state(model))
    compress(model, Compression(dk=8, modules="bert.*"), calibration=None)
    assert {name.partition(".")[0] for name in read_factors(model)} == {"bert"}


def test_batches_that_do_not_fit_the_model(make_tiny, calibration):
    def fail(*_):
        raise NotImplementedError

    model = make_tiny("bert", BertForMultipleChoice)
    with pytest.raises(CalibrationError, match="BertForMultipleChoice cannot run on the given batches"):
        compress(model, Compression(dk=8), [{"input_ids": calibration[0]["input_ids"][0, 0]}])
    model.register_forward_pre_hook(fail)
    with pytest.raises(CalibrationError, match=r"cannot run on the given batches \(NotImplementedError\)"):
        compress(model, Compression(dk=8), calibration)
    for options, message in (
        ({"calibration_options": {}}, "calibration_options is of type dict: {}"),
        ({"tokenizer": "bert-base"}, "tokenizer is of type str: 'bert-base'"),
    ):
        with pytest.raises(CalibrationError, match=message):
            compress(make_tiny("bert"), Compression(dk=8), calibration, **options)


def test_outputs_that_are_not_finite_are_refused(make_tiny, calibration):
    model = make_tiny("bert", BertForSequenceClassification)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(CalibrationError, match="logits of BertForSequenceClassification is not finite"):
        compress(model, Compression(dk=8, solver=Solver(refit=False)), calibration)
    with pytest.raises(CompressionError, match=r"classifier\.bias holds NaN"):  # it would be run to refit
        compress(model, Compression(dk=8), calibration)
    assert not is_converted(model)


@pytest.mark.parametrize(
    ("rows", "odd", "used", "held_back"),
    [
        ((16, 16, 8), {}, [7, 14, 14], [1, 2, 2]),
        ((4,) * 8, {}, [3] * 4 + [4] * 4, [1] * 4),
        ((3, 20, 1), {}, [1, 3, 17], [3]),
        ((9,), {}, [8], [1]),
        ((1,), {}, [1], []),
        ((1, 1), {}, [1], [1]),
        ((), {}, [], []),
        ((16,) * 64, {}, [15] * 64, [1] * 64),  # 64 at most
        ((8000,), {}, [7936], [64]),
        ((2, 6), {"odd": torch.ones(7)}, [2], [6]),  # cannot be divided
        ((6,), {"odd": torch.ones(7)}, [6], []),
        ((16,) * 80, {"odd": torch.ones(7)}, [16] * 76, [16] * 4),
    ],
)
def test_an_eighth_is_held_back_whatever_the_batches(rows, odd, used, held_back):
    parts = split_held_back([{"x": torch.arange(count), **odd} for count in rows])
    assert [sorted(len(batch["x"]) for batch in group) for group in parts] == [used, held_back]
    if rows == (9,):
        assert [batch["x"].tolist() for group in parts for batch in group] == [[0, 1, 2, 3, 5, 6, 7, 8], [4]]


def test_one_batch_is_split_to_measure_output_error(make_tiny, calibration):
    assert compress(make_tiny("bert"), Compression(dk=8), calibration[:1]).output_error.sequences == 1
    single = [{name: value[:1] for name, value in calibration[0].items()}]
    model = make_tiny("bert")
    model.config.return_dict = False  # outputs are tuples
    padding = [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])} for batch in calibration]
    assert measure_output_error(model, model, calibration).output == "last_hidden_state"
    assert measure_output_error(model, model, padding) is None
    assert compress(model, Compression(dk=8), single).output_error is None


def test_parafac_without_tensorly_names_the_package_to_install(make_tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorly", None)
    with pytest.raises(CompressionError, match="pip install tensorly"):
        compress(make_tiny("bert"), Compression(dk=8, solver=Solver(method="parafac")), calibration=None)


@pytest.mark.usefixtures("decomposed_anew")
def test_parafac_converts_too(make_tiny):
    solvers = Solver(method="parafac", sweeps=20), Solver()
    report, ours = (compress(make_tiny("bert"), Compression(dk=12, solver=solver), None) for solver in solvers)
    for one, other in zip(report.of("dk"), ours.of("dk"), strict=True):
        assert 0 < other.weight_error <= one.weight_error


HOOKS = {
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "hook": lambda layer: layer.register_forward_hook(lambda _, __, output: 2 * output),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "forward": lambda layer: setattr(layer, "forward", lambda x: 0 * x),
    "accelerate": lambda layer: add_hook_to_module(layer, AlignDevicesHook("cpu")),  # the only one that may stay
}
COMPUTED = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "weight norm": parametrizations.weight_norm,
}


@pytest.mark.parametrize("path", ["self.query", "output.dense"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_kept_or_refused(kind, path, make_tiny, batch):
    model = make_tiny("bert")
    expected = model(**batch)[0]
    HOOKS[kind](model.encoder.layer[1].attention.get_submodule(path))
    hooked = model(**batch)[0]
    assert kind in ("backward hook", "accelerate") or not torch.allclose(hooked, expected)
    if kind == "accelerate" or (path == "output.dense" and kind in ("hook", "backward hook")):  # the layer stays
        compress(model, Compression(dk=24, dv=24), calibration=None)
        torch.testing.assert_close(model(**batch)[0], hooked, atol=1e-4, rtol=1e-4)
        return
    with pytest.raises(UnsupportedModelError, match=rf"layer\.1\.attention\.{path} \(Linear\) has a .*; remove it"):
        compress(model, Compression(dk=8, dv=12), calibration=None)
    torch.testing.assert_close(model(**batch)[0], hooked)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("prune", "attention.self.query"), ("weight norm", "attention.output.dense"), ("prune", "intermediate.dense")],
)
def test_computed_weights_are_refused_wherever_they_are(kind, path, make_tiny, calibration):
    """They would be saved, and not loaded."""
    model = make_tiny("bert")
    COMPUTED[kind](model.encoder.layer[1].get_submodule(path))
    for function in (
        lambda: compress(model, Compression(dk=8), calibration=None),
        lambda: compress(model, Compression(dff=8), calibration),
        lambda: mix_heads_(model),
        lambda: HeadGates(model),
        lambda: prune_heads_(model, {"encoder.layer.0.attention.self": [0]}),
    ):
        with pytest.raises(
            UnsupportedModelError, match=rf"weight of encoder\.layer\.1\.{path} is computed from others"
        ):
            function()


def test_inference_mode_leaves_parameters_that_train(make_tiny, batch):
    """The caller's random number generator does not advance."""
    model, dense, state = make_tiny("bert"), make_tiny("bert"), torch.get_rng_state()
    for change in (
        lambda: compress(model, Compression(dk=9, dv=12, dff=16), [batch, batch]),
        lambda: refit_(model, dense, None, [batch] * 2),
        lambda: expand(model),
        lambda: prune_heads_(model, {"encoder.layer.0.attention.self": [0]}),
        lambda: mix_heads_(model),
    ):
        with torch.inference_mode():
            change()
        model(**batch)[0].sum().backward()
        assert not any(parameter.is_inference() for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_models_made_for_inference_are_refused(make_tiny):
    with torch.inference_mode():
        model = make_tiny("bert")
    for function in (
        lambda: compress(model, Compression(dk=8), unread()),
        lambda: compress(model, Compression(keep=0.5), unread()),
        lambda: plan(model, unread()),
        lambda: mix_heads_(model),
        lambda: prune_heads_(model, {"encoder.layer.0.attention.self": [0]}),
        lambda: expand(model),
    ):
        with pytest.raises(CollabCompressError, match=r"of BertModel was made inside torch\.inference_mode\(\)"):
            function()


@pytest.mark.parametrize(("heads", "dk", "rounded"), [(2, 16, ()), (2, 12, ("dk 12 was rounded up to 16",))])
def test_widths_beyond_the_heads_of_keys_are_refused(heads, dk, rounded):
    """The message names the heads of keys and values."""
    model = grouped_queries(heads)
    exact = f"dk is 32, but {heads} key–value heads × 8 = {8 * heads} is exact already"
    with pytest.raises(CompressionError, match=exact):
        compress(model, Compression(dk=32), None)
    warnings = compress(model, Compression(dk=dk, dv=8 * heads), None).warnings
    assert all(text.startswith(start) for text, start in zip(warnings, rounded, strict=True))


def grouped_queries(key_value_heads):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaModel(LlamaConfig(vocab_size=61, num_key_value_heads=key_value_heads, **sizes))


def test_weights_that_layers_shared_are_said_to_be_separate(make_tiny, calibration):
    model = make_tiny("bert")
    first, second = (layer.attention.self for layer in model.encoder.layer[:2])
    second.key.weight = first.key.weight
    (warning,) = (text for text in compress(model, Compression(dk=8), calibration).warnings if "shared" in text)
    names = [f"encoder.layer.{place}.attention.self.key.weight" for place in (0, 1)]
    assert warning.startswith(f"1 weights that several layers shared, such as {names[0]} and {names[1]}, are sep")
    unchanged = make_tiny("bert")
    unchanged.encoder.layer[1] = unchanged.encoder.layer[0]  # one layer in two places stays one
    assert not any("shared" in text for text in compress(unchanged, Compression(dk=8), calibration).warnings)
    again = make_tiny("bert")
    again.encoder.layer[1] = again.encoder.layer[0]
    with pytest.raises(UnsupportedModelError, match=r"else \(its encoder\.layer\.1\..* is missing, or shared"):
        compress(again, Compression(dff=8), calibration)
