"""Models that start from nothing: a tokenizer trained on the task's own texts, and untrained weights."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    MarianConfig,
    MarianMTModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from collab_compress.checkpoint.directory import whole_directory
from collab_compress.conversion.fresh import FromScratch, from_config
from collab_compress.errors import RecipeError
from collab_compress.tasks import Task, train_tokenizer


@dataclass(frozen=True)
class Fresh:
    """An untrained model: Marian's encoder–decoder for translation, BERT as a decoder for language modelling, BERT
    with a classifier otherwise.
    """

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
    """Dropout of attention weights."""

    max_length: int = 512
    """Most tokens of a text."""

    tokenizer: str = "bpe"
    """Kind of tokenizer: bpe, unigram or word."""

    vocab_size: int | None = 8000
    """Tokens at most; None for all words of "word"."""

    lowercase: bool = False
    """Whether texts are put in lower case."""

    attention: FromScratch | None = None
    """Collaborative attention from the start; dense if not given."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.width % self.heads:
            raise RecipeError(f"width {self.width} cannot be shared out evenly among {self.heads} heads")


def make_fresh(fresh: Fresh, task: Task, train: Dataset, seed: int, folder: Path) -> None:
    """Save a tokenizer trained on a task's texts and an untrained model into `folder`.

    Args:
        fresh: what the model is like.
        task: decides the architecture, and the number of labels.
        train: texts, in the task's columns.
        seed: of the weights.
        folder: where both are saved; must not exist.

    Raises:
        DataError: the tokenizer cannot be trained.
    """
    texts = chain.from_iterable(train[column] for column in task.text_columns)
    tokenizer = train_tokenizer(
        texts, fresh.vocab_size, fresh.tokenizer, lowercase=fresh.lowercase, start=task.num_labels is not None
    )
    tokenizer.model_max_length = fresh.max_length
    model_class, config = _architecture(fresh, task, tokenizer)
    set_seed(seed)
    model = model_class(config) if fresh.attention is None else from_config(config, fresh.attention, model_class)
    if task.kind == "translation":
        model.generation_config.suppress_tokens = [tokenizer.pad_token_id]  # what a decoder starts with
    with whole_directory(folder) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _architecture(
    fresh: Fresh, task: Task, tokenizer: PreTrainedTokenizerBase
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    inner = fresh.feed_forward or 4 * fresh.width
    deviation = fresh.width**-0.5  # Xavier's for square matrices; the usual 0.02 is too little for narrow models
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer), "max_position_embeddings": fresh.max_length,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    if task.kind == "translation":
        return MarianMTModel, MarianConfig(
            **shared, d_model=fresh.width, encoder_layers=fresh.layers, decoder_layers=fresh.layers,
            encoder_attention_heads=fresh.heads, decoder_attention_heads=fresh.heads, encoder_ffn_dim=inner,
            decoder_ffn_dim=inner, dropout=fresh.dropout, attention_dropout=fresh.attention_dropout,
            activation_function="relu", scale_embedding=True, init_std=deviation,
            decoder_start_token_id=tokenizer.pad_token_id, forced_eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    bert = {
        **shared, "hidden_size": fresh.width, "num_hidden_layers": fresh.layers, "num_attention_heads": fresh.heads,
        "intermediate_size": inner, "hidden_dropout_prob": fresh.dropout,
        "attention_probs_dropout_prob": fresh.attention_dropout, "initializer_range": deviation,
    }  # fmt: skip
    if task.kind == "language modelling":
        return BertLMHeadModel, BertConfig(**bert, is_decoder=True, use_cache=False)
    return BertForSequenceClassification, BertConfig(**bert, num_labels=task.num_labels)
