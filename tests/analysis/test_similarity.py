"""SVCCA, CKA, discrepancy and overlap, against decompositions, centred kernels and loops."""

import numpy as np
import pytest
import torch

from collab_compress.analysis import (
    JointCovariance,
    bhattacharyya,
    cka,
    discrepancy,
    mean_over_pairs,
    svcca,
)
from collab_compress.analysis.similarity import Discrepancy
from collab_compress.heads import Recorder


def core(x, variance):
    """Centre x (N, d) and keep the directions with the most variance, (N, k)."""
    centred = x - x.mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    shares = np.cumsum(values**2) / np.sum(values**2)
    kept = 1
    while shares[kept - 1] < variance - 1e-12:
        kept += 1
    return left[:, :kept] * values[:kept]


def oracle(x, y, variance):
    """Return the canonical correlations of two cores, from an orthonormal basis of each."""
    bases = [np.linalg.qr(core(responses, variance))[0] for responses in (x, y)]
    return np.clip(np.linalg.svd(bases[0].T @ bases[1], compute_uv=False), 0, 1)


@pytest.mark.parametrize("variance", [0.5, 0.9, 0.99, 1.0])
def test_every_pair_is_that_of_the_two_step_definition(draw, variance):
    x = draw(heads=4).numpy()
    result = svcca(JointCovariance.of(draw(heads=4).unbind(1)), variance=variance)
    for i in range(4):
        for j in range(4):
            right = oracle(x[:, i], x[:, j], variance)
            assert result.directions[i, j] == len(right)
            np.testing.assert_allclose(result.coefficients[i, j, : len(right)], right, atol=1e-7)
            assert not result.coefficients[i, j, len(right) :].any()
            assert float(result.similarity[i, j]) == pytest.approx(right.mean(), abs=1e-7)
    pairs = [oracle(x[:, i], x[:, j], variance) for i in range(4) for j in range(i + 1, 4)]
    assert result.mean == pytest.approx(np.mean([pair.mean() for pair in pairs]))
    longest = max(map(len, pairs))
    padded = [np.pad(pair, (0, longest - len(pair))) for pair in pairs]
    np.testing.assert_allclose(result.curve, np.mean(padded, 0), atol=1e-7)


def test_different_widths_and_two_sides(draw):
    x, y = draw(width=5), draw(width=3, heads=2)
    both = JointCovariance.of([*x.unbind(1), *y.unbind(1)], leading=3)
    result = svcca(both)
    assert result.similarity.shape == (3, 2)
    assert result.labels == ("0", "1", "2")
    for i in range(3):
        for j in range(2):
            right = oracle(x[:, i].numpy(), y[:, j].numpy(), 0.99)
            np.testing.assert_allclose(result.coefficients[i, j, : len(right)], right, atol=1e-7)
    assert result.mean == pytest.approx(float(result.similarity.mean()))
    assert len(result.curve) == 3


def test_affine_maps_do_not_change_svcca(draw):
    x = draw(heads=2)
    turn = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = [x[:, 0] @ turn + 7, x[:, 1] * 0.01]
    torch.testing.assert_close(
        svcca(JointCovariance.of(moved), variance=1.0).coefficients,
        svcca(JointCovariance.of(x.unbind(1)), variance=1.0).coefficients,
    )
    same = svcca(JointCovariance.of([x[:, 0], moved[0]]), variance=1.0)
    assert float(same.similarity[0, 1]) == pytest.approx(1)
    rotation = torch.linalg.qr(turn).Q
    torch.testing.assert_close(
        svcca(JointCovariance.of([3 * x[:, 0] @ rotation, x[:, 1]])).coefficients,
        svcca(JointCovariance.of(x.unbind(1))).coefficients,
    )


def test_svcca_of_independent_noise():
    """The largest canonical correlation of independent Gaussians tends to 2 √(d/N) for d ≪ N (Wachter, 1980)."""
    x = torch.randn(20_000, 2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coefficients = svcca(JointCovariance.of(x.unbind(1)), variance=1.0).coefficients[0, 1]
    assert float(coefficients[0]) == pytest.approx(2 * (50 / 20_000) ** 0.5, rel=0.05)


def test_a_head_with_itself_is_1_and_few_tokens_are_1_too(draw):
    result = svcca(JointCovariance.of(draw().unbind(1)))
    torch.testing.assert_close(result.similarity.diagonal(), torch.ones(3, dtype=torch.float64))
    few = svcca(JointCovariance.of(draw(tokens=4).unbind(1)), variance=1.0)
    torch.testing.assert_close(few.similarity, torch.ones(3, 3, dtype=torch.float64))
    assert (few.directions == 3).all()


@pytest.mark.parametrize("measure", [cka, lambda joint: svcca(joint).similarity])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_that_never_varies_has_similarity_0(draw, dtype, measure):
    x = draw(dtype=dtype)
    x[:, 1] = 0.1
    similarity = measure(JointCovariance.of(x.unbind(1)))
    assert not similarity[1].any()
    assert not similarity[:, 1].any()
    assert float(similarity[0, 2]) > 0.01
    assert similarity.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_are_rounding_only_are_never_kept(draw, dtype):
    x = draw().to(dtype)
    x[:, :, 3:] = x[:, :, :2] * 2  # three directions are left
    result = svcca(JointCovariance.of(x.unbind(1)), variance=1.0)
    assert (result.directions == 3).all()
    expected = oracle(*(x[:, head, :3].double().numpy() for head in (0, 1)), 1.0)
    np.testing.assert_allclose(result.coefficients[0, 1, :3], expected, atol=1e-5)


@pytest.mark.parametrize("measure", [cka, lambda *x: svcca(*x).similarity])
def test_two_matrices_can_be_compared_as_they_are(draw, measure):
    one, other = draw(heads=2).unbind(1)
    expected = measure(JointCovariance.of([one, other]))[0, 1]
    assert measure(one, other).shape == (1, 1)
    torch.testing.assert_close(measure(one, other)[0, 0], expected)


def hsic(x, y):
    """Return the biased HSIC of the linear kernels of two heads (N, d), equation 4 of the paper."""
    n = len(x)
    centre = np.eye(n) - np.ones((n, n)) / n
    return np.trace(x @ x.T @ centre @ y @ y.T @ centre) / (n - 1) ** 2


def test_linear_cka_is_that_of_centred_kernels(draw):
    heads = [*draw(tokens=60).unbind(1), *draw(tokens=60, width=2, seed=4).unbind(1)]
    arrays = [head.numpy() for head in heads]
    expected = np.array([[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in arrays] for a in arrays])
    similarities = cka(JointCovariance.of(heads))
    np.testing.assert_allclose(similarities, expected, atol=1e-10)
    np.testing.assert_allclose(cka(JointCovariance.of(heads, leading=3)), expected[:3, 3:], atol=1e-10)
    assert mean_over_pairs(similarities) == pytest.approx(expected[np.triu_indices(6, 1)].mean())


def test_rotations_scalings_and_shifts_do_not_change_cka(draw):
    def measure(heads):
        return cka(JointCovariance.of(heads.unbind(1)))

    x = draw()
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    moved = x.clone()
    moved[:, 0] = 7 * x[:, 0] @ turn + 3
    torch.testing.assert_close(measure(moved), measure(x))
    torch.testing.assert_close(measure(x).diagonal(), torch.ones(3, dtype=torch.float64))
    moved[:, 1] = x[:, 0]
    assert float(measure(moved)[0, 1]) == pytest.approx(1)


def test_cka_of_independent_noise():
    x = torch.randn(2000, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similarity = mean_over_pairs(cka(JointCovariance.of(x.unbind(1))))
    assert similarity == pytest.approx(20 / 2000, rel=0.1)  # √(d·d)/N


NAME = "encoder.layer.0.attention.self"


def rows_of(model, batches):
    """Return the attention probabilities of unpadded queries, (N, H, S) for each use and batch."""
    probs = {}
    for batch in batches:
        with Recorder(model, ["probs"]) as recorder, torch.no_grad():
            model(**batch)
            counts = {}
            for reading in recorder.take():
                name = reading.site.name
                use = counts[name] = counts.get(name, -1) + 1
                probs.setdefault((name, use), []).append(reading.probs.transpose(1, 2)[reading.masks.query])
    shared = {name for name, use in probs if use}
    return {f"{name}[{use}]" if name in shared else name: rows for (name, use), rows in probs.items()}


def matrices(parts, measure):
    """Return the mean over all positions of a measure between two heads' vectors, one pair at a time."""
    heads = parts[0].shape[1]
    sums, count = torch.zeros(heads, heads, dtype=torch.float64), 0
    for part in parts:
        for position in part.double():
            count += 1
            for i in range(heads):
                for j in range(heads):
                    sums[i, j] += measure(position[i], position[j])
    return sums / count


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm())) if a.norm() * b.norm() > 0 else 0.0


def distance(a, b):
    return float((a - b).norm())


def test_discrepancy_of_outputs(either, real_responses):
    model, batches = either
    discrepancies = discrepancy(model, batches)
    for name, tokens in real_responses(model, batches).items():
        cosines, distances = (matrices([tokens], measure) for measure in (cosine, distance))
        torch.testing.assert_close(discrepancies[name].cosine, cosines + 1, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(discrepancies[name].l2, distances, atol=1e-5, rtol=1e-5)


def test_bhattacharyya_coefficients(either):
    model, batches = either
    coefficients = bhattacharyya(model, batches)
    right = rows_of(model, batches)
    assert coefficients.keys() == right.keys()
    for name, parts in right.items():
        torch.testing.assert_close(
            coefficients[name], matrices(parts, lambda a, b: float((a * b).sqrt().sum())), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            coefficients[name].diagonal(), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0
        )


def test_discrepancy_is_that_of_all_entries():
    generator = torch.Generator().manual_seed(0)
    apart = Discrepancy(torch.rand(3, 3, generator=generator), torch.rand(3, 3, generator=generator))
    for measure in ("l2", "cosine", "difference"):
        total = sum(abs(float(value)) for value in getattr(apart, measure).flatten())
        assert apart.norm(measure) == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(apart.difference, 1 - (apart.cosine - 1))


def test_a_silent_head_has_cosine_0(bert, batch):
    with torch.no_grad():
        bert.get_submodule(NAME).value.weight[8:16] = 0
        bert.get_submodule(NAME).value.bias[8:16] = 0
    pairs = discrepancy(bert, [batch])[NAME]
    assert (pairs.cosine[1] == 1).all()
    assert pairs.l2.isfinite().all()


def test_one_head_and_one_token(make_tiny):
    model = make_tiny("bert")
    for layer in model.encoder.layer:
        layer.attention.self.num_attention_heads, layer.attention.self.attention_head_size = 1, 24
        layer.attention.self.scaling = 24**-0.5
    batch = {"input_ids": torch.tensor([[5]])}
    pairs = discrepancy(model, [batch])[NAME]
    assert pairs.l2.tolist() == [[0]]
    assert float(pairs.cosine) == pytest.approx(2)
    assert float(bhattacharyya(model, [batch])[NAME]) == pytest.approx(1)
    torch.testing.assert_close(svcca(JointCovariance.of([torch.randn(9, 2)])).similarity, torch.ones(1, 1).double())
