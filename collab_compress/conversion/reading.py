"""How a model reads texts: with which tokenizer, and how it makes embeddings of hidden states."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.encode import tokenizer_inside, vocabulary_size
from collab_compress.calibration.gather import main_output, read_outputs
from collab_compress.calibration.source import reads_tokens_alone

PROBE_TOKENS = 8  # that show whether a model is causal
SAME = 1e-4  # error of outputs, relative to the largest, which is rounding
POOLING_FILE, MODULES_FILE = "1_Pooling/config.json", "modules.json"  # of Sentence Transformers
WITHOUT_WEIGHTS = {"Pooling", "Normalize"}  # modules after the model; the length of an embedding does not count
STORED_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Setting that older versions of Sentence Transformers write → mode, which newer ones write."""


class Reading(NamedTuple):
    """How a model reads texts."""

    tokenizer: PreTrainedTokenizerBase | None
    pooling: str | None  # how embeddings are made of hidden states (`POOLINGS`); None if they are not, or not known

    @classmethod
    def of(cls, wrapper: Any, model: PreTrainedModel, tokenizer: Any) -> Self:
        """Return how `model` reads texts; `wrapper` is what holds it, as a SentenceTransformer does, or itself."""
        return cls(tokenizer_inside(tokenizer), _pooling(wrapper, model) if _embeds(model) else None)


def is_causal(model: PreTrainedModel) -> bool | None:
    """Return whether outputs at a token depend on no later one, by changing the last of a few; None if not known."""
    ids = torch.arange(PROBE_TOKENS, device="cpu")[None] % (vocabulary_size(model) or PROBE_TOKENS)
    half = PROBE_TOKENS // 2
    changed = ids.where(ids < half, ids[:, :1])
    try:
        one, other = (main_output(model, read_outputs(model, {"input_ids": tokens}))[1] for tokens in (ids, changed))
    except Exception:  # whatever a model raises that reads more than tokens
        return None
    if one.shape[:2] != ids.shape or other.shape != one.shape:
        return None
    return bool(torch.allclose(one[:, :half], other[:, :half], rtol=0, atol=SAME * float(one.abs().max())))


def _embeds(model: PreTrainedModel) -> bool:
    """Return whether a model may embed texts: it reads them and has no head, nor both an encoder and a decoder."""
    return reads_tokens_alone(model) and not model.config.is_encoder_decoder and model.base_model is model


def _pooling(wrapper: Any, model: PreTrainedModel) -> str | None:
    """Return how embeddings are made: as a SentenceTransformer or files beside the model say, else by the mean.

    None for other poolings than those of `POOLINGS`, for layers after the pooling, and for a causal model about which
    nothing is said.
    """
    modules = getattr(wrapper, "_orig_mod", wrapper)
    if isinstance(modules, nn.Sequential):  # as a SentenceTransformer is
        after = list(modules)[1:]
        settings = [vars(module) for module in after if type(module).__name__ == "Pooling"]
        return _mode(settings, [type(module).__name__ for module in after])
    folder = getattr(model.config, "_name_or_path", "")
    try:
        stored, names = _stored(Path(folder)) if folder else ([], None)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # files in an unknown form
        return None
    if not stored and names is None:
        return "mean" if is_causal(model) is False else None
    return _mode(stored, names or ["Pooling"])


def _stored(folder: Path) -> tuple[list[Mapping[str, Any]], list[str] | None]:
    """Return the stored settings of the pooling, if any, and the names of the modules after the model, if listed."""
    pooling, modules = folder / POOLING_FILE, folder / MODULES_FILE
    settings = [json.loads(pooling.read_text(encoding="utf-8"))] if pooling.is_file() else []
    if not modules.is_file():
        return settings, None
    listed = json.loads(modules.read_text(encoding="utf-8"))
    return settings, [module["type"].rpartition(".")[2] for module in listed[1:]]


def _mode(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Return the mode of the only pooling, given its settings and the names of the modules after the model."""
    if len(settings) != 1 or not set(names) <= WITHOUT_WEIGHTS:
        return None
    mode = settings[0].get("pooling_mode")
    if mode is None:
        mode = [name for key, name in STORED_POOLINGS.items() if settings[0].get(key)] or "mean"
    if isinstance(mode, list | tuple) and len(mode) == 1:
        mode = mode[0]
    return mode if isinstance(mode, str) and mode in POOLINGS else None


def _average(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(~mask.unsqueeze(2), 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.int().argmax(1)]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    return _first(hidden.flip(1), mask.flip(1))


def _largest(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(~mask.unsqueeze(2), -math.inf).amax(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _average,
    "cls": _first,
    "max": _largest,
    "lasttoken": _last,
}
"""Mode → function from hidden states (B, T, D) and the attention mask (B, T) bool to embeddings (B, D)."""
