"""Conversion, attention and heads on a GPU: the same as on the CPU."""

import copy
from itertools import product

import pytest
import torch
from kernel_inputs import draw_inputs, oracle
from tiny_families import TINIES, build, generated, inputs, run

from collab_compress import Compression, HeadMask, Solver, compress, expand, head_importance, read_factors
from collab_compress.calibration import calibration_batches
from collab_compress.heads import DropHead, Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: what runs on CUDA was not tried")
NAMES = ["albert", "bert", "distilbert", "gpt2", "marian", "opt", "t5", "vit"]
CLOSE = {torch.float32: {"atol": 2e-4, "rtol": 2e-3}, torch.bfloat16: {"atol": 0.15, "rtol": 0.1}}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Use float32 products, not TF32, so that both devices compute alike."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_gpu(batch):
    return {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize("head_dim", [9, 4])
@pytest.mark.parametrize("name", NAMES)
def test_conversion_outputs_and_gradients_are_those_of_the_cpu(name, head_dim):
    model, data = build(name), [inputs(name, seed) for seed in range(4)]
    ours = copy.deepcopy(model).cuda()
    options = Compression(dk=9, head_dim=head_dim)
    expected, actual = compress(model, options, data), compress(ours, options, data)
    assert {parameter.device.type for parameter in ours.parameters()} == {"cuda"}
    for one, other in zip(actual.of("dk"), expected.of("dk"), strict=True):
        assert one.data_error == pytest.approx(other.data_error, rel=0.05)
        assert (one.vectors, one.breakdowns) == (other.vectors, 0)
    assert actual.output_error.relative_error == pytest.approx(expected.output_error.relative_error, rel=0.25)
    for factors in read_factors(ours).values():
        assert factors.query.device.type == "cuda"

    batch = data[0]
    compress(model := build(name), options, calibration=None)
    for implementation, dtype in product(("eager", "sdpa"), CLOSE):
        model.set_attn_implementation(implementation)
        expected = run(model, batch)
        rounded = {path: part.to(dtype) if part.is_floating_point() else part for path, part in on_gpu(batch).items()}
        outputs = run(copy.deepcopy(model).to("cuda", dtype), rounded)
        assert outputs.dtype == dtype
        scale = expected.abs().max().item()
        torch.testing.assert_close(outputs.float().cpu() / scale, expected / scale, **CLOSE[dtype])

    ours = copy.deepcopy(model).cuda()
    for network, arguments in ((model, batch), (ours, on_gpu(batch))):
        network(**arguments)[0].square().mean().backward()
    for (path, one), (_, other) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), path
        if one.grad is not None:
            scale = one.grad.abs().max().item() or 1.0
            torch.testing.assert_close(other.grad.cpu() / scale, one.grad / scale, atol=2e-3, rtol=2e-2, msg=path)


def test_generation_is_that_of_the_cpu(generator):
    model, batch = build(generator, TINIES[generator].generates), inputs(generator)
    narrow = copy.deepcopy(model)
    compress(model, Compression(dk=9), calibration=None)
    compress(narrow, Compression(dk=9, head_dim=4), calibration=None)
    for one, beams in product((model, narrow), (1, 3)):
        options = {"do_sample": False, "num_beams": beams}
        ours = generated(copy.deepcopy(one).cuda(), on_gpu(batch), **options)
        assert torch.equal(ours.cpu(), generated(one, batch, **options))


@pytest.mark.parametrize("name", ["bert", "marian", "gpt2"])
def test_heads_are_read_masked_dropped_and_scored(name):
    model, batch = build(name), inputs(name)
    compress(model, Compression(dk=9), calibration=None)
    ours = copy.deepcopy(model).cuda()
    read = []
    for network, arguments in ((model, batch), (ours, on_gpu(batch))):
        with torch.no_grad(), Recorder(network, ["outputs", "probs"]) as recorder:
            network(**arguments)
            read.append(recorder.take())
    for one, other in zip(*read, strict=True):
        torch.testing.assert_close(other.outputs.cpu(), one.outputs, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(other.probs.cpu(), one.probs, atol=1e-3, rtol=1e-3)
    with HeadMask(ours) as mask, torch.no_grad():
        unmasked = ours(**on_gpu(batch))[0]
        mask.set({path: torch.zeros(heads) for path, heads in mask.heads.items()})
        assert not torch.allclose(ours(**on_gpu(batch))[0], unmasked)
    drop = DropHead(ours.train(), 0.5)
    torch.manual_seed(0)
    one, other = (ours(**on_gpu(batch))[0] for _ in range(2))
    assert not torch.allclose(one, other)
    drop.remove()

    def loss(outputs, _):
        return outputs[0].square().flatten(1).mean(1)

    expected, importance = head_importance(model, [batch], loss), head_importance(ours, [on_gpu(batch)], loss)
    for path, scores in expected.items():
        torch.testing.assert_close(importance[path], scores, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_those_of_the_formula(deterministic):
    gradients = []
    for place in ("cpu", "cuda"):
        inputs = draw_inputs(causal=True).to(place)
        for leaf in inputs.leaves:
            leaf.requires_grad_()
        torch.use_deterministic_algorithms(deterministic)
        try:
            outputs = oracle(inputs)[1] if place == "cpu" else inputs.call()[0]
            gradients.append(torch.autograd.grad(outputs.sin().sum(), inputs.leaves))
        finally:
            torch.use_deterministic_algorithms(False)
    for expected, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-9, rtol=1e-6)


def test_a_checkpoint_goes_through_the_gpu_and_back(make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert").cuda()
    compress(model, Compression(dk=9), calibration=None)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**on_gpu(batch))[0].cpu()
        torch.testing.assert_close(load_cleanly(type(model), tmp_path)(**batch)[0], expected, atol=1e-3, rtol=1e-3)
    expand(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}


def test_the_real_model(minilm, minilm_tokenizer):
    batches = calibration_batches("synthetic", minilm, minilm_tokenizer)
    options = Compression(dk=128, solver=Solver(sweeps=20))
    full, half = copy.deepcopy(minilm).cuda(), copy.deepcopy(minilm).to("cuda", torch.bfloat16)
    expected, full, half = (compress(model, options, batches) for model in (minilm, full, half))
    for report in (full, half):
        assert report.output_error.relative_error == pytest.approx(expected.output_error.relative_error, rel=0.1)
        for one, other in zip(report.of("dk"), expected.of("dk"), strict=True):
            assert one.data_error == pytest.approx(other.data_error, rel=0.02)
