"""Energy curves, against singular values of matrices that are formed in full."""

import numpy as np
import pytest
import torch
from recorded import recorded_inputs

from collab_compress import Compression, Solver, compress, merge_alphas_, mix_heads_, read_factors
from collab_compress.analysis import head_energy, tensor_energy, value_energy
from collab_compress.architectures import find_dense_attention, find_dense_values
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.head_weights import head_weights
from collab_compress.errors import HeadError
from collab_compress.factorization import HeadTensor


def curve(matrix):
    """Return the share of the squared singular values in the first 0, 1, … of them."""
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False) ** 2
    return np.concatenate([[0], np.cumsum(values) / values.sum()])


def assert_energy(energy, queries, keys, atol=1e-9):
    """Compare with the energy of dense heads (H, D, d); moments are sums of float32 products."""
    heads = len(queries)
    for head in range(heads):
        np.testing.assert_allclose(energy.query[head], curve(queries[head]), atol=atol)
        np.testing.assert_allclose(energy.key[head], curve(keys[head]), atol=atol)
        right = curve(queries[head] @ keys[head].T)[: energy.product.shape[1]]
        np.testing.assert_allclose(energy.product[head][: len(right)], right, atol=atol)
    joined = [np.concatenate(list(factors), 1) for factors in (queries, keys)]
    total = sum(queries[head] @ keys[head].T for head in range(heads))
    for measured, matrix in (
        (energy.joined_query, joined[0]),
        (energy.joined_key, joined[1]),
        (energy.joined_product, total),
    ):
        right = curve(matrix)
        shared = min(len(measured), len(right))
        np.testing.assert_allclose(measured[:shared], right[:shared], atol=atol)
        assert float(measured[-1]) == pytest.approx(1)
    apart = np.concatenate([np.linalg.svd(q @ k.T, compute_uv=False) for q, k in zip(queries, keys, strict=True)])
    values = np.sort(apart**2)[::-1]
    right = np.concatenate([[0], np.cumsum(values) / values.sum()])[: len(energy.unshared)]
    np.testing.assert_allclose(energy.unshared[: len(right)], right, atol=atol)
    products = [q @ k.T for q, k in zip(queries, keys, strict=True)]
    least = np.minimum(*(curve(np.concatenate([p.T if side else p for p in products], 1)) for side in (0, 1)))
    np.testing.assert_allclose(energy.shared, least, atol=atol)


def root(moment, damping):
    """Return a matrix S with SᵀS = moment + damping."""
    values, vectors = np.linalg.eigh(moment + damping * np.trace(moment) / len(moment) * np.eye(len(moment)))
    return (vectors * np.sqrt(values)) @ vectors.T


def real_inputs(model, site, batches):
    """Return the inputs of the query and key projections without padding, (N, D) each."""
    inputs = {"query": [], "key": []}
    for batch in batches:
        encoder = batch["attention_mask"].bool()
        decoder = batch.get("decoder_attention_mask", encoder).bool()
        read = recorded_inputs(model, batch, {"query": site.query, "key": site.key})
        inputs["query"] += [call[encoder if site.kind == "encoder" else decoder] for call in read["query"]]
        inputs["key"] += [call[decoder if site.kind == "decoder" else encoder] for call in read["key"]]
    return [torch.cat(calls).double().numpy() for calls in inputs.values()]


def test_bare_weights_have_the_energy_of_their_matrices(family, make_tiny):
    model = make_tiny(family)
    energies = head_energy(model)
    sites = find_dense_attention(model)
    assert list(energies) == [site.name for site in sites]
    for site in sites:
        assert_energy(energies[site.name], site.query_heads().double().numpy(), site.key_heads().double().numpy())


def test_with_batches_it_is_the_energy_of_what_inputs_meet(family, make_tiny, calibration):
    model = make_tiny(family)
    energies = head_energy(model, calibration[:2], damping=0.01)
    weights = head_weights(model, find_dense_attention(model), calibration[:2])
    for site in find_dense_attention(model):
        inputs = real_inputs(model, site, calibration[:2])
        moments = [np.cov(x.T, bias=True) for x in inputs]
        s_query, s_key = (root(moment, 0.01) for moment in moments)
        queries, keys = (w.double().numpy() for w in (site.query_heads(), site.key_heads()))
        queries = queries * weights[site.name].numpy()[:, None, None]
        assert_energy(energies[site.name], s_query @ queries, s_key @ keys, atol=1e-6)


def test_converted_heads_are_those_of_the_factors(either):
    model, batches = either
    factors = read_factors(model)
    energies = head_energy(model)
    weighted = head_energy(model, batches)
    assert energies.keys() == weighted.keys()
    for name, head_factors in factors.items():
        query, mixing, key = (
            factor.detach().double().numpy() for factor in (head_factors.query, head_factors.mixing, head_factors.key)
        )
        assert_energy(energies[name], query * mixing[:, None], np.stack([key] * len(mixing)))
        assert energies[name].rank(1.0, "shared") <= key.shape[1]
        assert weighted[name].rank(0.99, "joined_product") <= key.shape[1]


def test_the_suggested_rank_is_the_first_to_reach_the_share():
    query = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64))
    energy = tensor_energy(HeadTensor(query[None, :, :3], torch.eye(4, dtype=torch.float64)[None, :, :3]))
    torch.testing.assert_close(energy.joined_product, torch.tensor([0, 9, 13, 14], dtype=torch.float64) / 14)
    assert energy.ranks() == energy.ranks("joined_product") == energy.ranks("shared") == {0.9: 2, 0.95: 3, 0.99: 3}
    assert energy.rank(9 / 14) == 1
    assert energy.rank(1e-9) == 1
    assert energy.ranks("joined_key") == {0.9: 3, 0.95: 3, 0.99: 3}


def test_heads_that_share_all_need_fewer_dimensions_together():
    """Two heads alike up to a rotation: apart full rank, together half (section 3.1 of the paper)."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 20, 4, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    tensor = HeadTensor(*(torch.stack([w, w @ turn]) for w in weights))
    energy = tensor_energy(tensor)
    assert energy.rank(1.0, "joined_product") == energy.rank(1.0, "shared") == 4
    assert energy.rank(1.0) == 8


def test_a_conversion_lies_between_the_bounds(bert, calibration):
    rank = 12
    energies = head_energy(bert)
    report = compress(bert, Compression(dk=rank, head_dim=rank), calibration=None)
    for module in report.modules:
        energy = energies[module.name]
        assert module.weight_error <= (1 - float(energy.unshared[rank])) ** 0.5 + 1e-6
        assert module.weight_error >= (1 - float(energy.shared[rank])) ** 0.5 - 1e-6
        assert energy.rank(0.9, "shared") <= energy.rank(0.9)


@pytest.mark.parametrize("bias", [True, False])
def test_with_batches_it_is_weighed_as_in_a_conversion_with_the_same(family, bias, make_tiny, calibration):
    model, rank = make_tiny(family), 12
    if not bias:
        for site in find_dense_attention(model):
            site.query.register_parameter("bias", None)
    used, _ = split_held_back(calibration)
    energies = head_energy(model, iter(used))
    compression = Compression(dk=rank, head_dim=rank, solver=Solver(sweeps=5, refit=False))
    for module in compress(model, compression, calibration).modules:
        energy = energies[module.name]
        assert module.data_error <= (1 - float(energy.unshared[rank])) ** 0.5 + 1e-6
        assert module.data_error >= (1 - float(energy.shared[rank])) ** 0.5 - 1e-6


def test_zero_weights_need_no_component():
    energy = tensor_energy(HeadTensor(torch.zeros(2, 6, 3).double(), torch.randn(2, 6, 3).double()))
    assert energy.rank() == 0
    assert (energy.product == 1).all()
    assert energy.joined_key.isfinite().all()


def test_one_token_still_has_a_damped_moment(bert):
    with pytest.raises(HeadError, match="covariance of the query inputs is singular"):
        head_energy(bert, [{"input_ids": torch.tensor([[5]])}])


def test_what_cannot_be_measured_is_refused(bert):
    energy = head_energy(bert)["encoder.layer.0.attention.self"]
    with pytest.raises(HeadError, match="share of energy is 0"):
        energy.rank(0)
    with pytest.raises(HeadError, match="unknown curve 'value'"):
        energy.rank(0.9, "value")
    bert.get_submodule("encoder.layer.1.attention.self").query.weight.data[0, 0] = torch.inf
    with pytest.raises(HeadError, match=r"layer\.1.* weights are not finite"):
        head_energy(bert)


@pytest.mark.parametrize("weighed", [False, True])
def test_values_of_each_head_have_the_energy_of_their_maps(family, weighed, make_tiny, calibration, real_responses):
    model, batches = make_tiny(family), calibration[:2]
    energies, responses = (
        value_energy(model, batches if weighed else None, damping=1e-6),
        real_responses(model, batches),
    )
    for site in find_dense_values(model):
        value, output = site.value_heads().double().numpy(), site.output_heads().double().numpy()
        read = torch.cat([use.flatten(1) for use in responses[site.name]]).double().numpy()
        cov = np.cov(read.T, bias=True) if weighed else None
        for head in range(site.heads):
            own = slice(head * 8, head * 8 + 8)
            made = value[head] @ output[head] if cov is None else root(cov[own, own], 0) @ output[head]
            np.testing.assert_allclose(energies[site.name].heads[head], curve(made)[:9], atol=1e-5)


@pytest.mark.parametrize("dv", [3, 6, 12, 21])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_conversion_of_values_captures_what_the_curve_says(family, weighed, dv, make_tiny, calibration):
    model = make_tiny(family)
    used, _ = split_held_back(calibration)
    energies = value_energy(model, used if weighed else None, damping=1e-6)
    solver = Solver(damping=1e-6, refit=False)
    report = compress(model, Compression(dv=dv, solver=solver), calibration=calibration if weighed else None)
    for module in report.values:
        error = module.data_error if weighed else module.weight_error
        energy = energies[module.name]
        assert error**2 == pytest.approx(1 - float(energy.narrow[dv]), abs=1e-4)
        assert energy.narrow[dv] <= energy.joined[dv] + 1e-9


def test_narrow_and_mixed_values_have_curves_too(family, make_tiny, calibration):
    model = make_tiny(family)
    compress(model, Compression(dv=9), calibration=calibration[:2])
    for energy in value_energy(model, calibration[:2]).values():
        assert energy.narrow.shape == (10,)
        assert energy.heads.shape == (3, 4)
        assert energy.ranks()[0.9] <= energy.rank(1) <= 9
        assert energy.rank(0.9, "joined") <= energy.rank(0.9)
    mixed = make_tiny(family)
    mix_heads_(mixed)
    with torch.no_grad():
        for name, parameter in mixed.named_parameters():
            if name.endswith("alphas"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    before = value_energy(mixed, calibration[:2])
    merge_alphas_(mixed)
    for name, energy in value_energy(mixed, calibration[:2]).items():
        torch.testing.assert_close(before[name].narrow, energy.narrow, atol=1e-5, rtol=1e-5)


def test_values_that_cannot_be_measured_are_refused(bert):
    energy = value_energy(bert)["encoder.layer.0.attention.self"]
    with pytest.raises(HeadError, match="share of energy is 2"):
        energy.rank(2)
    with pytest.raises(HeadError, match="unknown curve 'wide'"):
        energy.rank(0.9, "wide")
    with pytest.raises(HeadError, match="values' moments are singular"):
        value_energy(bert, [{"input_ids": torch.tensor([[5]])}])
    bert.get_submodule("encoder.layer.1.attention.output.dense").weight.data[0, 0] = torch.inf
    with pytest.raises(HeadError, match=r"layer\.1.* weights are not finite"):
        value_energy(bert)
