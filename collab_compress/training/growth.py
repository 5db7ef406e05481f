"""Train alphas: frozen at first, then pushed to spread ("Multi-Head Mixing", stepwise nuclear growth)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from collab_compress.errors import HeadError
from collab_compress.heads.alphas import MixedProjection
from collab_compress.heads.sharding import is_sharded, refuse_pieces, whole
from collab_compress.losses import nuclear_growth, nuclear_norm
from collab_compress.training.head_training import AlphasOptions


class AlphasTraining:
    """Freeze alphas for the first part of training, and return the nuclear growth loss after it.

    Frozen alphas stay in the optimizer and in the graph, so that distributed training sees the same parameters
    throughout; their gradient is zero, and taken away before the optimizer steps.

    Args:
        projections: what mixes heads by the matrices, (H, H) each.
        options: when and how.
        optimizer: the one that steps them.

    Raises:
        HeadError: there are none, they are frozen for good, or the optimizer does not step them.
    """

    def __init__(self, projections: Sequence[MixedProjection], options: AlphasOptions, optimizer: Any) -> None:
        _check(projections, optimizer)
        self.projections, self.options = projections, options
        self.norms: Tensor | None = None  # at the start of the step, for the hinge, (modules,)
        self._previous: Tensor | None = None  # a step before
        self._frozen = False
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        _remember_nothing_(
            [p.alphas for p in projections if is_sharded(p.alphas) and p.alphas not in inner.state], inner
        )
        self._handle: RemovableHandle = inner.register_step_pre_hook(self._forget)

    def step(self, progress: float) -> None:
        """Begin an optimizer step."""
        self._freeze(progress < self.options.frozen_ratio or self.options.frozen_ratio == 1)  # progress ends at 1
        if not self._frozen and self.options.growth_weight > 0 and self.options.growth_form == "hinge":
            with torch.no_grad():
                norms = nuclear_norm(self._together())
            self._previous, self.norms = norms if self.norms is None else self.norms.to(norms), norms

    def growth(self) -> Tensor | None:
        """Return the nuclear growth loss, summed over all matrices and not weighted; None while alphas are frozen."""
        if self._frozen or self.options.growth_weight == 0:
            return None
        return nuclear_growth(self._together(), self.options.growth, self._previous).sum()

    def remove(self) -> None:
        """Restore the modules."""
        self._freeze(False)
        self._handle.remove()

    def _freeze(self, frozen: bool) -> None:
        self._frozen = frozen
        for projection in self.projections:
            projection.frozen = frozen

    def _together(self) -> Tensor:
        """Stack all matrices, (modules, H, H) with the most heads; zeros around the others leave their norms."""
        matrices = [whole(projection.alphas) for projection in self.projections]
        most = max(len(matrix) for matrix in matrices)
        return torch.stack([pad(matrix, (0, most - len(matrix)) * 2).to(matrices[0].device) for matrix in matrices])

    def _forget(self, *_: object) -> None:
        if self._frozen:
            for projection in self.projections:
                projection.alphas.grad = None


def _remember_nothing_(alphas: Sequence[nn.Parameter], optimizer: Any) -> None:
    """Create the zero optimizer state of frozen alphas in place, as their first training step would.

    A checkpoint of sharded training must have a state of every parameter, or PyTorch does not load it.
    """
    if not alphas:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for matrix in alphas:
        matrix.grad = torch.zeros_like(matrix)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for matrix in alphas:
        for value in optimizer.state[matrix].values():
            if isinstance(value, Tensor):
                value.zero_()  # the count of steps too


def _check(projections: Sequence[MixedProjection], optimizer: Any) -> None:
    """Refuse alphas that would silently never train."""
    if not projections:
        raise HeadError("the model has no alphas to train; call mix_heads_(model) before making the optimizer")
    for projection in projections:
        refuse_pieces("alphas", projection.alphas)
    if not all(projection.alphas.requires_grad for projection in projections):
        raise HeadError("alphas do not require gradients (adapters freeze what they do not know); set requires_grad")
    if optimizer is None:
        raise HeadError("alphas are held still through their optimizer; pass optimizer=")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(projection.alphas) in stepped for projection in projections):
        raise HeadError("the optimizer does not step the alphas; call mix_heads_(model) before making the optimizer")
