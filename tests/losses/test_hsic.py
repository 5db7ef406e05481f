import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import hsic

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))


def oracle(x, mask, mean_over_pairs):
    """Return equations 4 and 7 with N×N matrices of the unpadded tokens."""
    tokens = x[mask]  # (N, H, d)
    count = len(tokens)
    centring = torch.eye(count, dtype=x.dtype) - torch.ones(count, count, dtype=x.dtype) / count
    kernels = [tokens[:, head] @ tokens[:, head].T for head in range(x.shape[2])]

    def criterion(i, j):
        return torch.trace(kernels[i] @ centring @ kernels[j] @ centring) / max(count - 1, 1) ** 2

    return mean_over_pairs(x.shape[2], criterion)


@given(SHAPES, st.integers(0, 99))
def test_linear_is_the_mean_over_pairs_of_traces(make_vectors, mean_over_pairs, assert_same_gradient, shape, seed):
    x, mask = make_vectors(*shape, seed=seed)
    assert_same_gradient(x, hsic(x, mask), oracle(x, mask, mean_over_pairs))


@given(SHAPES, st.integers(0, 99))
def test_unscaled_is_the_mean_of_traces_alone(make_vectors, mean_over_pairs, assert_same_gradient, shape, seed):
    x, mask = make_vectors(*shape, seed=seed)
    factor = max(int(mask.sum()) - 1, 1) ** 2
    assert_same_gradient(x, hsic(x, mask, unscaled=True), factor * oracle(x, mask, mean_over_pairs))


@pytest.mark.parametrize("shape", [(2, 20, 3, 2), (1, 3, 4, 5)], ids=["H·d products", "N×N products"])
def test_both_routes_agree_with_the_oracle_without_padding(
    make_vectors, mean_over_pairs, assert_same_gradient, shape
):
    x, _ = make_vectors(*shape)
    everything = torch.ones(shape[:2], dtype=torch.bool)
    assert_same_gradient(x, hsic(x), oracle(x, everything, mean_over_pairs))
    assert torch.autograd.gradcheck(hsic, x)


@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4)])
def test_no_tokens_are_independent(shape):
    assert hsic(torch.zeros(shape)).item() == 0
