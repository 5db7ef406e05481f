"""Mixing matrices, alphas, and the energy of components."""

import numpy as np
import pytest
import torch

from collab_compress import merge_alphas_, mix_heads_, read_factors
from collab_compress.analysis import alpha_matrices, confidence, head_energy, mixing_matrices
from collab_compress.architectures import find_attention, find_dense_attention


def test_strengths_do_not_depend_on_how_factors_are_scaled(either):
    model, _ = either
    before = mixing_matrices(model)
    for name, factors in read_factors(model).items():
        scale, module = torch.linspace(-2, 3, factors.query.shape[1]), model.get_submodule(name)
        factors.query.mul_(scale)
        module.qk.mixing.data.div_(scale[module.qk.channels])
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
            query, key = (site.part(getattr(site.paths, side)).weight.norm(dim=1) for side in ("query", "key"))
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
    mix_heads_(bert)
    copies = alpha_matrices(bert)
    assert list(copies) == [site.name for site in find_attention(bert)]
    for matrix in copies.values():
        torch.testing.assert_close(matrix, torch.eye(3, dtype=torch.float64))
        matrix.zero_()
    assert all(float(matrix.trace()) == 3 for matrix in alpha_matrices(bert).values())


def test_no_float64_is_asked_of_a_device_that_has_none(bert, batch, monkeypatch):
    """Such as Apple's MPS: what is measured goes to the CPU first."""
    asked, cpu = [], torch.Tensor.cpu

    def watched(tensor):
        asked.append(tensor.dtype)
        return cpu(tensor)

    mix_heads_(bert)
    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    confidence(bert, [batch])
    alpha_matrices(bert)
    assert torch.float32 in asked
    assert torch.float64 not in asked
    merge_alphas_(bert)
    assert len(asked) > 2
    assert set(asked) == {torch.float32}


def curve(matrix):
    """Return the share of the squared singular values in the first 0, 1, … of them."""
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False) ** 2
    return np.concatenate([[0], np.cumsum(values) / values.sum()])


def assert_energy(energy, queries, keys):
    """Compare with the energy of dense heads (H, D, d)."""
    products = [query @ key.T for query, key in zip(queries, keys, strict=True)]
    joined = [np.concatenate(list(factors), 1) for factors in (queries, keys)]
    pairs = [*zip(energy.heads, products, strict=True)]
    pairs += [(energy.query, joined[0]), (energy.key, joined[1]), (energy.product, sum(products))]
    for measured, matrix in pairs:
        length = min(len(measured), min(matrix.shape) + 1)
        np.testing.assert_allclose(measured[:length], curve(matrix)[:length], atol=1e-9)
        assert float(measured[-1]) == pytest.approx(1)


def test_heads_have_the_energy_of_their_matrices_or_factors(either):
    model, _ = either
    energies, converted = head_energy(model), read_factors(model)
    assert list(energies) == [site.name for site in find_attention(model)]
    for name, energy in energies.items():
        if name in converted:
            factors = converted[name]
            query, mixing, key = (part.detach().double() for part in (factors.query, factors.mixing, factors.key))
            heads = query * mixing[:, None], torch.stack([key] * len(mixing))
        else:
            (site,) = find_dense_attention(model, name)
            heads = site.query_heads().double(), site.key_heads().double()
        assert_energy(energy, *(part.numpy() for part in heads))


def test_zero_weights_need_no_component(bert):
    name = "encoder.layer.0.attention.self"
    torch.nn.init.zeros_(bert.get_submodule(name).query.weight)
    energy = head_energy(bert)[name]
    assert (energy.product == 1).all()
    assert (energy.heads == 1).all()
    assert energy.key[1] < 1
