"""A tiny checkpoint with its tokenizer, and a task whose files are a few lines."""

import math
import random
import shutil
from statistics import fmean

import pytest
from tiny_words import bert_config, sentence, word_tokenizer, write_mrpc
from tiny_words import sentences as draw_sentences
from transformers import BertModel


@pytest.fixture
def data_dir(tmp_path):
    generator = random.Random(0)
    for name, rows in (("train.tsv", 32), ("dev.tsv", 8)):
        pairs = []
        for row in range(rows):
            first = sentence(generator)
            pairs.append((first, first if row % 2 else sentence(generator)))
        write_mrpc(tmp_path / "data/MRPC" / name, pairs)
    return tmp_path / "data"


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    import torch

    folder = tmp_path_factory.mktemp("untrained")
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    config = bert_config(tokenizer, initializer_range=0.3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer.save_pretrained(folder)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start(untrained, tmp_path):
    """Save an untrained model with its tokenizer."""
    return shutil.copytree(untrained, tmp_path / "start")


@pytest.fixture
def sentences(tmp_path):
    """Write a translation task: sentences, and their words in reverse order."""
    folder = tmp_path / "parallel"
    folder.mkdir()
    for seed, (split, rows) in enumerate((("train", 24), ("valid", 5), ("test", 4))):
        lines = draw_sentences(rows, seed)
        (folder / f"{split}.aa").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"{split}.bb").write_text("".join(f"{' '.join(line.upper().split()[::-1])}\n" for line in lines))
    return tmp_path


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for seed, (split, rows) in enumerate((("train", 24), ("valid", 5), ("test", 4))):
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in draw_sentences(rows, seed)))
    return tmp_path


@pytest.fixture
def perplexity_by_token():
    """Return the perplexity of running text token by token, each predicted from all before it in its block."""
    import torch

    @torch.no_grad()
    def perplexity(model, tokenizer, path, length):
        stream, losses = [tokenizer.bos_token_id], []
        for line in path.read_text().splitlines():
            stream += [*(tokenizer.convert_tokens_to_ids(word) for word in line.split()), tokenizer.eos_token_id]
        for position in range(1, len(stream)):
            block = (position - 1) // length * length
            logits = model(torch.tensor([stream[block:position]])).logits[0, -1]
            losses.append(-float(logits.double().log_softmax(-1)[stream[position]]))
        return math.exp(fmean(losses))

    return perplexity


@pytest.fixture
def questions(tmp_path):
    """Write TREC questions: those about cats are labelled HUM, the others NUM."""
    folder = tmp_path / "trec"
    folder.mkdir()
    for name, rows in (("train_5500.label", 32), ("TREC_10.label", 8)):
        lines = draw_sentences(rows, rows)
        labels = ("HUM:ind" if "cat" in line else "NUM:count" for line in lines)
        (folder / name).write_text("".join(f"{label} {line}\n" for label, line in zip(labels, lines, strict=True)))
    return tmp_path
