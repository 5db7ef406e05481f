"""Untrained models, with a tokenizer trained on the task's own texts."""

from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from collab_compress_cli.pretrained import find_directory, load_config
from datasets import Dataset
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    MarianConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from collab_compress.conversion.from_scratch import FromScratch, from_config
from collab_compress.errors import CheckpointError, RecipeError, one_line
from collab_compress.options import check_counts

from ..tasks import Task, train_tokenizer

REPLACED_FIELDS = ("layers", "width", "heads", "feed_forward", "dropout", "attention_dropout")
"""Fields that a config replaces."""

MORE_FIELDS = {"deberta-v2": ("share_att_key", "position_buckets", "norm_rel_ebd", "conv_kernel_size")}
"""Family → fields that its models read, though its config class does not name them."""


@dataclass(frozen=True)
class Fresh:
    """An untrained model: Marian for translation, else BERT with a classifier or as a decoder; or by a config."""

    config: str | dict[str, Any] | None = None
    """A model directory, or a name on the hub, whose config.json says what the model is like: family, layers, widths,
    heads and dropouts; or such fields themselves, {model_type: llama, hidden_size: 128, …}. The vocabulary is that of
    the tokenizer trained on the data."""

    layers: int = 6
    """Layers, in the encoder and in the decoder each."""

    width: int = 512
    """Width of the residual stream."""

    heads: int = 8
    """Heads of each attention."""

    feed_forward: int | None = None
    """Width inside the feed-forward layers; four times `width` if not given."""

    dropout: float = 0.1
    """Dropout of embeddings and of each layer's outputs."""

    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""

    max_length: int = 512
    """Most tokens of a text."""

    tokenizer: str = "bpe"
    """Kind of tokenizer: bpe, unigram or word."""

    vocab_size: int | None = 8000
    """Most tokens of the vocabulary; None for all words of "word"."""

    lowercase: bool = False
    """Whether texts are lowercased."""

    attention: FromScratch | None = None
    """Collaborative attention from the start; dense if not given."""

    def __post_init__(self) -> None:
        check_counts(self, RecipeError, "layers", "width", "heads", "feed_forward", "max_length")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"{name} is {getattr(self, name)}; expected a probability from 0 to below 1")
        replaced = [f.name for f in fields(self) if f.name in REPLACED_FIELDS and getattr(self, f.name) != f.default]
        if self.config is not None and replaced:
            raise RecipeError(f"{replaced[0]} is what the config says; leave it or config out")
        if self.width % self.heads:
            raise RecipeError(f"width {self.width} cannot be shared out evenly among {self.heads} heads")


def make_fresh(fresh: Fresh, task: Task, auto_class: Any, train: Dataset, seed: int, folder: Path) -> None:
    """Save a tokenizer trained on a task's texts and an untrained model into `folder`."""
    config = _make_config(fresh, task)
    if type(config) not in auto_class._model_mapping:
        source = fresh.config if isinstance(fresh.config, str) else "config"
        raise RecipeError(f"Transformers has no {config.model_type} model for {task.kind} ({source})")
    model_class = auto_class._model_mapping[type(config)]
    tokenizer = train_tokenizer(
        chain.from_iterable(train[name] for name in task.text_columns),
        fresh.vocab_size,
        fresh.tokenizer,
        lowercase=fresh.lowercase,
        start=task.num_labels is not None,
        mask=task.kind == "masked language modelling",
    )
    tokenizer.model_max_length = fresh.max_length
    _set_tokens_and_labels(config, task, tokenizer)
    _check_buildable(model_class, config)
    set_seed(seed)
    model = model_class(config) if fresh.attention is None else from_config(config, fresh.attention, model_class)
    if task.kind == "translation":
        model.generation_config.suppress_tokens = [tokenizer.pad_token_id]  # the decoder's start token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_buildable(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Refuse a config that no model can be built from."""
    try:
        with torch.device("meta"):
            model_class(config)
        getattr(config, "validate", dict)()  # else it could not be saved; not every config has it
    except Exception as error:  # any family of Transformers raises its own
        raise RecipeError(f"no {model_class.__name__} can be built from the config: {one_line(error)}") from error


def _make_config(fresh: Fresh, task: Task) -> PretrainedConfig:
    """Return the config that the recipe gives; else one with its sizes, of Marian for translation, or of BERT."""
    if isinstance(fresh.config, dict):
        return _build_config(fresh.config)
    if fresh.config is not None:
        return _read_config(fresh.config)
    feed_forward = fresh.feed_forward or 4 * fresh.width
    deviation = fresh.width**-0.5  # Xavier's for square matrices; the usual 0.02 is too little for narrow models
    if task.kind == "translation":
        return MarianConfig(
            max_position_embeddings=fresh.max_length,
            d_model=fresh.width,
            encoder_layers=fresh.layers,
            decoder_layers=fresh.layers,
            encoder_attention_heads=fresh.heads,
            decoder_attention_heads=fresh.heads,
            encoder_ffn_dim=feed_forward,
            decoder_ffn_dim=feed_forward,
            dropout=fresh.dropout,
            attention_dropout=fresh.attention_dropout,
            activation_function="relu",
            scale_embedding=True,
            init_std=deviation,
        )
    causal = task.kind == "language modelling"
    return BertConfig(
        max_position_embeddings=fresh.max_length,
        hidden_size=fresh.width,
        num_hidden_layers=fresh.layers,
        num_attention_heads=fresh.heads,
        intermediate_size=feed_forward,
        hidden_dropout_prob=fresh.dropout,
        attention_probs_dropout_prob=fresh.attention_dropout,
        initializer_range=deviation,
        is_decoder=causal,
        use_cache=not causal,
    )


def _set_tokens_and_labels(config: PretrainedConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the vocabulary and special tokens of the tokenizer, and the number of labels of the task, in place."""
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, source in (("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id")):
        if hasattr(config, name):
            tokens[name] = tokens[source]
    if config.is_encoder_decoder:
        ends = getattr(config, "decoder_start_token_id", None) == config.eos_token_id  # else it starts with padding
        tokens["decoder_start_token_id"] = tokens["eos_token_id" if ends else "pad_token_id"]
    if getattr(config, "forced_eos_token_id", None) is not None:
        tokens["forced_eos_token_id"] = tokens["eos_token_id"]
    if task.num_labels is not None:
        config.num_labels = task.num_labels
    config.update({**tokens, "vocab_size": len(tokenizer)})
    if hasattr(config, "decoder_vocab_size"):
        config.decoder_vocab_size = len(tokenizer)


def _read_config(source: str) -> PretrainedConfig:
    try:
        config = load_config(find_directory(source))
    except CheckpointError as error:
        raise RecipeError(f"the config of {source} cannot be read: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise RecipeError(f"{source} is converted or quantized; use the config of the original model")
    return config


def _build_config(settings: dict[str, Any]) -> PretrainedConfig:
    """Return a config with these fields; one that the family does not have would have no effect, so it is refused."""
    if (family := settings.get("model_type")) not in CONFIG_MAPPING:
        raise RecipeError(f"config says model_type {family!r}; expected a family of Transformers, such as llama")
    config_class = CONFIG_MAPPING[family]
    known = {*config_class().to_dict(), *config_class.attribute_map, *MORE_FIELDS.get(str(family), ())}
    unknown = settings.keys() - known
    if unknown:
        raise RecipeError(f"the config of {family} has no field {min(unknown)}")
    try:
        return config_class(**{name: value for name, value in settings.items() if name != "model_type"})
    except Exception as error:  # any family of Transformers raises its own
        raise RecipeError(f"the config of {family}: {one_line(error)}") from error
