"""Stepwise nuclear-norm growth: keeps the mixing of heads of high rank."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from collab_compress.losses.precision import full_precision, no_autocast

GrowthForm = Literal["hinge", "printed"]


def nuclear_norm(alphas: Tensor) -> Tensor:
    r"""Return the sum of the singular values, $\|\alpha\|_*$.

    Its gradient is $U V^\top$, finite for equal singular values, as in the identity, and for zero ones, where
    it is one of the subgradients.

    Args:
        alphas: (…, H, H), row i the weights of head i's mixture.

    Returns:
        One for each matrix, (…), in float32, or float64 if alphas is.

    Raises:
        ValueError: a matrix is not square.
    """
    if alphas.ndim < 2 or alphas.shape[-2] != alphas.shape[-1]:
        raise ValueError(f"alphas have the wrong shape: got {tuple(alphas.shape)}, expected (…, H, H)")
    with no_autocast(alphas):
        norms: Tensor = torch.linalg.svdvals(full_precision(alphas)).sum(-1)
    return norms


def nuclear_growth(
    alphas: Tensor, previous: float | Tensor | None, growth: float, form: GrowthForm = "hinge"
) -> Tensor:
    r"""Return by how much the nuclear norm falls short of a step's growth.

    $$L_{nuc} = \|\alpha(\Theta_0)\|_* + \Delta_r - \|\alpha(\Theta)\|_*$$

    equation 7 of "Multi-Head Rotation", for one matrix; the paper's γ goes with the sum over all of them. It
    leaves open what $\Theta_0$ is:

    - `hinge`: the parameters one step before. Once the norm has grown by $\Delta_r$ the loss is 0 and asks no more.
    - `printed`: the present parameters, not updated. The value is always $\Delta_r$, which has no gradient: the
      norm is pushed up without end.

    Args:
        alphas: (…, H, H).
        previous: the nuclear norms one step before, (…), taken as constants; `printed` ignores them, None will do.
        growth: $\Delta_r$.
        form: `hinge` or `printed`.

    Returns:
        One for each matrix, (…), in float32, or float64 if alphas is.

    Raises:
        ValueError: a matrix is not square, the form is unknown or the hinge has no previous norm.
    """
    if form not in ("hinge", "printed"):
        raise ValueError(f"unknown form of nuclear growth: got {form!r}, expected 'hinge' or 'printed'")
    norm = nuclear_norm(alphas)
    if form == "printed":
        return norm.detach() + growth - norm
    if previous is None:
        raise ValueError("the hinge needs the nuclear norm one step before: got None, expected a number or a tensor")
    if isinstance(previous, Tensor):
        previous = previous.detach()
    return torch.relu(previous + growth - norm)
