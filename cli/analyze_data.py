"""What `collab-analyze` runs models on: random tokens, a file of sentences, or a task's labelled data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, calibration_batches
from collab_compress.calibration.batches import BATCH_SIZE, read_texts
from collab_compress.calibration.padding import forward_arguments
from collab_compress.errors import CalibrationError, DataError
from collab_compress.report import TaskScore

SYNTHETIC, SYNTHETIC_LENGTH = 256, 64  # random sequences at most, and their tokens
SHORT = (5, 14)  # words of a sentence whose attention maps can be read
SENTENCE = "The animal did not cross the street because it was too tired."


@dataclass(frozen=True)
class Inputs:
    """What the model is run on."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file with one sentence a line, or a source and a target with a tab between them for an encoder–decoder;
    random tokens (noise, for images) if not given."""

    task: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A task of classification, as mrpc: its validation data are read, and heads are scored by its metric, at a pass
    over them for each head."""

    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder with the task's files; the hub if not given."""

    sentences: Annotated[int, tyro.conf.arg(metavar="N")] = 2000
    """Sentences at most, drawn at random; as many sequences of random tokens, up to 256."""

    length: Annotated[int, tyro.conf.arg(metavar="T")] = 128
    """Tokens of a sequence at most."""

    def __post_init__(self) -> None:
        if self.data is not None and self.task is not None:
            raise DataError("--data and --task both say what to read; give one of them")
        if self.data_dir is not None and self.task is None:
            raise DataError("--data-dir belongs to a task; give --task NAME too")
        if self.sentences < 1 or self.length < 1:
            raise DataError(f"got {self.sentences} sentences of {self.length} tokens; expected at least 1")


@dataclass(frozen=True)
class Data(Inputs):
    """What the model is run on, and shown on."""

    sentence: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Whose attention maps are drawn; one of the data if not given."""


@dataclass(frozen=True)
class Loaded:
    """Data that are ready for a study.

    Args:
        batches: keyword arguments for the model.
        words: what they are.
        sentence: whose attention is shown, if any.
        score: of the task, if there is one.
    """

    batches: list[Batch]
    words: str
    sentence: str | tuple[str, str] | None
    score: TaskScore | None = None


def load_data(data: Data, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    """Read what was asked for.

    Raises:
        CalibrationError: a file that cannot be read or has no text, no tokenizer, or a model that reads no texts.
        DataError: a task that is not there, malformed, or of another kind.
    """
    if data.task is not None:
        from .analyze_task import load_scored  # needs what `data` installs

        rows, words, score = load_scored(data.task, data, model, tokenizer, seed)
        return Loaded(rows.batches, words, data.sentence or short_text(rows.texts), score)
    if data.sentence is not None and model.config.is_encoder_decoder:
        raise DataError("--sentence is one text, and an encoder–decoder reads two; it shows a pair of --data FILE")
    if data.data is None:
        return _synthetic(data, model, tokenizer, seed)
    words = f"sentences of {data.data.name}"
    texts = [text for text in read_texts(data.data) if isinstance(text, str)]
    if model.config.is_encoder_decoder and tokenizer is not None:
        pairs = _pairs(data.data, texts)
        drawn = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[: data.sentences].tolist()
        return Loaded(
            list(_translated([pairs[place] for place in drawn], model, tokenizer, data.length)),
            words,
            next((pair for pair in pairs if SHORT[0] <= len(pair[0].split()) <= SHORT[1]), pairs[0]),
        )
    batches = calibration_batches(texts, model, tokenizer, sequences=data.sentences, length=data.length, seed=seed)
    return Loaded(batches, words, data.sentence or short_text(texts))


def short_text(texts: Sequence[str]) -> str:
    """Choose the first sentence whose attention maps can be read."""
    return next((text for text in texts if SHORT[0] <= len(text.split()) <= SHORT[1]), texts[0])


def _synthetic(data: Data, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    tokens = model.main_input_name == "input_ids"
    batches = calibration_batches(
        "synthetic", model, tokenizer, sequences=min(data.sentences, SYNTHETIC),
        length=min(data.length, SYNTHETIC_LENGTH), seed=seed,
    )  # fmt: skip
    sentence = (data.sentence or SENTENCE) if tokens and not model.config.is_encoder_decoder else None
    return Loaded(batches, "random tokens" if tokens else "noise", sentence)


def _pairs(path: Path, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Split lines into what the encoder and what the decoder reads.

    Raises:
        CalibrationError: a line is no such pair.
    """
    pairs = []
    for line in lines:
        source, tab, target = line.partition("\t")
        if not tab or not source.strip() or not target.strip():
            raise CalibrationError(
                f"{path}: {line[:60]!r} is no pair; an encoder–decoder reads a source and a target, a tab between"
            )
        pairs.append((source, target))
    return pairs


def _translated(
    pairs: Sequence[tuple[str, str]], model: PreTrainedModel, tokenizer: Any, length: int
) -> Iterator[Batch]:
    """Encode sources and targets; the decoder starts with its start token, as in training."""
    config: Any = model.config
    options = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
    known = forward_arguments(model)
    for start in range(0, len(pairs), BATCH_SIZE):
        sources, targets = zip(*pairs[start : start + BATCH_SIZE], strict=True)
        batch = {name: value for name, value in tokenizer(list(sources), **options).items() if name in known}
        target = tokenizer(text_target=list(targets), **options)
        first = torch.full((len(targets), 1), config.decoder_start_token_id)
        batch["decoder_input_ids"] = torch.cat([first, target["input_ids"][:, :-1]], 1)
        batch["decoder_attention_mask"] = target["attention_mask"]
        yield batch
