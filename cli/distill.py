"""`collab-distill`: train a converted model towards the dense one, on texts without labels."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from collab_compress import CheckpointError, CollabCompressError
from collab_compress.calibration.batches import shuffled
from collab_compress.calibration.encode import vocabulary_size
from collab_compress.calibration.gather import Batch
from collab_compress.calibration.source import read_calibration, text_files
from collab_compress.checkpoint.files import locked, refuse_place, to_json, write_new
from collab_compress.conversion.agreement import measure
from collab_compress.conversion.reading import Reading
from collab_compress.conversion.report import Agreement, OutputError
from collab_compress.devices import EMULATED, emulates_bfloat16
from collab_compress.training import DistillationTrainer
from collab_compress.training.checkpoints import whole_checkpoints

from .arguments import DistillArguments, DistillationOptions
from .distributed import process_state
from .model import Source, begin, finish, load_source
from .pretrained import find_directory
from .progress import progress

SETTINGS, LOCK = "settings.json", ".lock"  # in the folder of the checkpoints
SAVES = 0.2  # share of the steps after which there is a checkpoint
SMALLER = 0.99  # share of the parameters in layers, below which a teacher is no dense model
MOST_TOKENS = 4096  # of a step, of which it holds the activations
WARMUP = 0.06  # share of the steps in which the learning rate rises
_logger = logging.getLogger("collab_compress.cli")  # held with the warnings of the library
Measured = tuple[OutputError | None, Agreement | None]


def run(arguments: DistillArguments) -> None:
    """Load both models, train one towards the other, save and print."""
    if process_state().num_processes > 1:
        raise CollabCompressError(
            "collab-distill runs in one process; of several, collab-run trains with all of them"
        )
    source, output = begin(arguments, "-distilled", inputs=text_files(arguments.texts))
    training, options = arguments.training, arguments.calibration_options
    settings = {"model": arguments.model, "teacher": arguments.teacher, "texts": arguments.texts}
    settings |= {**asdict(training), **asdict(options)}
    with _checkpoints(output, settings) as folder:
        teacher = load_source(arguments.teacher, find_directory(arguments.teacher), arguments.device, edited=True)
        _check_teacher(source, teacher)
        data = read_calibration(teacher.model, arguments.texts, source.tokenizer, options, training.seed)
        if not data.held_back:
            raise CollabCompressError("there is nothing to train on; pass files with at least two texts")
        for text_note in data.notes:
            _logger.warning(text_note)
        reading, dtype = Reading.of(source.model, source.model, source.tokenizer), source.model.dtype
        progress("comparing both models")
        before = measure(source.model, teacher.model, data, reading)
        _train_(source, teacher.model, data.used, training, folder)
        source.model.to(dtype)
        progress("comparing both models again")
        after = measure(source.model, teacher.model, data, reading)
        texts = sum(len(batch["input_ids"]) for batch in data.used)
        epochs = f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'}"
        note = f"Trained towards `{arguments.teacher}` without labels, {epochs} of {texts:,} texts."
        changes = _changes(before, after)
        record = {**settings, "before": _numbers(before), "after": _numbers(after)}
        finish(source, output, arguments.saving, record, [*changes, note], notes=[note, *changes])


def _check_teacher(source: Source, teacher: Source) -> None:
    """Refuse a teacher with other tokens, and one that seems to be the model to train."""
    tokens, others = (vocabulary_size(one.model) for one in (source, teacher))
    if tokens != others:
        raise CollabCompressError(
            f"{source.name} has {tokens:,} tokens and {teacher.name} {others:,}; both must read the same, so pass "
            "the model that was converted"
        )
    parameters, more = (one.model.num_parameters(exclude_embeddings=True) for one in (source, teacher))
    if more < SMALLER * parameters:
        raise CollabCompressError(
            f"the teacher {teacher.name} has {more:,} parameters in its layers, {source.name} {parameters:,}; the "
            "dense model comes second"
        )


@contextmanager
def _checkpoints(output: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Yield the folder of the checkpoints, new or of the same command; only a run that cannot end leaves it."""
    folder = output.with_name(f"{output.name}.checkpoints")
    stored, wanted = folder / SETTINGS, to_json(settings)
    if folder.exists():
        if not stored.is_file() or stored.read_bytes() != wanted.encode():
            raise CheckpointError(
                f"{folder} is not from an interrupted run of this very command; remove it, or choose another output"
            )
    else:
        refuse_place(folder)
    with locked(folder, LOCK, CheckpointError):
        if not stored.exists():
            write_new(stored, wanted)
        try:
            yield folder
        except KeyboardInterrupt as interrupt:
            if not whole_checkpoints(folder):
                raise
            message = f"interrupted; the same command goes on from the last checkpoint in {folder}"
            raise KeyboardInterrupt(message) from interrupt
        finally:
            if output.exists() or not whole_checkpoints(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _train_(
    source: Source, teacher: PreTrainedModel, batches: Sequence[Batch], options: DistillationOptions, folder: Path
) -> None:
    """Train a model in place, in float32, from the last checkpoint if there is one."""
    padding = getattr(source.tokenizer, "pad_token_id", None) or 0
    bf16 = options.bf16 and not emulates_bfloat16(source.model.device)
    if bf16 != options.bf16:
        _logger.warning("bf16 changed nothing: %s", EMULATED)
    trainer_arguments = TrainingArguments(
        str(folder),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        warmup_steps=WARMUP,
        per_device_train_batch_size=1,  # of those that are made here
        bf16=bf16,
        seed=options.seed,
        use_cpu=source.model.device.type == "cpu",
        dataloader_pin_memory=source.model.device.type != "cpu",
        save_steps=SAVES,
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DistillationTrainer(
        source.model.float(),
        trainer_arguments,
        teacher=teacher,
        train_dataset=_of_similar_lengths(batches, options.batch_size, options.seed, padding),
        data_collator=itemgetter(0),
        callbacks=[_Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoints = whole_checkpoints(folder)
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    source.model.eval()


def _of_similar_lengths(batches: Sequence[Batch], size: int, seed: int, padding: int) -> list[Batch]:
    """Return the sequences of some batches in new ones, with little padding, which is on the right.

    Each has `size` of them, or fewer where these are longer than MOST_TOKENS together, and at least one.
    """
    names = dict.fromkeys(name for batch in batches for name in batch)
    masks = {name: "decoder_attention_mask" if name.startswith("decoder") else "attention_mask" for name in names}
    rows = []
    for batch in batches:
        whole = {name: batch.get(name, torch.zeros_like(batch["input_ids"])) for name in names}  # no token types: 0
        for place in range(len(batch["input_ids"])):
            rows.append({name: values[place][whole[masks[name]][place].bool()] for name, values in whole.items()})
    rows = sorted(shuffled(rows, seed), key=_length)
    groups: list[list[Batch]] = []
    for row in rows:  # each at least as long as the one before it
        if not groups or len(groups[-1]) >= min(size, max(1, MOST_TOKENS // _length(row))):
            groups.append([])
        groups[-1].append(row)
    fills = dict.fromkeys(("input_ids", "decoder_input_ids"), padding)
    return [
        {name: pad_sequence([row[name] for row in group], True, fills.get(name, 0)) for name in group[0]}
        for group in groups
    ]


def _length(row: Batch) -> int:
    """Return the number of tokens of a sequence, or of the longer one of a pair."""
    return max(map(len, row.values()))


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Shows the steps of the training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        progress("training", state.global_step, state.max_steps)


def _changes(before: Measured, after: Measured) -> list[str]:
    """Return how far the outputs were from the teacher's and are now, and what of its results stayed and stays."""
    (old, old_agreement), (new, new_agreement) = before, after
    lines = []
    if old is not None and new is not None:
        lines.append(
            f"Output error: {old.relative_error:.1%} → {new.relative_error:.1%} ({new.output} of {new.sequences} "
            "held-back texts)."
        )
    if old_agreement is not None and new_agreement is not None:
        lines += [f"Before: {old_agreement.finding}", f"After: {new_agreement.finding}"]
    return lines


def _numbers(measured: Measured) -> dict[str, Any]:
    """Return both measurements for the record."""
    return {
        name: None if part is None else asdict(part)
        for name, part in zip(("output_error", "agreement"), measured, strict=True)
    }
