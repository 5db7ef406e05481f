"""Mixing matrices and alphas."""

import pytest
import torch

from collab_compress import merge_alphas_, mix_heads_, read_factors
from collab_compress.analysis import (
    alpha_matrices,
    confidence,
    effective_rank,
    mixing_matrices,
    sample_cka,
)
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError


def test_strengths_do_not_depend_on_how_factors_are_scaled(either):
    model, _ = either
    before = mixing_matrices(model)
    for name, factors in read_factors(model).items():
        scale, module = torch.linspace(-2, 3, factors.query.shape[1]), model.get_submodule(name)
        factors.query.mul_(scale)
        module.mixing.data.div_(scale[module.mixing_channels])
    for name, matrix in mixing_matrices(model).items():
        torch.testing.assert_close(matrix, before[name], rtol=1e-5, atol=1e-6)
        largest = matrix.gather(0, matrix.abs().argmax(0, keepdim=True))
        assert (largest > 0).all()


def test_strengths_are_lengths_of_components(either):
    model, _ = either
    factors = read_factors(model)
    matrices = mixing_matrices(model)
    for site in find_attention(model):
        matrix = matrices[site.name]
        if site.name in factors:
            head_factors = factors[site.name]
            lengths = head_factors.query.norm(dim=0) * head_factors.key.norm(dim=0)
            torch.testing.assert_close(
                matrix.abs().float(), head_factors.mixing.detach().abs() * lengths, rtol=1e-5, atol=1e-6
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
    copies = alpha_matrices(bert)
    assert list(copies) == [site.name for site in find_attention(bert)]
    for matrix in copies.values():
        torch.testing.assert_close(matrix, torch.eye(3, dtype=torch.float64))
        matrix.zero_()
    assert all(float(matrix.trace()) == 3 for matrix in alpha_matrices(bert).values())


def test_effective_rank_counts_equal_singular_values():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.ones(4, 6)) == pytest.approx(1)
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 0.0]))) == pytest.approx(2)
    shares = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(torch.diag(shares * 7)) == pytest.approx(2**1.5)
    assert effective_rank(torch.zeros(3, 2)) == 0
    with pytest.raises(HeadError, match="expected a matrix"):
        effective_rank(torch.ones(3))


def test_no_float64_is_asked_of_a_device_that_has_none(bert, batch, monkeypatch):
    """Such as Apple's MPS: what is measured goes to the CPU first."""
    asked, cpu = [], torch.Tensor.cpu

    def watched(tensor):
        asked.append(tensor.dtype)
        return cpu(tensor)

    mix_heads_(bert)
    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    confidence(bert, [batch])
    (alphas, *_) = alpha_matrices(bert).values()
    sample_cka(torch.randn(5, 2, 3))
    assert torch.float32 in asked
    assert torch.float64 not in asked
    asked.clear()
    effective_rank(alphas.float())
    assert asked == [torch.float32]
    merge_alphas_(bert)
    assert len(asked) > 2
    assert set(asked) == {torch.float32}
