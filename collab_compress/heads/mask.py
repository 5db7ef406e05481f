"""Masks on attention heads: what each head hands to the output projection, times a number."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, Kind, find_attention
from collab_compress.attention.install import HeadCall, add_head_hook_, remove_head_hook_
from collab_compress.errors import HeadError
from collab_compress.heads.pruning import check_heads


class HeadMask:
    """Multiply the head outputs of attention modules by masks, from now until `remove` or the end of a `with` block.

        output of head h = ξ_h · softmax(scores_h) · values_h

    0 silences a head, 1 leaves it alone, and anything between or beyond is allowed; the result is differentiable in
    the mask. A module that serves several layers (ALBERT) has one mask for all of them. Heads are masked before they
    are mixed or projected, and after a `Tap` has read them. Works in training and evaluation, on dense and
    collaborative modules, and under `torch.compile`.

    Args:
        model: stock or edited; attention runs as `eager` or `sdpa`.
        masks: as in `set`; none to begin with if not given.
        kinds: which kinds of attention can be masked.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: as in `set`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: Mapping[str, Tensor] | None = None,
        kinds: Collection[Kind] = KINDS,
    ) -> None:
        sites = find_attention(model, FAMILIES, kinds=kinds)
        self.heads = {site.name: site.heads for site in sites}
        self._hooks = {site.name: (site.module, _Masker(site.name)) for site in sites}
        self.set(masks or {})
        for module, hook in self._hooks.values():
            add_head_hook_(module, hook)

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Mask with these from now on; modules that are not named are left alone.

        Args:
            masks: path of the attention module → (H,), one number a head, or (B, H), one a head and sample. Moved to
                the device and dtype of the head outputs.

        Raises:
            HeadError: a module is not known or its mask has the wrong shape, and the masks stay as they were; or the
                masks have been removed.
        """
        if not self._hooks:
            raise HeadError("these masks have been removed from the model; make a new HeadMask")
        for name, mask in masks.items():
            if name not in self.heads:
                raise HeadError(f"no attention module {name!r} to mask; there are {', '.join(self.heads)}")
            if not isinstance(mask, Tensor) or mask.dim() not in (1, 2) or mask.shape[-1] != self.heads[name]:
                got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise HeadError(
                    f"mask of {name}: got {got}; expected a tensor ({self.heads[name]},), one number a head, or "
                    f"(batch, {self.heads[name]})"
                )
        for name, (_, hook) in self._hooks.items():
            hook.mask = masks.get(name)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for module, hook in self._hooks.values():
            remove_head_hook_(module, hook)
        self._hooks = {}

    def __enter__(self) -> "HeadMask":
        """Return the masks themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the model."""
        self.remove()


def masks_without(model: PreTrainedModel, heads: Mapping[str, Collection[int]]) -> dict[str, Tensor]:
    """Make the masks that silence heads: under them the model computes what it computes once they are removed.

    Args:
        model: stock or edited.
        heads: path of the attention module → heads to silence, from 0.

    Returns:
        Path → (H,), 0 at those heads and 1 elsewhere; for `HeadMask`.

    Raises:
        HeadError: a module or a head is not known.
    """
    masks = {}
    for site, removed in check_heads(find_attention(model, FAMILIES), heads):
        masks[site.name] = torch.ones(site.heads)
        masks[site.name][removed] = 0.0
    return masks


class _Masker:
    """The hook that multiplies the heads of one module."""

    needs_probs = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.mask: Tensor | None = None

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        if self.mask is None:
            return outputs
        if self.mask.dim() == 2 and len(self.mask) != len(outputs):
            raise HeadError(
                f"mask of {self.name}: got {len(self.mask)} rows for {len(outputs)} samples; pass one row a sample "
                "(for generation with beams, one a beam), or one mask (heads,) for all"
            )
        return outputs * self.mask.to(outputs)[..., None, :, None]  # (B, T, H, dv) · (1 or B, 1, H, 1)
