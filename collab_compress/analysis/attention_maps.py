"""Attention maps of one text: how much each token attends to every other token, by head."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis.stream import read_heads
from collab_compress.architectures import KINDS, Kind
from collab_compress.calibration.gather import forward_arguments
from collab_compress.errors import HeadError


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
        """Return the attention probabilities of one query token in each head, (H, S), as in Figure 1.

        Args:
            token: one of `queries`; the first of equal ones counts.

        Raises:
            HeadError: no query is this token.
        """
        if token not in self.queries:
            raise HeadError(f"no token {token!r} among the queries; there are {' '.join(self.queries)}")
        return self.weights[:, self.queries.index(token)]


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | tuple[str, str],
    *,
    target: str | None = None,
    kinds: Collection[Kind] = KINDS,
) -> dict[str, AttentionMap]:
    """Return the attention probabilities of each head in a text ("Inter-Head Diversity", Figure 1).

    Other arguments, keys and errors are those of `head_covariances`.

    Args:
        model: stock or edited; reads tokens.
        tokenizer: of the model.
        text: input of the model, or a pair of texts.
        target: input of an encoder–decoder's decoder, after its start token; required there.

    Raises:
        HeadError: a target is missing, or the model has no decoder to read it.
    """
    batch = _batch(model, tokenizer, text, target)
    sources = _tokens(tokenizer, batch["input_ids"])
    targets = _tokens(tokenizer, batch["decoder_input_ids"]) if target is not None else sources
    maps = {}
    ((readings,),) = read_heads([model], [batch], "probs", kinds=kinds)
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


def _batch(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str | tuple[str, str], target: str | None
) -> dict[str, Tensor]:
    if model.config.is_encoder_decoder != (target is not None):
        advice = "pass target=, the text its decoder reads" if target is None else "leave target out"
        raise HeadError(f"{type(model).__name__}: {advice}")
    texts = (text,) if isinstance(text, str) else text
    known = forward_arguments(model)
    encoded = tokenizer(*texts, return_tensors="pt", truncation=True)
    batch = {name: value for name, value in encoded.items() if name in known}
    if target is not None:
        ids = tokenizer(text_target=target, return_tensors="pt", truncation=True)["input_ids"]
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        batch["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
        batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    return batch


def _tokens(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(ids[0].tolist()))
