"""A tiny checkpoint with its tokenizer, and a task whose files are a few lines."""

import random

import pytest
from transformers import BertConfig, BertModel

from collab_compress.tasks import train_tokenizer

WORDS = ("red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "now", "later", "never")


def sentence(generator):
    return " ".join(generator.choice(WORDS) for _ in range(5))


@pytest.fixture
def data_dir(tmp_path):
    generator = random.Random(0)
    folder = tmp_path / "data" / "MRPC"
    folder.mkdir(parents=True)
    for name, rows in (("train.tsv", 32), ("dev.tsv", 8)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for row in range(rows):
            first = sentence(generator)
            second = first if row % 2 else sentence(generator)
            lines.append(f"{row % 2}\t{row}\t{row}\t{first}\t{second}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return tmp_path / "data"


@pytest.fixture
def start(tmp_path):
    """A model that has never seen anything."""
    import torch

    torch.manual_seed(0)
    tokenizer = train_tokenizer(WORDS, kind="word", vocab_size=None, start=True)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=32,
        max_position_embeddings=40, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokenizer.model_max_length = 40
    tokenizer.save_pretrained(tmp_path / "start")
    BertModel(config).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def lines(rows, seed):
    generator = random.Random(seed)
    return [sentence(generator) for _ in range(rows)]


@pytest.fixture
def sentences(tmp_path):
    """Sentences, and their words in the opposite order."""
    folder = tmp_path / "parallel"
    folder.mkdir()
    for seed, (split, rows) in enumerate((("train", 24), ("valid", 5), ("test", 4))):
        found = lines(rows, seed)
        (folder / f"{split}.aa").write_text("".join(f"{line}\n" for line in found))
        (folder / f"{split}.bb").write_text("".join(f"{' '.join(line.upper().split()[::-1])}\n" for line in found))
    return tmp_path


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for seed, (split, rows) in enumerate((("train", 24), ("valid", 5), ("test", 4))):
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines(rows, seed)))
    return tmp_path


@pytest.fixture
def questions(tmp_path):
    """Those about cats are about someone, others about numbers."""
    folder = tmp_path / "trec"
    folder.mkdir()
    for name, rows in (("train_5500.label", 32), ("TREC_10.label", 8)):
        found = lines(rows, rows)
        labels = ("HUM:ind" if "cat" in line else "NUM:count" for line in found)
        (folder / name).write_text("".join(f"{label} {line}\n" for label, line in zip(labels, found, strict=True)))
    return tmp_path
