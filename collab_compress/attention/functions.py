"""Collaborative attention as functions of Transformers' attention interface."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from collab_compress.attention.kernels import attend, attention_probabilities


def collab_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend without returning probabilities, by the fastest kernel for the shapes at hand.

    Args:
        module: the attention module, with its mixing matrix (H, R) as `module.mixing`.
        query: shared query in pieces, (B, ⌈R/d⌉, T, d).
        key: shared key and content biases in pieces, (B, ⌈(R+H)/d⌉, S, d).
        value: (B, H, S, dv).
        attention_mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.

    Returns:
        Head outputs (B, T, H, dv), and None in place of the probabilities.
    """
    shared_query, shared_key, content = unpack(module, query, key)
    output = attend(
        shared_query, shared_key, content, module.mixing, value, attention_mask,
        scaling=_scaling(module, scaling), dropout=dropout,
        causal=_causal(module, is_causal, attention_mask, query.shape[2]),
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def collab_eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend step by step and return the probabilities too; shapes as in `collab_sdpa`.

    Returns:
        Head outputs (B, T, H, dv) and probabilities after dropout (B, H, T, S), as stock eager attention does.
    """
    shared_query, shared_key, content = unpack(module, query, key)
    probabilities = attention_probabilities(
        shared_query, shared_key, content, module.mixing, attention_mask,
        scaling=_scaling(module, scaling), causal=_causal(module, is_causal, attention_mask, query.shape[2]),
    )  # fmt: skip
    probabilities = nn.functional.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def unpack(module: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Undo the split into heads: shared query (B, T, R), shared key (B, S, R), content bias (B, S, H) or None."""
    heads, rank = module.mixing.shape
    joined_query = query.transpose(1, 2).flatten(2)  # (B, T, R + padding)
    joined_key = key.transpose(1, 2).flatten(2)  # (B, S, R + H + padding)
    content = joined_key[..., rank : rank + heads] if module.collaborative.content_bias else None
    return joined_query[..., :rank], joined_key[..., :rank], content


def _scaling(module: Any, scaling: float | None) -> float:
    return float(module.scaling if scaling is None else scaling)


def _causal(module: Any, is_causal: bool | None, mask: Tensor | None, queries: int) -> bool:
    """Say whether the kernel must mask the future itself; a mask that is given already does."""
    wanted = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    return wanted and mask is None and queries > 1


def register_attention() -> None:
    """Make both functions known to Transformers' attention interface."""
    AttentionInterface.register("collab_sdpa", collab_sdpa)
    AttentionInterface.register("collab_eager", collab_eager)
