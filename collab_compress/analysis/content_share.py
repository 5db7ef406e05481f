"""Content against context: how much of a head's scores depends on the key alone."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.energy import ScoreParts, score_parts
from collab_compress.analysis.stream import Batches, Progress, Use, by_name, with_progress
from collab_compress.architectures import KINDS, Kind
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.calibration.gather import AttentionMasks, attention_masks, masks_of
from collab_compress.errors import HeadError


@dataclass(frozen=True)
class ContentShare:
    """Shares of the variance of each head's scores over keys; they add up to 1.

    Args:
        content: of v·y, which depends on the key alone, (H,).
        context: of x T yᵀ, which depends on query and key, (H,).
        overlap: twice their covariance, (H,); negative where they oppose each other.
    """

    content: Tensor
    context: Tensor
    overlap: Tensor


def content_share(
    model: PreTrainedModel, batches: Batches, *, kinds: Collection[Kind] = KINDS, progress: Progress = False
) -> dict[str, ContentShare]:
    r"""Return the shares of content and context in the variance of each head's scores.

    $$s(x, y) = \underbrace{x\, W_Q W_K^\top y^\top}_{\text{context}} +
      \underbrace{b_Q^\top W_K^\top y^\top}_{\text{content}} + \text{constant over keys}$$

    equation 3 of "Multi-Head Attention: Collaborate Instead of Concatenate". The variance is over the keys that a
    query sees, mean over real queries; what is constant over keys, the softmax ignores. Position biases (T5) are
    neither. A conversion moves the part of the context that all queries share into the content, so that a converted
    model's shares differ from the dense model's. Arguments, keys and errors are those of `head_covariances`.

    Returns:
        Module path → shares in float64; all 0 for a head whose scores never vary.
    """
    watchers = [_Watcher(parts) for parts in score_parts(model, kinds)]
    with ExitStack() as hooks:
        hooks.enter_context(evaluation_mode(model))
        for watcher in watchers:
            for side in ("query", "key"):
                projection = getattr(watcher.parts.site, side)
                hooks.enter_context(projection.register_forward_pre_hook(partial(watcher.note, side)))
        for batch in with_progress(batches, progress, "batches"):
            real = attention_masks(model, (), (), batch)
            for watcher in watchers:
                watcher.begin(masks_of(watcher.parts.site, real))
            run_batch(model, dict(batch))
    shares = {}
    for watcher in watchers:
        name = watcher.parts.site.name
        if not watcher.sums:
            raise HeadError(f"{name} saw no token that is no padding; pass batches with real tokens")
        for number, sums in watcher.sums.items():
            shares[Use(name, number)] = _shares(name, sums)
    return by_name(shares)


class _Watcher:
    """Sums of the variances of one module's scores, from the inputs of its query and key projections."""

    def __init__(self, parts: ScoreParts) -> None:
        self.parts = parts
        self.sums: dict[int, Tensor] = {}  # use → (4, H): content, context, overlap, and all that is not centred
        self._real = AttentionMasks(None, None)
        self._uses = 0
        self._inputs: dict[str, Tensor] = {}

    def begin(self, real: AttentionMasks) -> None:
        """Start a new batch."""
        self._real, self._uses, self._inputs = real, 0, {}

    def note(self, side: str, _: Any, args: tuple[Tensor, ...]) -> None:
        """Keep the input of the query or key projection; with both, add the samples of this use."""
        self._inputs[side] = args[0].detach().double().cpu()
        if len(self._inputs) == 2:
            self._take(self._inputs.pop("query"), self._inputs.pop("key"))

    def _take(self, queries: Tensor, keys: Tensor) -> None:
        """Add the samples of one use, from the inputs of its projections, (B, T, D) and (B, S, D)."""
        use, self._uses = self._uses, self._uses + 1
        masks = [_real(mask, inputs) for mask, inputs in zip(self._real, (queries, keys), strict=True)]
        for query, key, query_mask, key_mask in zip(queries, keys, *masks, strict=True):
            if bool(query_mask.any() and key_mask.any()):
                seen = torch.ones(len(query), len(key), dtype=torch.bool)
                if self.parts.site.kind == "decoder":
                    seen = seen.tril()
                sums = self._variances(query[query_mask], key[key_mask], seen[query_mask][:, key_mask])
                self.sums[use] = self.sums[use] + sums if use in self.sums else sums

    def _variances(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        """Return sums over queries of variances over visible keys, twice the covariance, and squares, (4, H)."""
        tensor, content = self.parts.tensor, self.parts.content
        projected = key @ tensor.key  # (H, S, d)
        by_key = torch.zeros(1, 1, 1) if content is None else (key @ content.T).T[:, None]
        by_both = (query @ tensor.query) @ projected.mT
        scores = torch.stack(torch.broadcast_tensors(by_key, by_both)).double()
        weights = seen.double() / seen.sum(1, keepdim=True).clamp(min=1)  # (T, S)
        own, context = (scores - (scores * weights).sum(-1, keepdim=True)) * weights.sqrt()  # (H, T, S)
        products = [own.square(), context.square(), 2 * own * context, (scores.square() * weights).sum(0)]
        return torch.stack([product.sum((1, 2)) for product in products])


def _real(mask: Tensor | None, inputs: Tensor) -> Tensor:
    """Return the mask of inputs (B, T, D) that are no padding, (B, T)."""
    fits = mask is not None and mask.shape == inputs.shape[:2]
    return mask.cpu() if mask is not None and fits else torch.ones(inputs.shape[:2], dtype=torch.bool)


def _shares(name: str, sums: Tensor) -> ContentShare:
    if not bool(sums.isfinite().all()):
        raise HeadError(f"{name}: its scores are not finite; look for NaN or infinity in the weights")
    *parts, squares = sums
    total = torch.stack(parts).sum(0)
    varies = total > (16 * torch.finfo(torch.float32).eps) ** 2 * squares  # else by rounding only
    shares = (torch.where(varies, part / torch.where(varies, total, 1.0), 0.0) for part in parts)
    return ContentShare(*shares)
