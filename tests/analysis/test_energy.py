"""Energy curves, against singular values of matrices that are formed in full."""

import numpy as np
import pytest
import torch

from collab_compress import read_factors
from collab_compress.analysis import head_energy
from collab_compress.architectures import find_dense_attention


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


def test_weights_have_the_energy_of_their_matrices(family, make_tiny):
    model = make_tiny(family)
    energies = head_energy(model)
    sites = find_dense_attention(model)
    assert list(energies) == [site.name for site in sites]
    for site in sites:
        assert_energy(energies[site.name], site.query_heads().double().numpy(), site.key_heads().double().numpy())


def test_converted_heads_are_those_of_the_factors(either):
    model, _ = either
    energies = head_energy(model)
    for name, factors in read_factors(model).items():
        query, mixing, key = (
            factor.detach().double().numpy() for factor in (factors.query, factors.mixing, factors.key)
        )
        assert_energy(energies[name], query * mixing[:, None], np.stack([key] * len(mixing)))


def test_zero_weights_need_no_component(bert):
    name = "encoder.layer.0.attention.self"
    torch.nn.init.zeros_(bert.get_submodule(name).query.weight)
    energy = head_energy(bert)[name]
    assert (energy.product == 1).all()
    assert (energy.heads == 1).all()
    assert energy.key[1] < 1
