import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import orthogonality

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.integers(1, 5))
SCALES = st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.6, 1.0, 30.0])


def norm_at(vectors):
    """Return σ(VᵀV − I) of one position's heads (H, d), equation 8: H×H for any H and d."""
    columns = vectors.T
    return torch.linalg.svdvals(columns.T @ columns - torch.eye(len(vectors), dtype=vectors.dtype)).max()


def oracle(x, mask):
    return torch.stack([norm_at(vectors) for vectors in x[mask]]).mean()


def with_eigenvalues(eigenvalues, width, seed=0):
    """Return heads (1, 1, H, d) at one position whose VᵀV has these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    heads = len(eigenvalues)
    left = torch.linalg.qr(torch.randn(heads, heads, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, heads, generator=generator, dtype=torch.float64)).Q
    return (left * torch.tensor(eigenvalues, dtype=torch.float64).sqrt() @ right.T)[None, None]


@given(SHAPES, SCALES, st.integers(0, 99))
def test_it_is_the_mean_of_spectral_norms(make_vectors, assert_same_gradient, shape, scale, seed):
    x, mask = make_vectors(*shape, seed=seed)
    x = (x.detach() * scale).requires_grad_()
    assert_same_gradient(x, orthogonality(x, mask), oracle(x, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "eigenvalues",
    [
        (0.2, 0.9, 1.0, 1.5),  # the smallest is the farthest from 1
        (0.2, 0.9, 1.0, 1.9),
        (0.2, 1.8, 1.0, 1.0),  # a tie across 1
        (0.2, 1.8 + 1e-6, 1.0, 1.0),
        (1.7, 1.7, 1.7, 0.9),  # a tie on one side
        (5.0, 5.0 - 1e-5, 5.0 - 1e-4, 5.0 - 1e-3),
        (0.0, 0.0, 1.0, 1.0),
        (1.0 + 1e-4, 1.0, 1.0, 1.0 - 1e-4),
        (4.0,),
        (1e6, 1.0),
    ],
)
def test_hard_spectra(eigenvalues, dtype):
    x = with_eigenvalues(eigenvalues, 6).to(dtype).requires_grad_()
    value = orthogonality(x)
    expected = max(abs(eigenvalue - 1) for eigenvalue in eigenvalues)
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    (gradient,) = torch.autograd.grad(value, x)
    # A subgradient is 2 V S with S of nuclear norm at most 1, which also bounds it where eigenvalues tie.
    assert gradient.norm() <= 2 * max(eigenvalues) ** 0.5 * (1 + 1e-4)


def test_orthonormal_heads_have_norm_and_gradient_zero():
    x = torch.eye(3)[None, None].repeat(2, 2, 1, 1).requires_grad_()
    value = orthogonality(x)
    value.backward()
    assert value.item() == 0.0
    assert not x.grad.any()


@pytest.mark.parametrize(("heads", "width"), [(3, 5), (5, 3)])
def test_zero_vectors_have_norm_one(heads, width):
    x = torch.zeros(2, 2, heads, width, requires_grad=True)
    value = orthogonality(x)
    value.backward()
    assert value.item() == 1.0
    assert not x.grad.any()


def test_float32_of_large_vectors(make_vectors):
    """Their Gram matrix is finite, and its square is not."""
    x, mask = make_vectors(2, 3, 4, 5, seed=0)
    x = x.detach() * 1e10
    torch.testing.assert_close(orthogonality(x.float(), mask).double(), oracle(x, mask), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (2, 3, 4, 0)])
def test_nothing_is_not_orthogonal(shape):
    with pytest.raises(ValueError, match=r"x has no heads or no channels: got \(2, 3, "):
        orthogonality(torch.zeros(shape))
