"""Narrower values against slow oracles."""

import pytest
import torch

from collab_compress.factorization import Moments, narrow_values
from collab_compress.factorization.narrowing import captured, damp

HEADS, WIDTH, MODEL, SIZES = 3, 5, 11, (2, 3, 2)


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
    for head, kept in enumerate(heads):
        channels = outputs[:, head * WIDTH : (head + 1) * WIDTH] @ kept
        total += channels @ output[row : row + kept.shape[1]]
        row += kept.shape[1]
    return total


@pytest.mark.parametrize("fold", [True, False])
def test_error_is_what_the_layer_loses_on_the_data(layer, fold):
    value, output, outputs = layer
    found = narrow_values(value, output, SIZES, Moments.of(outputs), fold=fold, damping=1e-9)
    dense = outputs @ output.flatten(0, 1)
    lost = dense - added(outputs, found.heads, found.output) - (found.bias if fold else 0.0)
    centred = dense - dense.mean(0) if fold else dense
    assert found.data_error == pytest.approx(float(lost.norm() / centred.norm()), rel=1e-6)
    assert (found.bias is not None) == fold
    if fold:
        torch.testing.assert_close(lost.mean(0), torch.zeros(MODEL).double(), atol=1e-8, rtol=0)


def test_output_is_the_least_squares_fit(layer):
    value, output, outputs = layer
    found = narrow_values(value, output, SIZES, Moments.of(outputs), damping=1e-12)
    centred = outputs - outputs.mean(0)
    channels = centred @ torch.block_diag(*found.heads)
    expected = torch.linalg.lstsq(channels, centred @ output.flatten(0, 1)).solution
    torch.testing.assert_close(found.output, expected, atol=1e-6, rtol=1e-6)


def test_channels_are_the_best_a_head_has_by_itself(layer):
    """No other channels of one head lose less of what the head adds, given their best output: the tail of an SVD."""
    value, output, outputs = layer
    found = narrow_values(value, output, SIZES, Moments.of(outputs), damping=1e-12)
    centred = outputs - outputs.mean(0)
    for head, size in enumerate(SIZES):
        own = centred[:, head * WIDTH : (head + 1) * WIDTH]
        dense = own @ output[head]
        fit = own @ found.heads[head]
        lost = dense - fit @ torch.linalg.lstsq(fit, dense).solution
        assert float(lost.norm()) == pytest.approx(float(torch.linalg.svdvals(dense)[size:].norm()), rel=1e-6)


def test_without_data_the_maps_themselves_count(layer):
    value, output, _ = layer
    found = narrow_values(value, output, SIZES, None)
    whole = [value[head] @ output[head] for head in range(HEADS)]
    left = [value[head] @ found.heads[head] for head in range(HEADS)]
    rows = found.output.split(list(SIZES))
    lost = torch.stack([dense - narrow @ row for dense, narrow, row in zip(whole, left, rows, strict=True)])
    assert found.weight_error == pytest.approx(float(lost.norm() / torch.stack(whole).norm()), rel=1e-6)
    assert found.data_error is None
    assert found.bias is None


def test_all_channels_are_kept_as_they_are(layer):
    value, output, outputs = layer
    found = narrow_values(value, output, (WIDTH,) * HEADS, Moments.of(outputs))
    assert all(torch.equal(kept, torch.eye(WIDTH).double()) for kept in found.heads)
    assert torch.equal(found.output, output.flatten(0, 1))
    assert (found.weight_error, found.data_error) == (0.0, 0.0)


@pytest.mark.parametrize("sizes", [(6, 1, 1), (0, 0, 0), (1, 1), (-1, 2, 2)])
def test_sizes_that_do_not_fit(layer, sizes):
    with pytest.raises(ValueError, match="sizes do not fit"):
        narrow_values(*layer[:2], sizes, None)


def test_a_head_may_lose_all(layer):
    value, output, outputs = layer
    found = narrow_values(value, output, (0, 5, 1), Moments.of(outputs))
    assert [kept.shape[1] for kept in found.heads] == [0, 5, 1]


def test_heads_that_share_values_share_their_channels(layer):
    """No other channels lose less of what a group's heads add, each seen with their mean moments."""
    _, _, outputs = layer
    value, output = torch.randn(1, MODEL, WIDTH).double(), torch.randn(HEADS, WIDTH, MODEL).double()
    found = narrow_values(value, output, (2,), Moments.of(outputs), damping=1e-12)
    kept = found.heads[0]
    assert kept.shape == (WIDTH, 2)
    centred = (outputs - outputs.mean(0)).unflatten(1, (HEADS, WIDTH))
    stacked = centred.flatten(0, 1)  # every head's outputs, one below the other
    side_by_side = stacked @ torch.cat(list(output), 1)
    fit = stacked @ kept
    lost = side_by_side - fit @ torch.linalg.lstsq(fit, side_by_side).solution
    assert float(lost.norm()) == pytest.approx(float(torch.linalg.svdvals(side_by_side)[2:].norm()), rel=1e-6)
    dense = outputs @ output.flatten(0, 1)
    channels = (outputs.unflatten(1, (HEADS, WIDTH)) @ kept).flatten(1)
    lost = dense - channels @ found.output - found.bias
    assert found.data_error == pytest.approx(float(lost.norm() / (dense - dense.mean(0)).norm()), rel=1e-6)
    centred = channels - channels.mean(0)
    torch.testing.assert_close(found.output, torch.linalg.lstsq(centred, dense - dense.mean(0)).solution)


def test_what_shared_values_capture_is_what_narrowing_keeps(layer):
    _, _, outputs = layer
    value, output = torch.randn(2, MODEL, WIDTH).double(), torch.randn(4, WIDTH, MODEL).double()
    outputs = torch.cat([outputs, outputs[:, :WIDTH].roll(1, 0) * 0.7 + outputs[:, -WIDTH:]], 1)
    moments = Moments.of(outputs)
    damped = damp(moments.covariance(), 1e-3)
    alone, together = captured(damped, list(output), 2)
    assert [len(each) for each in alone] == [WIDTH, WIDTH]
    whole = output.flatten(0, 1)
    assert float(together.sum()) == pytest.approx(float((whole * (damped @ whole)).sum()), rel=1e-6)
    for sizes in ((1, 1), (2, 2), (3, 2)):
        found = narrow_values(value, output, sizes, moments)
        lost = whole - torch.block_diag(*(kept for kept in found.heads for _ in range(2))) @ found.output
        left = float((lost * (damped @ lost)).sum())
        assert left == pytest.approx(float(together[sum(sizes) :].sum()), rel=1e-6)
