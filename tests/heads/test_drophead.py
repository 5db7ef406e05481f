import pytest
import torch
from forms import checkpoint_, converted, in_pairs, in_turns, projected_heads
from two_processes import run_both

from collab_compress.heads import DropHead, Recorder
from collab_compress.heads.drophead import head_scales


def drawn_scales(draws, heads, p, seed=0):
    torch.manual_seed(seed)
    return head_scales(torch.rand(draws, heads), torch.tensor(p))


def test_a_head_drops_with_probability_p_and_the_expectation_is_the_undropped_output():
    draws = 40_000
    scales = drawn_scales(draws, 12, 0.3)
    error = scales.std(0) / draws**0.5
    assert ((scales.mean(0) - 1).abs() < 4 * error).all()
    dropped = (scales == 0).float()
    assert dropped.mean().item() == pytest.approx(0.3, abs=4 * (0.21 / dropped.numel()) ** 0.5)


def test_one_head_is_kept_at_random_where_all_would_drop():
    scales = drawn_scales(10_000, 2, 0.9)
    assert torch.isfinite(scales).all()
    kept_heads = (scales > 0).sum(1)
    assert kept_heads.min() == 1  # 81 % of the draws would drop both
    alone = scales[kept_heads == 1] > 0
    share = alone[:, 0].float().mean().item()
    assert share == pytest.approx(0.5, abs=4 * 0.5 / len(alone) ** 0.5)
    assert set(scales.unique().tolist()) == {0.0, 1.0, 2.0}


@pytest.fixture
def model(family, form, make_tiny, set_dropout_):
    return set_dropout_(converted(make_tiny, family, form), 0.0)


@in_turns
def test_heads_are_dropped_just_before_the_output_projection(model, batch, implementation):
    model.set_attn_implementation(implementation)
    drophead, recorder = DropHead(model.train(), 0.5), Recorder(model)
    _, dropped = projected_heads(model, batch)
    scales = set()
    for actual, record in zip(dropped, recorder.take(), strict=True):
        ratio = (actual * record.outputs).sum((1, 3)) / record.outputs.square().sum((1, 3))  # (B, H)
        torch.testing.assert_close(actual, ratio[:, None, :, None] * record.outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ratio.sum(1), torch.full((3,), 3.0))
        scales |= {tuple(round(value, 2) for value in row) for row in ratio.tolist()}
    assert len(scales) > 1  # each sample and layer draws separately
    drophead.remove()
    recorder.remove()


@in_pairs
def test_naive_drophead_sets_heads_to_zero_and_nothing_else(model, batch):
    drophead, recorder = DropHead(model.train(), 0.8, rescale=False), Recorder(model)
    counts = set()
    for _ in range(4):
        _, dropped = projected_heads(model, batch)
        for actual, record in zip(dropped, recorder.take(), strict=True):
            zero = (actual == 0).all(3).all(1)  # (B, H)
            torch.testing.assert_close(actual, record.outputs * ~zero[:, None, :, None])
            counts |= set(zero.sum(1).tolist())
    assert model.config.num_attention_heads in counts  # all heads may drop
    assert len(counts) > 1
    drophead.remove()
    recorder.remove()


@in_pairs
def test_training_drops_by_the_seed_and_evaluation_is_not_touched(model, batch):
    before = model(**batch)[0]
    with_drophead = DropHead(model, 0.9)
    assert torch.equal(model.eval()(**batch)[0], before)
    assert not torch.allclose(model.train()(**batch)[0], before)
    with_drophead.remove()
    DropHead(model, 0.5)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(**batch)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_kinds(make_tiny, make_batch):
    model = make_tiny("marian").train()
    DropHead(model, 0.5, kinds=("cross",))
    with Recorder(model) as recorder:
        _, projected = projected_heads(model, make_batch("marian"))
        records = recorder.take()
    for actual, record in zip(projected, records, strict=True):
        assert torch.equal(actual, record.outputs) == (record.site.kind != "cross")


def test_gradient_checkpointing_repeats_the_same_draw(make_tiny, batch):
    model = make_tiny("bert").train()
    gradients = []
    DropHead(model, 0.5)
    for on in (False, True):
        if on:
            checkpoint_(model)
        model.zero_grad()
        torch.manual_seed(3)
        model(**batch)[0].square().mean().backward()
        gradients.append(model.embeddings.word_embeddings.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.slow
def test_a_schedule_does_not_compile_anew(make_tiny, batch):
    model = make_tiny("bert").train()
    drophead, compilations, outputs = DropHead(model, 0.0), [], []

    def count(graph, _):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for p in (0.0, 0.4, 0.8):
        drophead.p = p
        torch.manual_seed(0)
        outputs.append(compiled(**batch)[0])
        torch.manual_seed(0)
        torch.testing.assert_close(outputs[-1], model(**batch)[0])
    assert len(compilations) == 1
    assert not torch.allclose(outputs[0], outputs[2])


def test_nothing_is_in_double_precision(make_tiny, batch):
    """Some accelerators do not support it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoDouble(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in (*args, out):
                assert not isinstance(value, torch.Tensor) or value.dtype != torch.float64, func
            return out

    model = make_tiny("bert").train()
    with NoDouble():
        drophead = DropHead(model, 0.5)
        drophead.p = 1 / 3
        model(**batch)
    assert drophead.p == 1 / 3


def test_a_model_that_moved_is_dropped_from_there(make_tiny):
    model = make_tiny("bert").train()
    drophead = DropHead(model, 0.5)
    model.to("meta")
    ids = torch.ones(2, 5, dtype=torch.long, device="meta")
    assert model(ids)[0].device.type == "meta"
    drophead.remove()


def _dropped(rank, model, batch):
    torch.manual_seed(0)  # trainers seed all processes alike
    dropping = DropHead(model, 0.5)
    with torch.no_grad():
        outputs = model.train()(**batch).last_hidden_state
    dropping.remove()
    return outputs


def test_processes_draw_for_themselves(make_tiny, batch, set_dropout_):
    model = set_dropout_(make_tiny("bert"), 0.0)
    one, other = run_both(_dropped, model, batch)
    assert (one - other).abs().max() > 1e-3
