"""Measures that ride along with another see what they see alone, and the other does too."""

import torch

from collab_compress.analysis import bhattacharyya, confidence, discrepancy, head_energy, head_samples
from collab_compress.analysis.covariance import Samples
from collab_compress.analysis.diversity import Coefficients, Discrepancies
from collab_compress.analysis.stream import observed
from collab_compress.attention.install import head_hooks


def test_riders_measure_what_they_measure_alone(either):
    model, batches = either
    observers = samples, distances, overlaps = Samples(7, seed=3), Discrepancies(), Coefficients()
    sure = confidence(model, observed(model, batches, observers))
    for name, expected in confidence(model, batches).items():
        torch.testing.assert_close(sure[name], expected)
    for found, expected in (
        (samples.result(), head_samples(model, batches, 7, seed=3)),
        (overlaps.result(), bhattacharyya(model, batches)),
        ({k: v.l2 for k, v in distances.result().items()}, {k: v.l2 for k, v in discrepancy(model, batches).items()}),
    ):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_any_measure_can_be_ridden_along_with(bert, batch):
    samples = Samples(5)
    head_energy(bert, observed(bert, [batch], [samples]))
    expected = head_samples(bert, [batch], 5)
    assert samples.result().keys() == expected.keys()
    assert all(torch.equal(found, expected[name]) for name, found in samples.result().items())
    assert not any(head_hooks(layer.attention.self) for layer in bert.encoder.layer)
