"""Attention of heads of different sizes against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import MASKS, draw_inputs, inputs_strategy, oracle, oracle_probabilities

from collab_compress.attention import kernels, per_head
from collab_compress.attention.per_head import (
    attend_separately,
    one_by_one,
    padded,
    separate_probabilities,
    separated,
    side_by_side,
)

cases = inputs_strategy(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum).map(tuple))


def draw(sizes=(3, 0, 2), **options):
    return draw_inputs(sizes=sizes, **options)


@settings(max_examples=60)
@given(inputs=cases, causal=st.booleans(), room=st.sampled_from([1, 100, 10**6]))
def test_all_kernels_equal_the_formula(inputs, causal, room):
    inputs = inputs._replace(causal=causal and inputs.mask is None)  # a mask hides the future already
    outputs = oracle(inputs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "CACHE_BYTES", room)
        torch.testing.assert_close(one_by_one(inputs), outputs)
    torch.testing.assert_close(padded(inputs), outputs)
    torch.testing.assert_close(attend_separately(inputs), outputs)
    torch.testing.assert_close(attend_separately(recorded(inputs)), outputs)
    torch.testing.assert_close(separate_probabilities(inputs), oracle_probabilities(inputs))


@settings(max_examples=40)
@given(
    heads=st.integers(1, 4),
    width=st.integers(1, 4),
    content=st.booleans(),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 999),
)
def test_heads_as_wide_as_their_values_attend_side_by_side(heads, width, content, causal, mask, seed):
    inputs = draw(sizes=(width,) * heads, width=width, content=content, mask=mask, seed=seed)
    inputs = inputs._replace(causal=causal and mask == "none")
    torch.testing.assert_close(side_by_side(inputs), oracle(inputs))


def recorded(inputs):
    """The same with gradients, for which nothing may be overwritten."""
    return inputs._replace(query=inputs.query.clone().requires_grad_())


@pytest.fixture
def chosen(monkeypatch):
    """Record the names of the kernels that `attend_separately` calls."""
    calls = []
    for kernel in (one_by_one, side_by_side, padded):

        def spy(inputs, _kernel=kernel):
            calls.append(_kernel.__name__)
            return _kernel(inputs)

        monkeypatch.setattr(per_head, kernel.__name__, spy)
    return calls


@pytest.mark.parametrize(
    ("sizes", "length", "kernel"),
    [
        ((2, 2), 16, "side_by_side"),
        ((2, 2), 160, "one_by_one"),
        ((3, 1), 16, "padded"),
        ((3, 1), 80, "one_by_one"),
    ],
)
def test_the_kernel_depends_on_widths_and_lengths_where_nothing_is_recorded(sizes, length, kernel, chosen):
    inputs = draw(sizes=sizes, length=length, keys=length)
    attend_separately(inputs)
    attend_separately(recorded(inputs))
    attend_separately(inputs._replace(dropout=0.1))
    assert chosen == [kernel, "padded", "padded"]


def test_results_are_laid_out_for_the_module():
    assert one_by_one(draw()).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("widest", "content", "width", "expected"),
    [(31, True, 32, 32), (32, False, 32, 32), (32, True, 32, 40), (5, True, 8, 8), (8, True, 8, 16)],
)
def test_heads_are_as_wide_as_values_unless_they_need_more(widest, content, width, expected, monkeypatch):
    widths = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(*parts, **options):
        widths.append({part.shape[-1] for part in parts})
        return fused(*parts, **options)

    monkeypatch.setattr("collab_compress.attention.kernels.scaled_dot_product_attention", spy)
    inputs = recorded(draw(sizes=(widest, 1), width=width, content=content))
    assert attend_separately(inputs).shape == (2, 2, 4, width)
    assert widths == [{expected}]


def test_the_query_reads_the_content_bias_with_a_one():
    inputs = draw(sizes=(2, 0))
    queries, keys = separated(inputs, 4)
    zero = torch.zeros(2, 4, 1).double()
    torch.testing.assert_close(queries[:, 0], torch.cat([inputs.query, zero + 1, zero], -1))
    torch.testing.assert_close(keys[:, 1], torch.cat([inputs.content[..., 1:], torch.zeros(2, 5, 3)], -1))
