"""A dozen words: sentences of them, a tokenizer and a tiny BERT that know no others, and pairs of them as MRPC."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from collab_compress_glue_runs.tasks import train_tokenizer
from transformers import BertConfig, PreTrainedTokenizerFast

WORDS = ("red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "now", "later", "never")


def sentence(generator: random.Random) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(5))


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [sentence(generator) for _ in range(count)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(WORDS, kind="word", vocab_size=None, start=True)
    tokenizer.model_max_length = 40
    return tokenizer


def bert_config(tokenizer: PreTrainedTokenizerFast, **others: Any) -> BertConfig:
    sizes = {"num_attention_heads": 3, "num_hidden_layers": 2, "initializer_range": 0.4, "hidden_size": 24}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 40}
    return BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes | others)


def write_mrpc(file: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write pairs as rows of MRPC; every other one is labelled equivalent."""
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    lines += [f"{row % 2}\t{row}\t{row}\t{first}\t{second}" for row, (first, second) in enumerate(pairs)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def unpadded_rows(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of each sequence of some batches, sorted."""
    pairs = [pair for batch in batches for pair in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return sorted(ids[mask.bool()].tolist() for ids, mask in pairs)
