r"""Scores with terms of token distances: disentangled attention.

    score_i(t, s) = c · [ q_i(x_t) · k_i(x_s) + q_i(x_t) · k_i(r_ts) + q_i(r_ts) · k_i(x_s) ]

"DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (He et al., 2021), equation 4, which has r_st in the
third term where its implementations have r_ts. x_t are the contents of token t, r_ts is the relative embedding of its
distance to token s, and c = 1/√(d · number of terms). The second term is called "c2p", the third "p2c"; a model can
lack either. Where positions have the projections of contents
(`share_att_key`, as in DeBERTa v3), all three terms are made of the same products Wq·Wkᵀ, so that shared channels
(`attention.shared`) serve all three.

Here the last two terms are the position bias of `run.attend`, made of the heads of contents and of positions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collab_compress.attention.projections import family_of
from collab_compress.errors import UnsupportedModelError
from collab_compress.factorization import Moments


class Positions(NamedTuple):
    """The relative embeddings of one call, and which of them stands between two tokens.

    `query` and `key` are their heads, (1, H, P, w), or None where the term that needs them does not exist.
    """

    embeddings: Tensor  # (1, P, D)
    keys_at: Tensor | None  # for token t the embedding of token s as a key, (T, S); None without "c2p"
    queries_at: Tensor | None  # for token s the embedding of token t as a query, (S, T); None without "p2c"
    query: Tensor | None = None
    key: Tensor | None = None

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return the sum of the terms with positions, scaled, (B, H, T, S).

        Args:
            query: of contents, (B, H, T, w); channels behind those of positions do not count.
            key: of contents, (B, H, S, w).
            scaling: factor of the scores.
        """
        terms = []
        if self.keys_at is not None and self.key is not None:
            products = query[..., : self.key.shape[-1]] @ (self.key * scaling).mT  # (B, H, T, P)
            terms.append(products.gather(-1, self.keys_at.expand(*products.shape[:3], -1)))
        if self.queries_at is not None and self.query is not None:
            products = key[..., : self.query.shape[-1]] @ (self.query * scaling).mT  # (B, H, S, P)
            terms.append(products.gather(-1, self.queries_at.expand(*products.shape[:3], -1)).mT)
        return sum(terms[1:], terms[0])


def read_positions(module: Any, call: Mapping[str, Any]) -> Positions | None:
    """Return the relative embeddings of one call of a module, without heads; None if no term needs any.

    Args:
        module: an attention module of a family with `relative`.
        call: the arguments of its forward pass by name.

    Raises:
        UnsupportedModelError: queries are of other inputs than keys, which no model does.
    """
    names: Any = family_of(module).relative
    if call.get("query_states") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} is called with query_states, which is not implemented for edited modules; use "
            "the dense model"
        )
    terms = getattr(module, names.terms)
    if not getattr(module, names.enabled) or not {"c2p", "p2c"}.intersection(terms):
        return None
    span, distances = getattr(module, names.span), call["relative_pos"]
    embeddings = call["rel_embeddings"][None, : 2 * span]
    distances = distances.to(embeddings.device, torch.long).reshape(distances.shape[-2:])  # the same for all texts
    keys_at, queries_at = ((sign * distances + span).clamp(0, 2 * span - 1) for sign in (1, -1))
    return Positions(embeddings, keys_at if "c2p" in terms else None, queries_at if "p2c" in terms else None)


def without_unused(positions: Positions) -> Positions:
    """Leave out the embeddings before the first and behind the last one in use; a short text needs few."""
    used = [at for at in (positions.keys_at, positions.queries_at) if at is not None]
    if not _is_cheap_to_read(used[0]):
        return positions
    lowest, highest = min(int(at.min()) for at in used), max(int(at.max()) for at in used)
    return Positions(
        positions.embeddings[:, lowest : highest + 1], *(None if at is None else at - lowest for at in positions[1:3])
    )


class PositionCounts:
    """How often each relative embedding is a query and a key, in calls of one module on calibration data.

    An error of the product T changes a score by that of (x_t + r)ᵀ T (x_s + r), less the term of two positions, which
    the moments do not leave out: the covariances of contents and positions add up on either side that has both. An
    embedding counts as often as its distance occurs between unpadded tokens of a text. The content bias is in both
    terms of a query, so each takes half of what the two means lose.
    """

    def __init__(self) -> None:
        self._embeddings = self._queries = self._keys = torch.empty(0, device="cpu")

    def add(self, positions: Positions, batch: int, mask: Tensor | None) -> None:
        """Add one call on a batch of texts, with their mask (B, T), True at tokens, or None if all are."""
        self._embeddings = positions.embeddings[0].detach()
        if not len(self._queries):
            shape = 2, len(self._embeddings)
            self._queries, self._keys = torch.zeros(shape, dtype=torch.float64, device="cpu")
        for counts, index in ((self._keys, positions.keys_at), (self._queries, positions.queries_at)):
            if index is None:
                continue
            real = index.new_ones(batch, len(index)) if mask is None else mask.to(index.device)
            pairs = real.float().mT @ real.float()  # number of texts that have both tokens, (T, T)
            of_call = torch.zeros(len(counts), device=index.device)
            counts += of_call.index_add_(0, index.flatten(), pairs.flatten()).cpu().double()

    def pooled(self, contents: Moments) -> tuple[Moments, Moments]:
        """Return the moments of the inputs of queries and of keys, of contents and positions together."""
        query, key = (
            contents.combined(Moments.of(self._embeddings, counts)) if float(counts.sum()) else contents
            for counts in (self._queries, self._keys)
        )
        return query, key


def _is_cheap_to_read(values: Tensor) -> bool:
    """Return whether Python may read values: not on a GPU, which it would wait for, and not in a traced call."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    return values.is_cpu and not is_traced and not torch._C._are_functorch_transforms_active()
