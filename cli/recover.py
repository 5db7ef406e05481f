"""`collab-recover`: bring a converted model nearer to the dense one by a short distillation, without labels."""

import time
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from collab_compress import CollabCompressError, is_converted
from collab_compress.calibration import calibration_batches
from collab_compress.calibration.batches import is_none, resolved, text_file
from collab_compress.calibration.tokenization import vocabulary_size
from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.conversion.drift import drift_of
from collab_compress.conversion.recovery import attention_digest, recover_
from collab_compress.conversion.refit import refit_

from .arguments import RecoverArguments as Arguments
from .command import main_of
from .distributed import process_state
from .model import Source, begin, finish, load_model, progress_bar, read_record

TIMED = 3  # steps after which the total time is estimated, without the first, slower one
MEASURED = 64  # sequences on which drift is measured
NOT_TRAINED = "Attention is not converted, so there was nothing to train: layers were refitted alone."


def run(arguments: Arguments) -> dict[str, Any]:
    """Load both models, train, save and print; return the record of the recovery."""
    check_steps(arguments.steps, arguments.calibration)
    record = read_record(find_directory(arguments.model, arguments.saving.revision))
    dense_directory = _dense_directory(arguments, record)
    data = text_file(arguments.calibration)
    inputs = [dense_directory] if data is None else [dense_directory, data]
    source, output = begin(arguments, "-recovered", inputs=inputs)
    trains = is_converted(source.model)
    calibration = resolved(arguments.calibration, source.model, source.tokenizer)
    check_steps(arguments.steps, calibration)
    if not trains and calibration == "synthetic":
        raise CollabCompressError(
            f"attention of {arguments.model} is not converted, so there is nothing to train; pass --calibration FILE "
            "to refit its layers to texts"
        )
    dense = load_model(dense_directory)
    recorded = record.get("source_digest")
    if arguments.dense is None and recorded is not None and attention_digest(dense) != recorded:
        raise CollabCompressError(
            f"{arguments.model} was converted from {record['model']}, but {dense_directory} holds other attention "
            "weights than that; pass --dense with the model that was converted"
        )
    if vocabulary_size(dense) != vocabulary_size(source.model):
        raise CollabCompressError(
            f"{arguments.model} knows {vocabulary_size(source.model)} tokens, and {dense_directory} "
            f"{vocabulary_size(dense)}; trim that model alone by the same --vocabulary, and pass it as --dense"
        )
    recovery = recover(
        source,
        dense,
        arguments.calibration,
        steps=arguments.steps if trains else 0,
        length=arguments.length,
        seed=arguments.seed,
        device=arguments.device,
        quiet=arguments.saving.quiet,
        learning_rate=arguments.learning_rate,
    )
    record |= {"recovered_from": arguments.model, "recovery": recovery}
    lines = recovery_lines(recovery, calibration)
    if arguments.steps and not trains:
        lines.append(NOT_TRAINED)
    finish(source, output, arguments.saving, record, lines, notes=[recovery_note(recovery)])
    return recovery


main = main_of("collab-recover", Arguments, run)


def recover(
    source: Source,
    dense: PreTrainedModel,
    calibration: str,
    *,
    steps: int,
    length: int | None,
    seed: int,
    device: str,
    quiet: bool,
    learning_rate: float | None = None,
    refit: bool = True,
) -> dict[str, Any]:
    """Recover the model of `source` in place, with a progress bar, and print an estimate of the time.

    Given texts, layers are refitted to them first, unless the conversion has done so (`refit`).

    Returns:
        Steps, seconds, mean divergence of attention probabilities, and the drift of outputs before and after.

    Raises:
        CollabCompressError: the learning rate is out of range, or nothing is converted.
    """
    if learning_rate is not None and not 0 < learning_rate < inf:
        raise CollabCompressError(f"--learning-rate is {learning_rate}; expected a number above 0")
    model = source.model
    batches = calibration_batches(
        calibration, dense, source.tokenizer, sequences=MEASURED, length=length, seed=seed + 2000
    )
    dense.to(model.device)
    before, start = drift_of(model, dense, batches), time.perf_counter()
    recovery: dict[str, Any] = {"steps": steps}
    training_arguments: dict[str, Any] = {"use_cpu": True} if device.startswith("cpu") else {}
    if refit and resolved(calibration, dense, source.tokenizer) != "synthetic":
        with progress_bar("layer", quiet) as progress:
            refits = refit_(model, dense, source.tokenizer, calibration, length=length, seed=seed, progress=progress)
        recovery["refits"] = [asdict(report) for report in refits]
    if steps:
        with progress_bar("step", quiet) as progress:
            training = recover_(
                model,
                dense,
                source.tokenizer,
                calibration,
                steps=steps,
                learning_rate=learning_rate,
                seed=seed,
                length=length,
                progress=_timed(progress, quiet),
                **training_arguments,
            )
        recovery.update(steps=training.global_step, mean_divergence=training.training_loss)
    recovery["seconds"] = time.perf_counter() - start
    dense.to(model.device)
    after = drift_of(model, dense, batches)
    if before is not None and after is not None:
        recovery.update(output=before.output, drift_before=before.relative_error, drift=after.relative_error)
    return recovery


def check_steps(steps: int, calibration: str) -> None:
    """Refuse a recovery without data, or without steps, unless layers are refitted to texts.

    Raises:
        CollabCompressError: there is nothing to do, or less.
    """
    if is_none(calibration):
        raise CollabCompressError("recovery trains on calibration data; leave --calibration none out")
    if steps < 0 or (steps == 0 and calibration == "synthetic"):
        raise CollabCompressError(
            f"recovery takes {steps} steps; expected at least 1, or 0 with texts, to which layers are refitted"
        )


def recovery_lines(recovery: dict[str, Any], calibration: str) -> list[str]:
    """Return the lines to print about a recovery."""
    work = [f"{len(recovery['refits'])} layers refitted"] if recovery.get("refits") else []
    if recovery["steps"]:
        work.append(f"{recovery['steps']} step{'s' if recovery['steps'] > 1 else ''}")
    lines = [f"Recovered in {recovery['seconds']:.0f} s: {', '.join(work)} on {calibration}."]
    if "drift" in recovery:
        lines.append(
            f"Drift of {recovery['output']} on up to {MEASURED} sequences: {recovery['drift_before']:.2%} → "
            f"{recovery['drift']:.2%}."
        )
    return lines


def recovery_note(recovery: dict[str, Any]) -> str:
    """Return the sentences about a recovery for a model card."""
    sentences = []
    if recovery.get("refits"):
        sentences.append(
            f"{len(recovery['refits'])} layers that write to the hidden states were refitted towards the source's."
        )
    if recovery["steps"]:
        sentences.append(
            f"Its attention was then brought nearer to the source's in {recovery['steps']} steps of distillation "
            "without labels, which trained the shared projections and mixing matrices alone."
        )
    return " ".join(sentences)


def _timed(show: Callable[[str, int, int | None], None], quiet: bool) -> Callable[[int, int], None]:
    """Return a progress function that also prints the expected total time once, after the first steps."""
    times: list[float] = []
    silent = quiet or not process_state().is_main_process

    def progress(done: int, total: int) -> None:
        show("recovering", done, total)
        times.append(time.perf_counter())
        if not silent and len(times) == 1 + TIMED and total > TIMED:
            seconds = total * (times[-1] - times[0]) / TIMED
            expected = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
            tqdm.write(f"Recovery: {total} steps take about {expected}.")

    return progress


def _dense_directory(arguments: Arguments, record: dict[str, Any]) -> Path:
    if arguments.dense is not None:
        return find_directory(arguments.dense)
    name = record.get("model")
    if not isinstance(name, str):
        raise CollabCompressError(
            f"{arguments.model} does not name the model it was converted from; pass --dense MODEL"
        )
    try:
        return find_directory(name, record.get("revision"))
    except CollabCompressError as error:
        raise CollabCompressError(
            f"{arguments.model} was converted from {name}: {error}; pass --dense MODEL"
        ) from error
