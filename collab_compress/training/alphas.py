"""Train alphas: frozen at first, then pushed to spread ("Multi-Head Mixing", stepwise nuclear growth)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab_compress.errors import HeadError
from collab_compress.heads.sharding import refuse_pieces, whole
from collab_compress.losses import nuclear_growth, nuclear_norm
from collab_compress.training.options import AlphasOptions


class AlphasTraining:
    """Keep alphas as they are for the first part of training, and give the nuclear growth loss after it.

    Frozen alphas stay in the optimizer and in the graph, so that distributed training sees the same parameters
    throughout; their gradient is zeroed as it arrives and taken away before the optimizer steps.

    Args:
        alphas: the matrices, (H, H) each.
        options: when and how.
        optimizer: the one that steps them.

    Raises:
        HeadError: there are none, they are frozen for good, or the optimizer does not step them.
    """

    def __init__(self, alphas: list[nn.Parameter], options: AlphasOptions, optimizer: Any) -> None:
        _check(alphas, optimizer)
        self.alphas, self.options, self.frozen = alphas, options, options.frozen > 0
        self.norms: list[float] | None = None  # at the start of the step, once alphas train
        self.previous: list[float] | None = None  # a step before
        self._handles: list[RemovableHandle] = [matrix.register_hook(self._zeroed) for matrix in alphas]
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self._handles.append(inner.register_step_pre_hook(self._forget))

    def step(self, progress: float) -> None:
        """Begin an optimizer step."""
        self.frozen = progress < self.options.frozen
        if not self.frozen and self.options.growth_weight > 0:
            with torch.no_grad():
                norms = [float(nuclear_norm(whole(matrix))) for matrix in self.alphas]
            self.previous, self.norms = self.norms or norms, norms

    def growth(self) -> Tensor | None:
        """Give the nuclear growth loss, summed over all matrices, not weighted; None while alphas are frozen."""
        if self.frozen or self.options.growth_weight == 0 or self.previous is None:
            return None
        form, growth = self.options.growth_form, self.options.growth
        pairs = zip(self.alphas, self.previous, strict=True)
        return torch.stack([nuclear_growth(whole(matrix), norm, growth, form) for matrix, norm in pairs]).sum()

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _zeroed(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self.frozen else gradient

    def _forget(self, *_: object) -> None:
        if self.frozen:
            for matrix in self.alphas:
                matrix.grad = None


def _check(alphas: list[nn.Parameter], optimizer: Any) -> None:
    """Refuse alphas that would silently never train."""
    if not alphas:
        raise HeadError("the model has no alphas to train; call mix_heads_(model) before making the optimizer")
    for matrix in alphas:
        refuse_pieces("alphas", matrix)
    if not all(matrix.requires_grad for matrix in alphas):
        raise HeadError("alphas do not require gradients (adapters freeze what they do not know); set requires_grad")
    if optimizer is None:
        raise HeadError("alphas are held still through their optimizer; pass optimizer=")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(matrix) in stepped for matrix in alphas):
        raise HeadError("the optimizer does not step the alphas; call mix_heads_(model) before making the optimizer")
