import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import nuclear_growth, nuclear_norm


def draw(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, heads, generator=generator, dtype=torch.float64).requires_grad_()


@given(st.integers(1, 6), st.integers(0, 99))
def test_norm_is_the_trace_of_the_root(assert_same_gradient, heads, seed):
    """‖α‖_* = tr √(αᵀα), by eigenvalues instead of singular values."""
    alphas = draw(heads, seed)
    expected = torch.linalg.eigvalsh(alphas.T @ alphas).clamp(min=0).sqrt().sum()
    assert_same_gradient(alphas, nuclear_norm(alphas), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 6), st.integers(0, 99))
def test_gradient_is_the_polar_factor(heads, seed):
    alphas = draw(heads, seed)
    left, _, right = torch.linalg.svd(alphas.detach())
    (gradient,) = torch.autograd.grad(nuclear_norm(alphas), alphas)
    torch.testing.assert_close(gradient, left @ right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_at_the_identity_is_the_identity(dtype):
    alphas = torch.eye(12, dtype=dtype, requires_grad=True)
    norm = nuclear_norm(alphas)
    norm.backward()
    assert norm.item() == 12.0
    torch.testing.assert_close(alphas.grad, torch.eye(12, dtype=dtype))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_gradient_at_a_singular_matrix_is_a_subgradient(rank):
    alphas = draw(5, 0).detach()[:, :rank] @ draw(5, 1).detach()[:rank]
    alphas.requires_grad_()
    norm = nuclear_norm(alphas)
    (gradient,) = torch.autograd.grad(norm, alphas)
    assert torch.linalg.matrix_norm(gradient, 2) <= 1 + 1e-9
    # ⟨G, α⟩ = ‖α‖_* and ‖G‖₂ ≤ 1 are what makes G a subgradient.
    torch.testing.assert_close((gradient * alphas).sum(), norm)


def test_what_is_not_finite_has_no_norm():
    alphas = torch.eye(3).repeat(3, 1, 1)
    alphas[1, 0, 2], alphas[2, 1, 1] = torch.nan, torch.inf
    assert nuclear_norm(alphas).isnan().tolist() == [False, True, True]
    assert nuclear_growth(alphas, 1e-4).isnan().tolist() == [False, True, True]


def test_against_the_present_norm_it_is_the_growth_with_the_gradient_of_the_norm():
    alphas = draw(4, 2)
    value = nuclear_growth(alphas, 1e-4)
    assert value.item() == pytest.approx(1e-4, abs=1e-12)
    (gradient,) = torch.autograd.grad(value, alphas)
    torch.testing.assert_close(gradient, -torch.autograd.grad(nuclear_norm(alphas), alphas)[0])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"alphas have the wrong shape: got \(2, 3\), expected \(…, H, H\)"):
        nuclear_norm(torch.ones(2, 3))
