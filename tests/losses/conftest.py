"""Seeded heads, attention probabilities and padding for the tests of the losses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def draw_mask(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return a mask with unpadded tokens first and at least one of them in the batch."""
    lengths = torch.randint(0, length + 1, (batch, 1), generator=generator)
    lengths[0] = lengths[0].clamp(min=1)
    return torch.arange(length) < lengths


@pytest.fixture(scope="session")
def make_vectors() -> Callable[..., tuple[Tensor, Tensor]]:
    def make(batch, length, heads, width, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_(), draw_mask(batch, length, generator)

    return make


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., tuple[Tensor, Tensor]]:
    def make(batch, heads, length, keys, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        scores = 3 * torch.randn(batch, heads, length, keys, generator=generator, dtype=torch.float64)
        visible = torch.arange(keys) < torch.randint(1, keys + 1, (batch, 1, 1, 1), generator=generator)
        rows = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(dtype)
        return rows.requires_grad_(), draw_mask(batch, length, generator)

    return make


@pytest.fixture(scope="session")
def assert_same_gradient() -> Callable[..., None]:
    def check(leaf, value, expected, **tolerances):
        """Check that two values of one leaf agree, and their gradients but for zeros, where a root has no slope."""
        torch.testing.assert_close(value, expected, **tolerances)
        (gradient,) = torch.autograd.grad(value, leaf)
        right = torch.autograd.grad(expected, leaf)[0] if expected.requires_grad else torch.zeros_like(leaf)
        torch.testing.assert_close(gradient.masked_fill(leaf == 0, 0.0), right, **tolerances)

    return check
