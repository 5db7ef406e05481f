"""What holds for every loss over heads: padding, one head, precision, compilation, cost."""

import pytest
import torch
from forms import mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from collab_compress.losses import agreement, agreement_probs, bhattacharyya, hsic, nuclear_growth, orthogonality

VECTORS = {
    "hsic": hsic,
    "orthogonality": orthogonality,
    "agreement": agreement,
}
ROWS = {
    "agreement, rows": agreement_probs,
    "bhattacharyya": bhattacharyya,
}
LOSSES = VECTORS | ROWS
OVER_PAIRS = sorted(LOSSES.keys() - {"orthogonality"})


@pytest.fixture(params=sorted(LOSSES))
def name(request):
    return request.param


@pytest.fixture
def draw(make_vectors, make_rows):
    def make(name, batch=3, length=6, heads=4, width=5, **options):
        if name in ROWS:
            return make_rows(batch, heads, length, width, **options)
        return make_vectors(batch, length, heads, width, **options)

    return make


def test_only_real_tokens_count(name, draw):
    leaf, mask = draw(name)
    loss = LOSSES[name]
    torch.testing.assert_close(loss(leaf), loss(leaf, torch.ones_like(mask)))
    value = loss(leaf, torch.zeros_like(mask))
    value.backward()
    assert value.item() == 0.0
    assert not leaf.grad.any()
    assert not mask.all()
    value = loss(leaf, mask)
    value.backward()
    padding = ~(mask[:, None, :, None] if name in ROWS else mask[:, :, None, None])
    torch.testing.assert_close(loss(leaf.detach().masked_fill(padding, 0.125), mask), value.detach())
    assert not leaf.grad.masked_select(padding).any()


@pytest.mark.parametrize("name", OVER_PAIRS)
@pytest.mark.parametrize("length", [1, 6])
def test_one_head_gives_zero(name, draw, length):
    leaf, mask = draw(name, heads=1, length=length)
    value = LOSSES[name](leaf, mask)
    value.backward()
    assert value.item() == 0.0
    assert not leaf.grad.any()


def test_one_token_and_zeros_have_a_finite_gradient(name, draw):
    leaf, mask = draw(name)
    for inputs, real in (draw(name, batch=1, length=1), (torch.zeros_like(leaf, requires_grad=True), mask)):
        value = LOSSES[name](inputs, real)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(inputs.grad).all()


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True), (torch.float32, True)],
)
def test_it_computes_in_float32_at_least(name, draw, dtype, autocast):
    leaf, mask = draw(name, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = LOSSES[name](leaf, mask)
        value.backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), LOSSES[name](leaf.detach().double(), mask), rtol=1e-5, atol=1e-5)
    assert leaf.grad.dtype == dtype
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(
    "name", mostly_slow(zip([*sorted(LOSSES), "nuclear growth"]), ("hsic",), ("nuclear growth",))
)
def test_it_compiles_as_one_graph(name, draw):
    if name == "nuclear growth":
        leaf, argument, function = torch.eye(4, requires_grad=True), 0.1, nuclear_growth
    else:
        leaf, argument = draw(name)
        function = LOSSES[name]
    value = torch.compile(function, backend="aot_eager", fullgraph=True)(leaf, argument)
    expected = function(leaf, argument)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, leaf), torch.autograd.grad(expected, leaf))


class Elements(TorchDispatchMode):
    """Count the elements that operations read and write."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += sum(leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize("name", OVER_PAIRS)
def test_work_grows_with_the_data_and_not_with_the_pairs(name, draw):
    """At equal width 48 heads have 188 times the pairs of 4."""
    work = {}
    for heads in (4, 12, 48):
        # The rows of more heads are more data; vectors of the same width are not.
        leaf, mask = draw(name, heads=heads, length=16, width=16 if name in ROWS else 384 // heads)
        with Elements() as elements, FlopCounterMode(display=False) as flops:
            LOSSES[name](leaf, mask).backward()
        data = heads if name in ROWS else 1
        work[heads] = elements.count / data, flops.get_total_flops()
    for heads in (12, 48):
        assert work[heads][0] <= 1.2 * work[4][0]
        assert work[heads][1] <= 1.2 * work[4][1]


def test_wrong_shapes_and_masks_are_refused(name, draw):
    leaf, mask = draw(name)
    argument, layout = ("probs", r"\(B, H, T, S\)") if name in ROWS else ("x", r"\(B, T, H, d\)")
    message = rf"{argument} has the wrong shape: got \({leaf.shape[0]}, .*\), expected {layout}"
    with pytest.raises(ValueError, match=message):
        LOSSES[name](leaf[..., 0], mask)
    for wrong in (mask[:, :-1], mask.long(), mask[:, None, None, :]):
        with pytest.raises(ValueError, match=rf"mask does not fit {argument} {layout}: got .*, expected \(3, 6\)"):
            LOSSES[name](leaf, wrong)
