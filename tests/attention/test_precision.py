"""Half precision: no kernel is further from float64 than what the stock model computes in the same dtype."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from collab_compress.attention.kernels import Inputs, in_float32_on_cpu
from collab_compress.attention.per_head import attend_separately, separate_probabilities
from collab_compress.attention.shared import attend, attention_probabilities, blocked, folded, sdpa

HEADS, RANK, LENGTH, WIDTH, SCALING = 4, 32, 48, 16, 0.4
SIZES = (8, 4, 12, 8)


def problem(dtype, content=True, seed=0):
    """Return inputs of a shared kernel and of the stock model: per-head queries and keys, rounded once."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key, mixing = normal(2, LENGTH, RANK), normal(2, LENGTH, RANK), normal(HEADS, RANK)
    value, bias = normal(2, HEADS, LENGTH, WIDTH), normal(2, LENGTH, HEADS) if content else None
    mixed = (query.double()[:, None] * mixing.double()[:, None]).to(dtype)
    keys = key[:, None].expand(-1, HEADS, -1, -1)
    if content:
        mixed = torch.cat([mixed, mixed.new_ones(2, HEADS, LENGTH, 1)], -1)
        keys = torch.cat([keys, bias.transpose(1, 2).unsqueeze(-1)], -1)
    ours = Inputs(query, key, value, scaling=SCALING, content=bias, mixing=mixing, sizes=SIZES)
    return ours, (mixed, keys, value)


def stock_eager(query, key, value):
    """Return probabilities and outputs in the inputs' dtype, as eager attention does in most models."""
    probs = torch.softmax(query @ key.transpose(2, 3) * SCALING, -1)
    return probs, probs @ value


def double(inputs):
    return Inputs(*(part.double() if isinstance(part, torch.Tensor) else part for part in inputs))


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [attend, folded, blocked, sdpa])
def test_shared_kernels(kernel, dtype, content):
    ours, stock = problem(dtype, content)
    expected = kernel(double(ours))
    outputs = in_float32_on_cpu(kernel)(ours)
    assert outputs.dtype == dtype
    ceiling = error(scaled_dot_product_attention(*stock, scale=SCALING), expected)
    assert ceiling < error(stock_eager(*stock)[1], expected)
    assert error(outputs, expected) <= ceiling * 1.02  # the final rounding alone is that large


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_probabilities(dtype):
    ours, stock = problem(dtype)
    ours = ours._replace(causal=True)
    expected = attention_probabilities(double(ours))
    actual = attention_probabilities(ours)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    scores = (stock[0] @ stock[1].transpose(2, 3) * SCALING).masked_fill(future, torch.finfo(dtype).min)
    assert actual.dtype == dtype
    assert error(actual, expected) <= error(scores.softmax(-1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_separate_kernels(dtype):
    ours, _ = problem(dtype)
    probs, outputs = [], []
    for head, (q, k) in enumerate(zip(ours.query.split(SIZES, -1), ours.key.split(SIZES, -1), strict=True)):
        q = torch.cat([q, q.new_ones(2, LENGTH, 1)], -1)[:, None]
        k = torch.cat([k, ours.content[..., head, None]], -1)[:, None]
        value = ours.value[:, head, None]
        probs.append(stock_eager(q, k, value)[0])
        outputs.append(scaled_dot_product_attention(q, k, value, scale=SCALING))
    expected = separate_probabilities(double(ours))
    actual = separate_probabilities(ours)
    assert actual.dtype == dtype
    assert error(actual, expected) <= error(torch.cat(probs, 1), expected)
    expected = attend_separately(double(ours))
    actual = attend_separately(ours)
    assert error(actual, expected) <= error(torch.cat(outputs, 1), expected) * 1.02


def test_mixed_precision(make_tiny, batch):
    """Under autocast, projections are in bfloat16 and the mixing matrix is in float32."""
    from collab_compress import Compression, compress

    dense = make_tiny("bert")
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=24), calibration=None)
    expected = dense(**batch).last_hidden_state.detach().double()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            states, stock = (one(**batch).last_hidden_state.detach() for one in (model, dense))
        assert error(states, expected) < 1.5 * error(stock, expected)
