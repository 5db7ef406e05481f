"""Mixing matrices and alphas for heatmaps, and their scores."""

import pytest
import torch

from collab_compress import mix_heads_, read_factors
from collab_compress.analysis import alpha_matrices, effective_rank, mixing_matrices, skew_symmetry
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.errors import HeadError


def test_strengths_do_not_depend_on_how_factors_are_scaled(either):
    model, _ = either
    before = mixing_matrices(model)
    for factors in read_factors(model).values():
        scale = torch.linspace(-2, 3, factors.query.shape[1])
        factors.query.mul_(scale)
        factors.mixing.div_(scale)
    for name, matrix in mixing_matrices(model).items():
        torch.testing.assert_close(matrix, before[name], rtol=1e-5, atol=1e-6)
        largest = matrix.gather(0, matrix.abs().argmax(0, keepdim=True))
        assert (largest > 0).all()


def test_strengths_are_lengths_of_components(either):
    model, _ = either
    factors = read_factors(model)
    found = mixing_matrices(model)
    for site in find_attention(model, FAMILIES):
        matrix = found[site.name]
        if site.name in factors:
            each = factors[site.name]
            lengths = each.query.norm(dim=0) * each.key.norm(dim=0)
            torch.testing.assert_close(
                matrix.abs().float(), each.mixing.detach().abs() * lengths, rtol=1e-5, atol=1e-6
            )
        else:
            query, key = (site.part(getattr(site.family, side)).weight.norm(dim=1) for side in ("query", "key"))
            torch.testing.assert_close(matrix.sum(0).float(), (query * key).detach(), rtol=1e-5, atol=1e-6)
            assert int((matrix != 0).sum(0).max()) == 1


def test_components_can_be_ordered(either):
    model, _ = either
    plain = mixing_matrices(model)
    for name, matrix in mixing_matrices(model, order=True).items():
        energy = matrix.square().sum(0)
        assert (energy.diff() <= 0).all()
        torch.testing.assert_close(energy, plain[name].square().sum(0).sort(descending=True).values)


def test_alphas_are_copies(bert):
    with pytest.raises(HeadError, match="has no alphas"):
        alpha_matrices(bert)
    mix_heads_(bert)
    found = alpha_matrices(bert)
    assert list(found) == [site.name for site in find_attention(bert, FAMILIES)]
    for matrix in found.values():
        torch.testing.assert_close(matrix, torch.eye(3, dtype=torch.float64))
        matrix.zero_()
    assert all(float(matrix.trace()) == 3 for matrix in alpha_matrices(bert).values())


def test_skew_symmetry_is_the_share_of_the_skew_part():
    matrix = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    off = matrix - torch.diag(matrix.diagonal())
    skew, symmetric = (off - off.T) / 2, (off + off.T) / 2
    right = float(skew.norm() ** 2 / (skew.norm() ** 2 + symmetric.norm() ** 2))
    assert skew_symmetry(matrix) == pytest.approx(right)
    assert float(skew.norm() ** 2 + symmetric.norm() ** 2) == pytest.approx(float(off.norm() ** 2))
    assert skew_symmetry(skew + 5 * torch.eye(7)) == pytest.approx(1)
    assert skew_symmetry(symmetric) == pytest.approx(0)
    assert skew_symmetry(torch.eye(7)) == 0
    assert skew_symmetry(torch.ones(1, 1)) == 0
    large = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    assert skew_symmetry(large) == pytest.approx(0.5, abs=0.01)
    with pytest.raises(HeadError, match="square matrix"):
        skew_symmetry(torch.ones(2, 3))


def test_effective_rank_counts_equal_singular_values():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.ones(4, 6)) == pytest.approx(1)
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 0.0]))) == pytest.approx(2)
    shares = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(torch.diag(shares * 7)) == pytest.approx(2**1.5)
    assert effective_rank(torch.zeros(3, 2)) == 0
    with pytest.raises(HeadError, match="expected a matrix"):
        effective_rank(torch.ones(3))
