"""Every kernel against the formula, one head and one position at a time."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collab_compress.attention import kernels, shared
from collab_compress.attention.kernels import attention_probabilities, blocked, folded, recomputed, sdpa
from collab_compress.attention.shared import attend


@dataclass(frozen=True)
class Problem:
    query: Tensor
    key: Tensor
    content: Tensor | None
    mixing: Tensor
    value: Tensor
    mask: Tensor | None = None
    scaling: float = 0.3

    def inputs(self):
        return self.query, self.key, self.content, self.mixing, self.value, self.mask, self.scaling


def draw_problem(batch=2, heads=3, length=4, keys=5, rank=6, width=2, content=True, mask="none", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    joined = normal(batch, keys, rank + heads + 1)  # as the key projection returns it: strided parts
    value = normal(batch, keys, heads, width).transpose(1, 2)
    visible = torch.rand(batch, 1, length, keys, generator=generator) > 0.4
    visible[..., 0] = True  # what a query that sees nothing returns is nobody's business
    padding = torch.arange(keys).expand(batch, 1, 1, keys) < torch.arange(1, batch + 1).view(-1, 1, 1, 1)
    masks = {
        "none": None,
        "padding": padding,
        "padding, expanded": padding.expand(batch, 1, length, keys),
        "bool": visible,
        "lowest": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo().min),
        "-inf": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf),
        "position bias": normal(1, heads, length, keys),
        "two axes": normal(length, keys),
    }
    return Problem(
        normal(batch, length, rank), joined[..., :rank], joined[..., rank : rank + heads] if content else None,
        normal(heads, rank), value, masks[mask],
    )  # fmt: skip


MASKS = ["none", "padding", "padding, expanded", "bool", "lowest", "-inf", "position bias", "two axes"]
problems = st.builds(
    draw_problem, batch=st.integers(1, 3), heads=st.integers(1, 4), length=st.integers(1, 6), keys=st.integers(1, 6),
    rank=st.integers(1, 9), width=st.integers(1, 4), content=st.booleans(), mask=st.sampled_from(MASKS),
    seed=st.integers(0, 999),
)  # fmt: skip


def oracle_probabilities(problem, causal):
    """p_i(x, ·) for one head, one query and one key at a time, (B, H, T, S)."""
    (batch, length, rank), (heads, _), keys = problem.query.shape, problem.mixing.shape, problem.key.shape[1]
    rows = []
    mask = None if problem.mask is None else problem.mask.expand(batch, heads, length, keys)
    for b, i, x in ((b, i, x) for b in range(batch) for i in range(heads) for x in range(length)):
        scores = []
        for y in range(keys):
            score = sum(problem.query[b, x, r] * problem.mixing[i, r] * problem.key[b, y, r] for r in range(rank))
            if problem.content is not None:
                score = score + problem.content[b, y, i]
            score = score * problem.scaling
            if mask is not None:
                allowed = mask[b, i, x, y]
                score = score + ((0.0 if allowed else -math.inf) if mask.dtype == torch.bool else allowed)
            scores.append(score - math.inf if causal and y > x else score)
        top = max(score.detach() for score in scores)
        weights = [(score - top).exp() for score in scores]
        rows.append(torch.stack([weight / sum(weights) for weight in weights]))
    return torch.stack(rows).view(batch, heads, length, keys)


def oracle(problem, causal=False):
    """Σ_y p_i(x, y) · value_i(y), (B, H, T, dv)."""
    probabilities = oracle_probabilities(problem, causal)
    batch, heads, length, keys = probabilities.shape
    sums = [
        sum(probabilities[b, i, x, y] * problem.value[b, i, y] for y in range(keys))
        for b in range(batch) for i in range(heads) for x in range(length)
    ]  # fmt: skip
    return torch.stack(sums).view(batch, heads, length, -1)


def run_folded(problem, causal):
    return folded(*problem.inputs(), dropout=0.0, causal=causal)


def run_sdpa(problem, causal):
    return sdpa(*problem.inputs(), dropout=0.0, causal=causal)


def run_blocked(problem, causal):
    return blocked(*problem.inputs(), causal=causal)


def run_recomputed(problem, causal):
    return recomputed(*problem.inputs(), dropout=0.0, causal=causal)


def run_chosen(problem, causal):
    return attend(*problem.inputs(), dropout=0.0, causal=causal)


@pytest.fixture(params=[1, 100, 400, 1 << 20], ids="{} bytes".format)
def cache_bytes(request, monkeypatch):
    """From blocks of one query of one head of one sample to all in one block."""
    monkeypatch.setattr(kernels, "CACHE_BYTES", request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.parametrize("run", [run_folded, run_sdpa, run_blocked, run_recomputed, run_chosen])
@settings(max_examples=40)
@given(problem=problems, causal=st.booleans())
def test_kernel_computes_the_formula(run, problem, causal):
    causal = causal and problem.mask is None
    torch.testing.assert_close(run(problem, causal), oracle(problem, causal), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_of_any_size_agree(mask, causal):
    for length, keys in ((5, 5), (5, 3), (3, 5), (1, 5)):
        problem = draw_problem(batch=3, heads=4, length=length, keys=keys, mask=mask)
        expected = run_folded(problem, causal)
        for got in (run_blocked(problem, causal), run_recomputed(problem, causal)):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_follow_the_formula(content, causal):
    problem = draw_problem(content=content)
    got = attention_probabilities(
        problem.query, problem.key, problem.content, problem.mixing, None, problem.scaling, causal
    )
    torch.testing.assert_close(got, oracle_probabilities(problem, causal), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
def test_a_query_that_sees_nothing_gets_the_mean_value():
    problem = draw_problem()
    problem = replace(problem, mask=torch.zeros(2, 1, 4, 5, dtype=torch.bool))
    expected = problem.value.mean(2, keepdim=True).expand(-1, -1, 4, -1)
    torch.testing.assert_close(run_blocked(problem, False), expected)
    torch.testing.assert_close(run_folded(problem, False), expected)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)]
)
def test_lower_precision_stays_close(dtype, tolerance):
    exact = draw_problem(batch=1, heads=2, length=16, keys=16, rank=16, width=8, mask="bool")
    rounded = Problem(*(t if t.dtype == torch.bool else t.to(dtype) for t in exact.inputs()[:-1]))
    got = run_chosen(rounded, False)
    assert got.dtype == dtype
    expected = oracle(replace(rounded, **{name: t.double() for name, t in vars(rounded).items()
                                          if isinstance(t, Tensor) and t.dtype == dtype}))  # fmt: skip
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("cache_bytes")
def test_inputs_are_left_alone():
    problem = draw_problem(mask="bool")
    before = [tensor.clone() for tensor in problem.inputs()[:-1]]
    run_blocked(problem, True)
    assert all(torch.equal(a, b) for a, b in zip(before, problem.inputs()[:-1], strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("content", [False, True])
def test_gradients_are_those_of_the_formula(content, causal):
    problem = draw_problem(batch=1, heads=2, length=3, keys=3, rank=2, content=content)
    names = [name for name in ("query", "key", "content", "mixing", "value") if getattr(problem, name) is not None]
    leaves = [getattr(problem, name).detach().clone().requires_grad_() for name in names]

    def run(*tensors):
        return run_chosen(replace(problem, **dict(zip(names, tensors, strict=True))), causal)

    assert torch.autograd.gradcheck(run, leaves)
    got = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    slow = oracle(replace(problem, **dict(zip(names, leaves, strict=True))), causal)
    for ours, theirs in zip(got, torch.autograd.grad(slow.square().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_block_by_block_are_those_of_all_at_once(mask, causal):
    problem = draw_problem(batch=3, heads=4, length=5, keys=5, mask=mask)
    names = ("query", "key", "content", "mixing", "value")
    found = []
    for run in (run_folded, run_recomputed):
        leaves = {name: getattr(problem, name).detach().clone().requires_grad_() for name in names}
        found.append(torch.autograd.grad(run(replace(problem, **leaves), causal).sin().sum(), list(leaves.values())))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
def test_backward_drops_what_forward_dropped():
    """Outputs are linear in the values, so their gradient shows the probabilities that were left."""
    problem = draw_problem(batch=2, heads=3, length=5, keys=6)
    eye = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6).clone().requires_grad_()
    rows = recomputed(*replace(problem, value=eye).inputs(), dropout=0.4, causal=False)  # (B, H, T, S)
    assert 0 < (rows == 0).double().mean() < 1
    (slopes,) = torch.autograd.grad(rows.sum(), eye)
    torch.testing.assert_close(slopes[..., 0], rows.sum(2))
    query = problem.query.clone().requires_grad_()

    def run(query):
        torch.manual_seed(3)
        return recomputed(*replace(problem, query=query).inputs(), dropout=0.4, causal=False)

    assert torch.autograd.gradcheck(run, (query,))


def test_training_keeps_no_scores():
    problem = draw_problem(batch=2, heads=4, length=48, keys=48, rank=5, width=3)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_chosen(replace(problem, query=problem.query.clone().requires_grad_()), False)
    assert max(kept) <= max(tensor.numel() for tensor in problem.inputs()[:-1] if tensor is not None)


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_drops_its_share_and_keeps_the_mean(grad):
    problem = draw_problem(batch=4, heads=4, length=64, keys=64, width=64)
    problem = replace(problem, value=torch.eye(64, dtype=torch.float64).expand(4, 4, 64, 64))  # shows probabilities
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        dropped = attend(*problem.inputs(), dropout=0.25, causal=False)
    kept = run_folded(problem, False)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(dropped[dropped != 0], kept[dropped != 0] / 0.75)


@pytest.fixture
def chosen(monkeypatch):
    """Names of the kernels that `attend` calls."""
    calls = []
    for kernel in (folded, blocked, recomputed, sdpa):

        def spy(*args, _kernel=kernel, **kwargs):
            calls.append(_kernel.__name__)
            return _kernel(*args, **kwargs)

        monkeypatch.setattr(shared, kernel.__name__, spy)
    return calls


def to(problem, *args):
    return Problem(*(None if tensor is None else tensor.to(*args) for tensor in problem.inputs()[:-1]))


def test_inference_is_blocked_and_the_rest_is_not(chosen):
    problem = draw_problem()
    run_chosen(problem, False)
    trained = replace(problem, mixing=problem.mixing.clone().requires_grad_())
    with torch.no_grad():
        run_chosen(trained, False)
    assert chosen == ["blocked"] * 2
    run_chosen(trained, False)
    attend(*problem.inputs(), dropout=0.1, causal=False)
    assert chosen[2:] == ["recomputed"] * 2
    run_chosen(replace(problem, mask=torch.zeros(4, 5)), False)  # float32 among float64
    run_chosen(replace(trained, mask=torch.zeros(4, 5, dtype=torch.float64).requires_grad_()), False)
    assert chosen[4:] == ["folded"] * 2
    run_chosen(to(problem, torch.float16), False)
    run_chosen(replace(to(problem, torch.bfloat16), mixing=problem.mixing.float()), False)
    assert chosen[6:] == ["blocked"] * 2
    run_chosen(to(problem, "meta"), False)
    assert chosen[8:] == ["sdpa"]


def test_autocast_works_with_parameters_in_float32():
    problem = to(draw_problem(), torch.bfloat16)
    mixed = replace(problem, mixing=problem.mixing.float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = run_chosen(mixed, False)
    torch.testing.assert_close(got.float(), run_folded(to(problem, torch.float32), False), rtol=0, atol=5e-2)


class Attention(torch.nn.Module):
    def forward(self, query, key, content, mixing, value, mask):
        return attend(query, key, content, mixing, value, mask, 0.3, 0.0, False)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_as_one_graph(dynamic):
    module = torch.compile(Attention(), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (4, 7):
        problem = draw_problem(length=length, keys=length, mask="bool")
        with torch.no_grad():
            got = module(*problem.inputs()[:-1])
        torch.testing.assert_close(got, run_folded(problem, False))


def test_exports_with_dynamic_batch_and_length():
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dynamic = {
        "query": {0: batch, 1: length}, "key": {0: batch, 1: length}, "content": {0: batch, 1: length},
        "mixing": None, "value": {0: batch, 2: length}, "mask": {0: batch, 2: length, 3: length},
    }  # fmt: skip
    example = draw_problem(length=5, keys=5, mask="bool")
    program = torch.export.export(Attention(), example.inputs()[:-1], dynamic_shapes=dynamic)
    other = draw_problem(batch=3, length=7, keys=7, mask="bool")
    torch.testing.assert_close(program.module()(*other.inputs()[:-1]), run_folded(other, False))


@pytest.mark.parametrize("grad", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_functional_gradients_are_those_of_autograd(grad):
    problem = to(draw_problem(), torch.float32)
    query = problem.query.unsqueeze(1)  # each sample is a batch of one

    def squared(query, key, content, value):
        alone = replace(problem, query=query, key=key[None], content=content[None], value=value[None], mask=None)
        return run_chosen(alone, False).square().sum()

    parts = (query, problem.key, problem.content, problem.value)
    if grad is torch.func.grad:
        parts = tuple(part[0] for part in parts)
    leaf = parts[0].clone().requires_grad_()
    samples = [(leaf, *parts[1:])] if grad is torch.func.grad else zip(leaf, *parts[1:], strict=True)
    sum(squared(*sample) for sample in samples).backward()
    torch.testing.assert_close(grad(squared)(*parts), leaf.grad)
