"""`collab-compress`: convert a pretrained model's attention into collaborative form, or let its heads mix."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from collab_compress import (
    CheckpointError,
    CollabCompressError,
    Compression,
    Report,
    alphas_of,
    compress,
    make_standalone_,
    mix_heads_,
)
from collab_compress.checkpoint.companions import companions_of, copy_companions
from collab_compress.checkpoint.directory import atomic_directory, atomic_file, refuse_place, to_json
from collab_compress.checkpoint.find import find_directory, title_of
from collab_compress.checkpoint.load import one_line
from collab_compress.conversion.card import CARD, Origin, loading_lines, model_card
from collab_compress.distributed import process_state

from .arguments import Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .source import Source, device_of, load_source, put_on
from .table import mixing_lines, report_lines

RECORD = "collab_compress.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-compress"):
        run(parse(Arguments, "collab-compress", argv))


def run(arguments: Arguments) -> Report | None:
    """Load, convert or mix or both, save and print; returns the report of the conversion."""
    silence_libraries()
    directory = find_directory(arguments.model)
    output = arguments.output or Path(title_of(arguments.model) + arguments.suffix)
    refuse_place(output, directory)
    if arguments.json is not None:
        _check_json(arguments.json, output, directory)
    companions_of(directory)
    device = device_of(arguments.compression.device)
    arguments = replace(arguments, compression=replace(arguments.compression, device=device))
    source = load_source(arguments.model)
    put_on(source.model, device)
    report = None if arguments.compression.dk is None else _convert(source, arguments)
    if arguments.mix:
        mix_heads_(source.model)
    together = process_state()
    together.wait_for_everyone()
    if not together.is_main_process:
        return report
    with ExitStack() as both:
        described = None if arguments.json is None else both.enter_context(atomic_file(arguments.json))
        partial = both.enter_context(atomic_directory(output))
        _save(source, partial, output.name, arguments, report)
        if described is not None:
            described.write_text(to_json(_record(source, arguments, report)), encoding="utf-8")
    lines = [] if report is None else report_lines(report, arguments.calibration)
    for line in lines + mixing_lines(_mixed(source)):
        print(line)
    print(f"\nSaved to {output}. To use it:\n")
    for line in loading_lines(source.model, output):
        print(f"    {line}")
    return report


def _convert(source: Source, arguments: Arguments) -> Report:
    compression = Compression(**asdict(arguments.compression))
    together = process_state()
    hidden = None if together.is_main_process else True  # None: where there is no terminal
    with tqdm(desc="calibrating", unit="module", disable=hidden, leave=False) as bar:

        def progress(name: str, done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.set_description_str(name or "done")

        return compress(
            source.model, compression, arguments.calibration, tokenizer=source.tokenizer, progress=progress,
            distributed=together.num_processes > 1,
        )  # fmt: skip


def _mixed(source: Source) -> dict[str, int]:
    """Attention modules whose heads mix → number of heads."""
    return {name: len(alphas) for name, alphas in alphas_of(source.model).items()}


def _save(source: Source, directory: Path, title: str, arguments: Arguments, report: Report | None) -> None:
    """Save the model, what travels along with it, its card, and how it was made."""
    if arguments.standalone:
        make_standalone_(source.model)
    copy_companions(source.directory, directory)
    try:
        source.model.save_pretrained(directory)
    except ValueError as error:  # settings of generation that Transformers reads, but does not write
        raise CheckpointError(f"{source.directory} cannot be saved again: {one_line(error)}") from error
    compression, calibration = None, None
    if report is not None:
        compression = Compression(**asdict(arguments.compression))
        calibration = {"synthetic": "random tokens", "none": None}.get(arguments.calibration, "texts")
    origin = Origin(source.name, source.directory, source.repository)
    card = model_card(source.model, title, origin, compression, calibration, report)
    (directory / CARD).write_text(str(card), encoding="utf-8")
    (directory / RECORD).write_text(to_json(_record(source, arguments, report)), encoding="utf-8")


def _record(source: Source, arguments: Arguments, report: Report | None) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "class": type(source.model).__name__,
        "compression": None if report is None else asdict(arguments.compression),
        "calibration": None if report is None else arguments.calibration,
        "report": None if report is None else report.to_dict(),
        "mixed_heads": _mixed(source),
        "versions": {
            "collab-compress": version("collab-compress"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def _check_json(path: Path, output: Path, model: Path) -> None:
    """Find out before the work, not after it, that the report has no place."""
    final, place = os.path.realpath(path), Path(os.path.realpath(output))
    if os.path.isdir(final) or not os.path.isdir(os.path.dirname(final)):
        raise CollabCompressError(f"--json {path}: expected a file in a directory that exists")
    if Path(final).is_relative_to(place):
        raise CollabCompressError(f"--json {path}: lies in the output, which has the report as {RECORD} anyway")
    refuse_place(path, model)


if __name__ == "__main__":
    main()
