"""What heads share: mixing matrices and alphas; content against context in their scores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.energy import ScoreFactors, score_factors
from collab_compress.analysis.stream import Batches, Progress, with_progress
from collab_compress.calibration import as_batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import AttentionMasks, attention_masks, masks_of
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of


def mixing_matrices(model: PreTrainedModel, *, order: bool = False) -> dict[str, Tensor]:
    """Return the mixing matrix M of every attention module: how much each head uses each query/key component.

    Figure 2 of "Multi-Head Attention: Collaborate Instead of Concatenate" ((a): in a dense module each head uses its
    own d components alone). The scale of M is arbitrary, as the projections can undo it: here each component is
    multiplied by the norms of its query and key vectors, and its largest entry is positive.

    Args:
        model: stock or converted.
        order: put the strongest component first, instead of the model's order.

    Returns:
        Module path → (H, R), or (H, H·d) for a dense module, in float64 on the CPU.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has a rotary embedding.
    """
    matrices = {}
    for parts in score_factors(model):
        # a query of T_i is that of the component times its entry in M, so these are the norms times |M|
        strengths = parts.tensor.query.norm(dim=1) * parts.tensor.key.norm(dim=1)  # (H, R or d)
        if parts.mixing is None:
            matrix: Tensor = torch.block_diag(*strengths[:, None])
        else:
            largest = parts.mixing.gather(0, parts.mixing.abs().argmax(0, keepdim=True))  # (1, R)
            matrix = strengths * parts.mixing.sign() * torch.where(largest < 0, -1.0, 1.0)
        if order:
            matrix = matrix[:, matrix.square().sum(0).argsort(descending=True, stable=True)]
        matrices[parts.site.name] = matrix
    return matrices


def alpha_matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the alphas of every attention module whose heads are mixed; row i makes the output of head i.

    Figures 3 and 4 of "Multi-Head Rotation": diagonal where heads are picked, filled where they are mixed.

    Returns:
        Module path → (H, H), in float64 on the CPU.

    Raises:
        HeadError: no heads are mixed.
        UnsupportedModelError: the model's family is not known.
    """
    alphas = alphas_of(model)
    if not alphas:
        raise HeadError(f"{type(model).__name__} has no alphas; mix_heads_(model) adds them")
    return {name: matrix.detach().cpu().double() for name, matrix in alphas.items()}


def skew_symmetry(matrix: Tensor) -> float:
    r"""Return how close a matrix (H, H) is to skew-symmetric, its diagonal aside.

    $$\frac{\|A - A^\top\|_F^2}{\|A - A^\top\|_F^2 + \|A + A^\top\|_F^2}$$

    over entries off the diagonal. "Multi-Head Rotation" sees it in trained alphas (Fig. 4).

    Returns:
        1 for skew-symmetric, 0 for symmetric and without entries off the diagonal; independent entries give 0.5 on
        average.

    Raises:
        HeadError: the matrix is not square.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a square matrix (H, H)")
    matrix = matrix.detach().cpu().double()
    off = matrix - matrix.diagonal().diag()
    skew, symmetric = (off - off.mT).square().sum(), (off + off.mT).square().sum()
    total = skew + symmetric
    return float(skew / total) if total > 0 else 0.0


def effective_rank(matrix: Tensor) -> float:
    r"""Return the effective rank of a matrix: the exponential of the entropy of the singular values' shares.

    $$\exp\Big(-\sum_k p_k \log p_k\Big), \quad p_k = \sigma_k / \sum_l \sigma_l$$

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", 2007.

    Returns:
        Between 1 and the smaller side, which equal singular values reach; 0 for a zero matrix.

    Raises:
        HeadError: not a matrix.
    """
    if matrix.ndim != 2:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix")
    values = torch.linalg.svdvals(matrix.detach().cpu().double())
    total = values.sum()
    return float(torch.special.entr(values / total).sum().exp()) if total > 0 else 0.0


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


def content_share(model: PreTrainedModel, batches: Batches, *, progress: Progress = False) -> dict[str, ContentShare]:
    r"""Return the shares of content and context in the variance of each head's scores.

    $$s(x, y) = \underbrace{x\, W_Q W_K^\top y^\top}_{\text{context}} +
      \underbrace{b_Q^\top W_K^\top y^\top}_{\text{content}} + \text{constant over keys}$$

    equation 3 of "Multi-Head Attention: Collaborate Instead of Concatenate". The variance is over the keys that a
    query sees, mean over queries that are no padding; the softmax ignores what is constant over keys. Position biases
    (T5) are neither. A conversion moves the part of the context that all queries share into the content, so converted
    models should be compared with converted ones. Arguments, keys and errors are those of `head_covariances`.

    Returns:
        Module path → shares in float64; all 0 for a head whose scores never vary.
    """
    watchers = [_Watcher(parts) for parts in score_factors(model)]
    with ExitStack() as hooks:
        hooks.enter_context(evaluation_mode(model))
        for watcher in watchers:
            for side in ("query", "key"):
                projection = getattr(watcher.parts.site, side)
                hooks.enter_context(projection.register_forward_pre_hook(partial(watcher.add_input, side)))
        for batch in map(as_batch, with_progress(batches, progress, "batches")):
            masks = attention_masks(model, (), (), batch)
            for watcher in watchers:
                watcher.begin(masks_of(watcher.parts.site, masks))
            run_batch(model, batch)
    shares = {}
    for watcher in watchers:
        name = watcher.parts.site.name
        if not watcher.sums:
            raise HeadError(f"{name} saw no unpadded token; pass batches with unpadded tokens")
        for number, sums in watcher.sums.items():
            shares[name if len(watcher.sums) == 1 else f"{name}[{number}]"] = _shares(name, sums)
    return shares


class _Watcher:
    """Sums of the variances of one module's scores, from the inputs of its query and key projections."""

    def __init__(self, parts: ScoreFactors) -> None:
        self.parts = parts
        self.sums: dict[int, Tensor] = {}  # use → (4, H): content, context, overlap, squared scores
        self._masks = AttentionMasks(None, None)
        self._uses = 0
        self._inputs: dict[str, Tensor] = {}

    def begin(self, masks: AttentionMasks) -> None:
        """Start a new batch."""
        self._masks, self._uses, self._inputs = masks, 0, {}

    def add_input(self, side: str, _: Any, args: tuple[Tensor, ...]) -> None:
        """Keep the input of the query or key projection; with both, add the sequences of this use."""
        self._inputs[side] = args[0].detach().cpu().double()
        if len(self._inputs) == 2:
            self._add(self._inputs.pop("query"), self._inputs.pop("key"))

    def _add(self, queries: Tensor, keys: Tensor) -> None:
        """Add the sequences of one use, from the inputs of its projections, (B, T, D) and (B, S, D)."""
        use, self._uses = self._uses, self._uses + 1
        masks = [_mask_of(mask, inputs) for mask, inputs in zip(self._masks, (queries, keys), strict=True)]
        for query, key, query_mask, key_mask in zip(queries, keys, *masks, strict=True):
            if bool(query_mask.any() and key_mask.any()):
                visible = torch.ones(len(query), len(key), dtype=torch.bool)
                if self.parts.site.kind == "decoder":
                    visible = visible.tril()
                sums = self._variances(query[query_mask], key[key_mask], visible[query_mask][:, key_mask])
                self.sums[use] = self.sums[use] + sums if use in self.sums else sums

    def _variances(self, query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
        """Return sums over queries of variances over visible keys, twice the covariance, and squares, (4, H)."""
        tensor, content = self.parts.tensor, self.parts.content
        projected = key @ tensor.key  # (H, S, d)
        by_key = torch.zeros(1, 1, 1) if content is None else (key @ content.T).T[:, None]
        by_both = (query @ tensor.query) @ projected.mT
        scores = torch.stack(torch.broadcast_tensors(by_key, by_both)).double()
        weights = visible.double() / visible.sum(1, keepdim=True).clamp(min=1)  # (T, S)
        centred = (scores - (scores * weights).sum(-1, keepdim=True)) * weights.sqrt()  # (2, H, T, S)
        products = [*centred.square(), 2 * centred.prod(0), (scores.square() * weights).sum(0)]
        return torch.stack([product.sum((1, 2)) for product in products])


def _mask_of(mask: Tensor | None, inputs: Tensor) -> Tensor:
    """Return a mask (B, T) of inputs (B, T, D), all True where there is none that fits."""
    if mask is None or mask.shape != inputs.shape[:2]:
        return torch.ones(inputs.shape[:2], dtype=torch.bool)
    return mask.cpu()


def _shares(name: str, sums: Tensor) -> ContentShare:
    if not bool(sums.isfinite().all()):
        raise HeadError(f"{name}: its scores are not finite; look for NaN or infinity in the weights")
    parts, squares = sums[:3], sums[3]
    total = parts.sum(0)
    varies = total > (16 * torch.finfo(torch.float32).eps) ** 2 * squares  # else by rounding only
    return ContentShare(*torch.where(varies, parts / torch.where(varies, total, 1.0), 0.0))
