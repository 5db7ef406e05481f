import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import hsic

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))


def linear(vectors, bandwidth):
    return vectors @ vectors.T


def radial(vectors, bandwidth):
    """Return the RBF kernel, one pair of tokens at a time."""
    count = len(vectors)
    if bandwidth is None:
        between = [(vectors[k] - vectors[n]).norm() for k in range(count) for n in range(k)]
        bandwidth = torch.stack(between).median().detach() if between else 1.0
    rows = [[torch.exp(-(y - z).square().sum() / (2 * bandwidth**2)) for z in vectors] for y in vectors]
    return torch.stack([torch.stack(row) for row in rows])


def oracle(x, mask, mean_over_pairs, kernel, bandwidth=None):
    """Return equations 4 and 7 with N×N matrices of the unpadded tokens."""
    tokens = x[mask]  # (N, H, d)
    count = len(tokens)
    centring = torch.eye(count, dtype=x.dtype) - torch.ones(count, count, dtype=x.dtype) / count
    kernels = [kernel(tokens[:, head], bandwidth) for head in range(x.shape[2])]

    def criterion(i, j):
        return torch.trace(kernels[i] @ centring @ kernels[j] @ centring) / max(count - 1, 1) ** 2

    return mean_over_pairs(x.shape[2], criterion)


@given(SHAPES, st.integers(0, 99))
def test_linear_is_the_mean_over_pairs_of_traces(make_vectors, mean_over_pairs, assert_same_gradient, shape, seed):
    x, mask = make_vectors(*shape, seed=seed)
    assert_same_gradient(x, hsic(x, mask), oracle(x, mask, mean_over_pairs, linear))


@given(SHAPES, st.integers(0, 99))
def test_unscaled_is_the_mean_of_traces_alone(make_vectors, mean_over_pairs, assert_same_gradient, shape, seed):
    x, mask = make_vectors(*shape, seed=seed)
    factor = max(int(mask.sum()) - 1, 1) ** 2
    assert_same_gradient(x, hsic(x, mask, unscaled=True), factor * oracle(x, mask, mean_over_pairs, linear))


@pytest.mark.parametrize("shape", [(2, 20, 3, 2), (1, 3, 4, 5)], ids=["H·d products", "N×N products"])
def test_both_routes_agree_with_the_oracle_without_padding(
    make_vectors, mean_over_pairs, assert_same_gradient, shape
):
    x, _ = make_vectors(*shape)
    everything = torch.ones(shape[:2], dtype=torch.bool)
    assert_same_gradient(x, hsic(x), oracle(x, everything, mean_over_pairs, linear))
    assert torch.autograd.gradcheck(hsic, x)


@given(SHAPES, st.sampled_from([None, 0.7, 3.0]), st.integers(0, 99))
def test_radial_is_the_mean_over_pairs_of_traces(
    make_vectors, mean_over_pairs, assert_same_gradient, shape, bandwidth, seed
):
    x, mask = make_vectors(*shape, seed=seed)
    value = hsic(x, mask, "rbf", bandwidth)
    assert_same_gradient(x, value, oracle(x, mask, mean_over_pairs, radial, bandwidth))


def test_radial_gradient_by_differences(make_vectors):
    x, mask = make_vectors(2, 3, 3, 2)
    assert torch.autograd.gradcheck(lambda x: hsic(x, mask, "rbf", 1.5), x)


def test_float32_agrees_with_float64(make_vectors):
    x, mask = make_vectors(4, 32, 12, 8)
    for kernel in ("linear", "rbf"):
        torch.testing.assert_close(
            hsic(x.float(), mask, kernel).double(), hsic(x, mask, kernel), rtol=1e-5, atol=1e-5
        )


def test_shifting_heads_changes_nothing(make_vectors):
    x, mask = make_vectors(2, 9, 3, 4)
    for kernel in ("linear", "rbf"):
        torch.testing.assert_close(hsic(x + 5.0, mask, kernel), hsic(x, mask, kernel))


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_tokens_that_are_all_alike_are_independent(kernel):
    x = torch.ones(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    value = hsic(x, None, kernel)
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    assert not x.grad.abs().gt(1e-12).any()


def test_wrong_options_are_refused():
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="unknown kernel: got 'cubic', expected 'linear' or 'rbf'"):
        hsic(x, None, "cubic")
    with pytest.raises(ValueError, match="the bandwidth is not positive: got 0; None takes the median distance"):
        hsic(x, None, "rbf", 0)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4)])
def test_no_tokens_are_independent(kernel, shape):
    assert hsic(torch.zeros(shape), None, kernel).item() == 0
