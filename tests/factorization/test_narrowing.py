"""Narrower values against slow oracles."""

import pytest
import torch

from collab_compress.factorization import Moments, narrow_values
from collab_compress.factorization.moments import damped_
from collab_compress.factorization.narrowing import explained_energy

HEADS, WIDTH, MODEL, SIZE = 3, 5, 11, 2


@pytest.fixture
def layer():
    torch.manual_seed(0)
    value, output = torch.randn(HEADS, MODEL, WIDTH).double(), torch.randn(HEADS, WIDTH, MODEL).double()
    mix = torch.randn(HEADS * WIDTH, HEADS * WIDTH).double()
    outputs = torch.randn(400, HEADS * WIDTH).double() @ mix + torch.randn(HEADS * WIDTH).double() * 3
    return value, output, outputs


def added(outputs, heads, output):
    """Σ_i o_i P_i O_i, head by head."""
    total, row = torch.zeros(len(outputs), output.shape[1]).double(), 0
    for head, maps in enumerate(heads):
        channels = outputs[:, head * WIDTH : (head + 1) * WIDTH] @ maps
        total += channels @ output[row : row + maps.shape[1]]
        row += maps.shape[1]
    return total


def test_bad_arguments_are_refused(layer):
    value, output, outputs = layer
    moments = Moments.of(outputs)
    for message, arguments in (
        ("value is not finite", (value * torch.nan, output, SIZE, moments)),
        ("output is not finite", (value, output * torch.inf, SIZE, moments)),
        (
            "moments do not fit the heads: got width 14, expected 15",
            (value, output, SIZE, Moments.of(outputs[:, 1:])),
        ),
        ("moments are no moments: got Tensor", (value, output, SIZE, moments.second)),
        ("value is no tensor: got ndarray", (value.numpy(), output, SIZE, moments)),
        ("value and output heads do not fit together", (value[:, :, 1:], output, SIZE, moments)),
        ("value and output heads do not fit together", (value[:2], output, SIZE, moments)),
    ):
        with pytest.raises(ValueError, match=message):
            narrow_values(*arguments)


@pytest.mark.parametrize("fold", [True, False])
def test_error_is_what_the_layer_loses_on_the_data(layer, fold):
    value, output, outputs = layer
    narrowed = narrow_values(value, output, SIZE, Moments.of(outputs), fold=fold, damping=1e-9)
    dense = outputs @ output.flatten(0, 1)
    lost = dense - added(outputs, narrowed.heads, narrowed.output) - (narrowed.bias if fold else 0.0)
    centred = dense - dense.mean(0) if fold else dense
    assert narrowed.data_error == pytest.approx(float(lost.norm() / centred.norm()), rel=1e-6)
    assert (narrowed.bias is not None) == fold
    if fold:
        torch.testing.assert_close(lost.mean(0), torch.zeros(MODEL).double(), atol=1e-8, rtol=0)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_values_that_never_vary_are_taken_by_the_bias(layer, noise):
    value, output, outputs = layer
    constant = outputs[:1].repeat(50, 1) + noise * torch.randn(50, HEADS * WIDTH).double()
    narrowed = narrow_values(value, output, SIZE, Moments.of(constant))
    dense = constant @ output.flatten(0, 1)
    torch.testing.assert_close(
        added(constant, narrowed.heads, narrowed.output) + narrowed.bias, dense, atol=1e-4, rtol=1e-6
    )
    assert 0 < narrowed.data_error < 1  # the error of the weights


def test_output_is_the_least_squares_fit(layer):
    value, output, outputs = layer
    narrowed = narrow_values(value, output, SIZE, Moments.of(outputs), damping=1e-12)
    centred = outputs - outputs.mean(0)
    channels = centred @ torch.block_diag(*narrowed.heads)
    expected = torch.linalg.lstsq(channels, centred @ output.flatten(0, 1)).solution
    torch.testing.assert_close(narrowed.output, expected, atol=1e-6, rtol=1e-6)


def test_channels_are_the_best_a_head_has_by_itself(layer):
    """With the best output projection, no other channels of a head lose less of its output: the tail of an SVD."""
    value, output, outputs = layer
    narrowed = narrow_values(value, output, SIZE, Moments.of(outputs), damping=1e-12)
    centred = outputs - outputs.mean(0)
    for head in range(HEADS):
        head_outputs = centred[:, head * WIDTH : (head + 1) * WIDTH]
        dense = head_outputs @ output[head]
        fit = head_outputs @ narrowed.heads[head]
        lost = dense - fit @ torch.linalg.lstsq(fit, dense).solution
        assert float(lost.norm()) == pytest.approx(float(torch.linalg.svdvals(dense)[SIZE:].norm()), rel=1e-6)


def test_without_data_the_maps_themselves_count(layer):
    value, output, _ = layer
    narrowed = narrow_values(value, output, SIZE, None)
    head_maps = [value[head] @ output[head] for head in range(HEADS)]
    narrowed_values = [value[head] @ narrowed.heads[head] for head in range(HEADS)]
    rows = narrowed.output.split(SIZE)
    lost = torch.stack(
        [dense - narrow @ row for dense, narrow, row in zip(head_maps, narrowed_values, rows, strict=True)]
    )
    assert narrowed.weight_error == pytest.approx(float(lost.norm() / torch.stack(head_maps).norm()), rel=1e-6)
    assert narrowed.data_error is None
    assert narrowed.bias is None


def test_all_channels_are_kept_as_they_are(layer):
    value, output, outputs = layer
    narrowed = narrow_values(value, output, WIDTH, Moments.of(outputs))
    assert all(torch.equal(channels, torch.eye(WIDTH).double()) for channels in narrowed.heads)
    assert torch.equal(narrowed.output, output.flatten(0, 1))
    assert (narrowed.weight_error, narrowed.data_error) == (0.0, 0.0)


@pytest.mark.parametrize("size", [-1, 0, 6])
def test_a_size_that_does_not_fit(layer, size):
    with pytest.raises(ValueError, match=f"size is out of range: got {size}, expected 1 to 5"):
        narrow_values(*layer[:2], size, None)


def test_heads_that_share_values_share_their_channels(layer):
    """No other channels lose less of the outputs of a group's heads, under their mean moments."""
    _, _, outputs = layer
    value, output = torch.randn(1, MODEL, WIDTH).double(), torch.randn(HEADS, WIDTH, MODEL).double()
    narrowed = narrow_values(value, output, 2, Moments.of(outputs), damping=1e-12)
    shared = narrowed.heads[0]
    assert shared.shape == (WIDTH, 2)
    centred = (outputs - outputs.mean(0)).unflatten(1, (HEADS, WIDTH))
    stacked = centred.flatten(0, 1)  # every head's outputs, one below the other
    side_by_side = stacked @ torch.cat(list(output), 1)
    fit = stacked @ shared
    lost = side_by_side - fit @ torch.linalg.lstsq(fit, side_by_side).solution
    assert float(lost.norm()) == pytest.approx(float(torch.linalg.svdvals(side_by_side)[2:].norm()), rel=1e-6)
    dense = outputs @ output.flatten(0, 1)
    channels = (outputs.unflatten(1, (HEADS, WIDTH)) @ shared).flatten(1)
    lost = dense - channels @ narrowed.output - narrowed.bias
    assert narrowed.data_error == pytest.approx(float(lost.norm() / (dense - dense.mean(0)).norm()), rel=1e-6)
    centred = channels - channels.mean(0)
    torch.testing.assert_close(narrowed.output, torch.linalg.lstsq(centred, dense - dense.mean(0)).solution)


def test_what_shared_values_capture_is_what_narrowing_keeps(layer):
    _, _, outputs = layer
    value, output = torch.randn(2, MODEL, WIDTH).double(), torch.randn(4, WIDTH, MODEL).double()
    outputs = torch.cat([outputs, outputs[:, :WIDTH].roll(1, 0) * 0.7 + outputs[:, -WIDTH:]], 1)
    moments = Moments.of(outputs)
    damped = damped_(moments.covariance(), 1e-3)
    alone, together = explained_energy(damped, list(output), 2)
    assert [len(energies) for energies in alone] == [WIDTH, WIDTH]
    flat = output.flatten(0, 1)
    assert float(together.sum()) == pytest.approx(float((flat * (damped @ flat)).sum()), rel=1e-6)
    for size in (1, 2, 3):
        narrowed = narrow_values(value, output, size, moments)
        lost = flat - torch.block_diag(*(channels for channels in narrowed.heads for _ in range(2))) @ narrowed.output
        loss = float((lost * (damped @ lost)).sum())
        assert loss == pytest.approx(float(together[2 * size :].sum()), rel=1e-6)
