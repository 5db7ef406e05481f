"""Ways to compute collaborative attention, and the choice among them by shape.

    score_i(x, y) = s · [ ((x W̃q) ⊙ m_i) · (y W̃k) + v_i · y ]

where s is the model's own scale, m_i row i of the mixing matrix, v_i the content bias of head i
("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7 and 13).
Shapes: query (B, T, R), key (B, S, R), content (B, S, H) or None, mixing (H, R), value (B, H, S, dv).
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention


def attention_scores(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Compute masked scores (B, H, T, S) by one product with the shared key, heads folded into rows."""
    batch, length, rank = query.shape
    mixed = query.unsqueeze(1) * (mixing * scaling).unsqueeze(1)  # (B, H, T, R)
    scores = torch.bmm(mixed.view(batch, -1, rank), key.transpose(1, 2))  # (B, H·T, S)
    scores = scores.view(batch, mixing.shape[0], length, -1)  # (B, H, T, S)
    if content is not None:
        scores = scores + (content * scaling).transpose(1, 2).unsqueeze(2)
    if causal:
        future = torch.ones(length, key.shape[1], dtype=torch.bool, device=key.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


def attention_probabilities(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Softmax of the scores over keys, (B, H, T, S)."""
    return attention_scores(query, key, content, mixing, mask, scaling, causal).softmax(-1)


def attend(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute head outputs (B, H, T, dv) by the kernel that suits device and shapes."""
    if query.device.type != "cpu":
        return fused(query, key, content, mixing, value, mask, scaling, dropout, causal)
    probabilities = attention_probabilities(query, key, content, mixing, mask, scaling, causal)
    return drop(probabilities, p=dropout) @ value


def fused(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend through `scaled_dot_product_attention`.

    The content bias becomes H more channels, which head i reads through a one-hot query; so masks and
    `is_causal` stay what they are. Channels are padded to a multiple of 8, which fused kernels want.
    """
    heads = mixing.shape[0]
    mixed = query.unsqueeze(1) * mixing.unsqueeze(1)  # (B, H, T, R)
    if content is not None:
        picks = torch.eye(heads, dtype=query.dtype, device=query.device)
        mixed = torch.cat([mixed, picks[:, None].expand(*mixed.shape[:3], heads)], dim=-1)  # (B, H, T, R+H)
        key = torch.cat([key, content], dim=-1)  # (B, S, R+H)
    padding = -mixed.shape[-1] % 8
    mixed, key = (torch.nn.functional.pad(part, (0, padding)) for part in (mixed, key))
    shared = key.unsqueeze(1).expand(-1, heads, -1, -1)
    return scaled_dot_product_attention(
        mixed, shared, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
