"""`collab-recover`: bring a converted model nearer to the dense one by a short distillation, without labels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from collab_compress import CollabCompressError
from collab_compress.calibration import calibration_batches
from collab_compress.calibration.batches import is_synthetic, text_file
from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.conversion.drift import drift_of
from collab_compress.conversion.recovery import attention_digest, recover_
from collab_compress.conversion.refit import refit_
from collab_compress.distributed import process_state

from .arguments import RecoverArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .model import Made, Source, bar, begin, finish, load_model, output_of, read_record

TIMED = 3  # steps after which the time of all is told; the first is slower than the others
MEASURED = 64  # sequences that the drift is measured on


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-recover"):
        run(parse(Arguments, "collab-recover", argv))


def run(arguments: Arguments) -> dict[str, Any]:
    """Load both models, train, save and print; returns what is known of the recovery."""
    silence_libraries()
    output = output_of(arguments.output, arguments.model, "-recovered")
    record = read_record(find_directory(arguments.model, arguments.saving.revision))
    dense_directory = _dense_directory(arguments, record)
    data = text_file(arguments.calibration)
    inputs = [dense_directory] if data is None else [dense_directory, data]
    source = begin(arguments.model, output, arguments.saving, arguments.device, True, inputs)
    dense = load_model(dense_directory)
    recorded = record.get("source_digest")
    if arguments.dense is None and recorded is not None and attention_digest(dense) != recorded:
        raise CollabCompressError(
            f"{arguments.model} was converted from {record['model']}, but {dense_directory} holds other attention "
            "weights than that; pass --dense with the model that was converted"
        )
    recovery = recover(
        source, dense, arguments.calibration, arguments.steps, arguments.length,
        arguments.seed, arguments.device, arguments.saving.quiet, arguments.learning_rate,
    )  # fmt: skip
    made = Made({**record, "recovered_from": arguments.model, "recovery": recovery}, [recovery_note(recovery)])
    finish(source, output, arguments.saving, made, recovery_lines(recovery, arguments.calibration))
    return recovery


def recover(
    source: Source,
    dense: PreTrainedModel,
    calibration: str,
    steps: int,
    length: int | None,
    seed: int,
    device: str,
    quiet: bool,
    learning_rate: float | None = None,
    refit: bool = True,
) -> dict[str, Any]:
    """Recover the model of `source`, in place, with a bar; say after the first steps how long it takes.

    Given texts, layers are refitted to them first, unless the conversion has done so (`refit`).

    Returns:
        Steps, seconds, mean divergence of attention probabilities, and the drift of outputs before and after.

    Raises:
        CollabCompressError: the steps or the learning rate are none, or there is nothing to recover.
    """
    texts = not is_synthetic(calibration)
    if steps < 0 or (steps == 0 and not texts):
        raise CollabCompressError(
            f"recovery takes {steps} steps; expected at least 1, or 0 with texts, to which layers are refitted"
        )
    if learning_rate is not None and not 0 < learning_rate < inf:
        raise CollabCompressError(f"--learning-rate is {learning_rate}; expected a number above 0")
    model = source.model
    batches = calibration_batches(
        calibration, dense, source.tokenizer, sequences=MEASURED, length=length, seed=seed + 2000
    )
    dense.to(model.device)
    before, began = drift_of(model, dense, batches), time.perf_counter()
    options: dict[str, Any] = {"use_cpu": True} if device.startswith("cpu") else {}
    found: dict[str, Any] = {"steps": steps}
    if texts and refit:
        with bar("refitting", "layer", quiet) as show:
            refits = refit_(
                model,
                dense,
                source.tokenizer,
                calibration,
                length=length,
                seed=seed,
                progress=lambda name, done, total: show(done, total, name),
            )
        found["refits"] = [asdict(each) for each in refits]
    if steps:
        with bar("recovering", "step", quiet) as show:
            done = recover_(
                model, dense, source.tokenizer, calibration, steps=steps, learning_rate=learning_rate, seed=seed,
                length=length, progress=_timed(show, quiet), **options,
            )  # fmt: skip
        found.update(steps=done.global_step, mean_divergence=done.training_loss)
    seconds = time.perf_counter() - began
    dense.to(model.device)
    after = drift_of(model, dense, batches)
    drifts: dict[str, Any] = {}
    if before is not None and after is not None:
        drifts = {"output": before.output, "drift_before": before.relative_error, "drift": after.relative_error}
    return {**found, "seconds": seconds, **drifts}


def recovery_lines(recovery: dict[str, Any], calibration: str) -> list[str]:
    """Return the lines that report the gain of a recovery."""
    what = [f"{recovery['steps']} step{'s' if recovery['steps'] > 1 else ''}"] if recovery["steps"] else []
    if recovery.get("refits"):
        what.insert(0, f"{len(recovery['refits'])} layers refitted")
    lines = [f"Recovered in {recovery['seconds']:.0f} s: {', '.join(what)} on {calibration}."]
    if "drift" in recovery:
        lines.append(
            f"Drift of {recovery['output']} on {MEASURED} sequences at most: {recovery['drift_before']:.2%} → "
            f"{recovery['drift']:.2%} of its norm."
        )
    return lines


def recovery_note(recovery: dict[str, Any]) -> str:
    """Return the gain of a recovery for a model card."""
    sentences = []
    if recovery.get("refits"):
        sentences.append(
            f"{len(recovery['refits'])} layers that write to the hidden states were refitted towards the source's."
        )
    if recovery["steps"]:
        sentences.append(
            f"Its attention was then brought nearer to the source's in {recovery['steps']} steps of distillation "
            "without labels; nothing but the shared projections and mixing matrices was trained."
        )
    return " ".join(sentences)


def _timed(show: Callable[[int, int, str], None], quiet: bool) -> Callable[[int, int], None]:
    """Show the expected total time on a progress bar, once it is known."""
    started: list[float] = []
    told = quiet or not process_state().is_main_process

    def progress(done: int, total: int) -> None:
        nonlocal told
        show(done, total, "recovering")
        started.append(time.perf_counter())
        if not told and len(started) == 1 + TIMED and total > TIMED:
            told = True
            each = (started[-1] - started[0]) / TIMED
            tqdm.write(f"Recovery: {total} steps take about {_words(each * total)}.")

    return progress


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _dense_directory(arguments: Arguments, record: dict[str, Any]) -> Path:
    if arguments.dense is not None:
        return find_directory(arguments.dense)
    name = record.get("model")
    if not isinstance(name, str):
        raise CollabCompressError(f"{arguments.model} does not say what it was converted from; pass --dense MODEL")
    try:
        return find_directory(name, record.get("revision"))
    except CollabCompressError as error:
        raise CollabCompressError(
            f"{arguments.model} was converted from {name}: {error}; pass --dense MODEL"
        ) from error


if __name__ == "__main__":
    main()
