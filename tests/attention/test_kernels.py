"""Every kernel of shared heads against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import MASKS, draw_inputs, inputs_strategy, oracle, oracle_probabilities

from collab_compress.attention import kernels, shared
from collab_compress.attention.kernels import Inputs
from collab_compress.attention.per_head import attend_separately
from collab_compress.attention.shared import attend, attention_probabilities, blocked, folded, recomputed, sdpa

problems = inputs_strategy(heads=st.integers(1, 4), rank=st.integers(1, 9))


@pytest.fixture(params=[1, 100, 400, 1 << 20], ids="{} bytes".format)
def cache_bytes(request, monkeypatch):
    """Set the block size, from one query of one head of one sample to everything in one block."""
    monkeypatch.setattr(kernels, "CACHE_BYTES", request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.parametrize("kernel", [folded, sdpa, blocked, recomputed, attend])
@settings(max_examples=40)
@given(problem=problems, causal=st.booleans())
def test_kernel_computes_the_formula(kernel, problem, causal):
    problem = problem._replace(causal=causal and problem.mask is None)
    torch.testing.assert_close(kernel(problem), oracle(problem), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_of_any_size_agree(mask, causal):
    for length, keys in ((5, 5), (5, 3), (3, 5), (1, 5)):
        problem = draw_inputs(batch=3, heads=4, length=length, keys=keys, mask=mask)._replace(causal=causal)
        expected = folded(problem)
        for kernel in (blocked, recomputed):
            torch.testing.assert_close(kernel(problem), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_follow_the_formula(content, causal):
    problem = draw_inputs(content=content)._replace(causal=causal)
    torch.testing.assert_close(attention_probabilities(problem), oracle_probabilities(problem), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
def test_a_query_that_sees_nothing_gets_the_mean_value():
    problem = draw_inputs()._replace(mask=torch.zeros(2, 1, 4, 5, dtype=torch.bool))
    expected = problem.value.mean(2, keepdim=True).expand(-1, -1, 4, -1)
    for kernel in (blocked, folded):
        torch.testing.assert_close(kernel(problem), expected)


def to(problem, *args):
    parts = (part.to(*args) if isinstance(part, torch.Tensor) else part for part in problem)
    return Inputs(*parts)._replace(mask=problem.mask)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)]
)
def test_lower_precision_stays_close(dtype, tolerance):
    rounded = to(draw_inputs(batch=1, heads=2, length=16, keys=16, rank=16, width=8, mask="bool"), dtype)
    got = attend(rounded)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), oracle(to(rounded, torch.float64)), rtol=0, atol=tolerance)


@pytest.mark.usefixtures("cache_bytes")
def test_inputs_are_not_changed():
    problem = draw_inputs(mask="bool")._replace(causal=True)
    before = [tensor.clone() for tensor in problem.tensors()]
    blocked(problem)
    assert all(torch.equal(a, b) for a, b in zip(before, problem.tensors(), strict=True))


NAMES = ("query", "key", "value", "content", "mixing")


KERNELS = pytest.mark.parametrize(
    ("kernel", "sizes"), [(attend, ()), (attend_separately, (3, 0, 2))], ids=["shared", "per-head"]
)


@KERNELS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("content", [False, True])
def test_gradients_are_those_of_the_formula(kernel, sizes, content, causal):
    mask = "none" if causal else "bool"
    problem = draw_inputs(batch=1, heads=2, length=3, keys=3, rank=2, content=content, mask=mask, sizes=sizes)
    problem = problem._replace(causal=causal)
    names = [name for name in NAMES if getattr(problem, name) is not None]
    leaves = [getattr(problem, name).detach().clone().requires_grad_() for name in names]

    def run(*tensors):
        return kernel(problem._replace(**dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(run, leaves)
    got = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    slow = oracle(problem._replace(**dict(zip(names, leaves, strict=True))))
    for ours, theirs in zip(got, torch.autograd.grad(slow.square().sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_block_by_block_are_those_of_all_at_once(mask, causal):
    problem = draw_inputs(batch=3, heads=4, length=5, keys=5, mask=mask)._replace(causal=causal)
    gradients = []
    for kernel in (folded, recomputed):
        leaves = {name: getattr(problem, name).detach().clone().requires_grad_() for name in NAMES}
        outputs = kernel(problem._replace(**leaves))
        gradients.append(torch.autograd.grad(outputs.sin().sum(), list(leaves.values())))
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cache_bytes")
def test_backward_drops_what_forward_dropped():
    """Outputs are linear in the values, so their gradient shows the probabilities that were kept."""
    problem = draw_inputs(batch=2, heads=3, length=5, keys=6)._replace(dropout=0.4)
    eye = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6).clone().requires_grad_()
    probs = recomputed(problem._replace(value=eye))  # (B, H, T, S)
    assert 0 < (probs == 0).double().mean() < 1
    (slopes,) = torch.autograd.grad(probs.sum(), eye)
    torch.testing.assert_close(slopes[..., 0], probs.sum(2))

    def run(query):
        torch.manual_seed(3)
        return recomputed(problem._replace(query=query))

    assert torch.autograd.gradcheck(run, (problem.query.clone().requires_grad_(),))


def test_dropout_keeps_to_the_device_of_its_inputs():
    problem = draw_inputs()._replace(dropout=0.5)
    with torch.device("meta"):  # the default device
        outputs = recomputed(problem)
    assert outputs.isfinite().all()


def test_training_keeps_no_scores():
    problem = draw_inputs(batch=2, heads=4, length=48, keys=48, rank=5, width=3)
    saved_sizes = []

    def pack(tensor):
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(problem._replace(query=problem.query.clone().requires_grad_()))
    assert max(saved_sizes) <= max(tensor.numel() for tensor in problem.tensors())


@KERNELS
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_drops_with_its_probability_and_keeps_the_mean(kernel, sizes, grad):
    problem = draw_inputs(batch=4, heads=4, length=64, keys=64, width=64, sizes=sizes)
    heads = problem.value.shape[1]
    problem = problem._replace(value=torch.eye(64, dtype=torch.float64).expand(4, heads, 64, 64))  # shows probs
    if grad:
        problem = problem._replace(query=problem.query.clone().requires_grad_())
    torch.manual_seed(0)
    dropped = kernel(problem._replace(dropout=0.25))
    undropped = kernel(problem)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(dropped[dropped != 0], undropped[dropped != 0] / 0.75)
    assert not kernel(problem._replace(dropout=1.0)).any()


@pytest.fixture
def chosen(monkeypatch):
    """Record the names of the kernels that `attend` calls."""
    calls = []
    for kernel in (folded, blocked, recomputed, sdpa):

        def spy(inputs, _kernel=kernel):
            calls.append(_kernel.__name__)
            return _kernel(inputs)

        monkeypatch.setattr(shared, kernel.__name__, spy)
    return calls


def test_inference_is_blocked_and_the_rest_is_not(chosen):
    problem = draw_inputs()
    attend(problem)
    trained = problem._replace(mixing=problem.mixing.clone().requires_grad_())
    with torch.no_grad():
        attend(trained)
    assert chosen == ["blocked"] * 2
    attend(trained)
    attend(problem._replace(dropout=0.1))
    assert chosen[2:] == ["recomputed"] * 2
    attend(problem._replace(mask=torch.zeros(4, 5)))  # float32 among float64
    attend(trained._replace(mask=torch.zeros(4, 5, dtype=torch.float64).requires_grad_()))
    assert chosen[4:] == ["folded"] * 2
    attend(to(problem, torch.float16))
    attend(to(problem, torch.bfloat16)._replace(mixing=problem.mixing.float()))
    assert chosen[6:] == ["blocked"] * 2
    attend(to(problem, "meta"))
    assert chosen[8:] == ["sdpa"]


def test_autocast_works_with_parameters_in_float32():
    problem = to(draw_inputs(), torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = attend(problem._replace(mixing=problem.mixing.float()))
    torch.testing.assert_close(got.float(), folded(to(problem, torch.float32)), rtol=0, atol=5e-2)


class Attention(torch.nn.Module):
    def forward(self, query, key, value, mask, content, mixing):
        return attend(Inputs(query, key, value, mask, scaling=0.3, content=content, mixing=mixing))


@KERNELS
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_as_one_graph(kernel, sizes, dynamic):
    compiled = torch.compile(kernel, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (4, 7):
        problem = draw_inputs(length=length, keys=length, mask="bool", sizes=sizes)
        with torch.no_grad():
            torch.testing.assert_close(compiled(problem), kernel(problem))


def test_exports_with_dynamic_batch_and_length():
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dynamic = {
        "query": {0: batch, 1: length},
        "key": {0: batch, 1: length},
        "value": {0: batch, 2: length},
        "mask": {0: batch, 2: length, 3: length},
        "content": {0: batch, 1: length},
        "mixing": None,
    }
    example = draw_inputs(length=5, keys=5, mask="bool")
    program = torch.export.export(Attention(), tuple(example.tensors()), dynamic_shapes=dynamic)
    other = draw_inputs(batch=3, length=7, keys=7, mask="bool")
    torch.testing.assert_close(program.module()(*other.tensors()), folded(other))


@pytest.mark.parametrize("grad", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_functional_gradients_are_those_of_autograd(grad):
    problem = to(draw_inputs(), torch.float32)
    query = problem.query.unsqueeze(1)  # each sample is a batch of one

    def squared(query, key, content, value):
        sample = problem._replace(query=query, key=key[None], content=content[None], value=value[None], mask=None)
        return attend(sample).square().sum()

    parts = (query, problem.key, problem.content, problem.value)
    if grad is torch.func.grad:
        parts = tuple(part[0] for part in parts)
    leaf = parts[0].clone().requires_grad_()
    samples = [(leaf, *parts[1:])] if grad is torch.func.grad else zip(leaf, *parts[1:], strict=True)
    sum(squared(*sample) for sample in samples).backward()
    torch.testing.assert_close(grad(squared)(*parts), leaf.grad)
