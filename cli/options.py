"""Options that the commands which write a model have in common, and what they do before and after the work."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import tyro
from tqdm import tqdm

from collab_compress import CheckpointError, CollabCompressError, Compression, Report, make_standalone_
from collab_compress.checkpoint.directory import (
    atomic_directory,
    atomic_file,
    companions_of,
    copy_companions,
    refuse_place,
    to_json,
)
from collab_compress.checkpoint.pretrained import find_directory, title_of
from collab_compress.checkpoint.upload import check_upload, push_to_hub
from collab_compress.conversion.card import CARD, Origin, loading_lines, model_card
from collab_compress.distributed import process_state
from collab_compress.errors import one_line

from .source import Source, device_of, load_source, put_on

RECORD = "collab_compress.json"
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
Device = Annotated[str | None, tyro.conf.arg(metavar="DEVICE")]


@dataclass(frozen=True)
class Saving:
    """Where the model is from, and what becomes of the result."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report as JSON as well."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="REV")] = None
    """Branch, tag or commit of MODEL on the hub."""

    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Put the result on the hub too, with its model card; org/name, or a name among your own."""

    quiet: bool = False
    """Say nothing but errors."""

    def say(self, *lines: str) -> None:
        """Print lines, unless that is not wanted."""
        for line in () if self.quiet else lines:
            print(line)


@dataclass(frozen=True)
class Made:
    """What a command has made of a model.

    Args:
        record: what `collab_compress.json` says of it.
        notes: what the card says of it, a paragraph each.
        compression: how it was converted, if it was.
        calibration: what on, in words.
        report: of the conversion.
        standalone: whether the modelling code goes with it.
    """

    record: dict[str, Any]
    notes: Sequence[str] = ()
    compression: Compression | None = None
    calibration: str | None = None
    report: Report | None = None
    standalone: bool = False


def begin(model: str, output: Path, saving: Saving, device: str | None = None, edited: bool = False) -> Source:
    """Find out what would go wrong in the end, and load MODEL.

    Raises:
        CheckpointError: there is no such model, or no place for the output.
        CollabCompressError: the report has no place.
    """
    directory = find_directory(model, saving.revision)
    refuse_place(output, directory)
    if saving.json is not None:
        _check_json(saving.json, output, directory)
    if saving.push_to_hub is not None:
        check_upload(saving.push_to_hub)
    companions_of(directory)
    source = load_source(model, edited, saving.revision)
    put_on(source.model, device_of(device))
    return source


def finish(source: Source, output: Path, saving: Saving, made: Made, lines: Sequence[str]) -> None:
    """Save the model, what travels along with it, its card, and how it was made; say so, and put it on the hub.

    Where several processes work, the main one does it.

    Raises:
        CheckpointError: it cannot be written, or the hub does not take it.
    """
    together = process_state()
    together.wait_for_everyone()
    if not together.is_main_process:
        return
    record = {**made.record, "versions": _versions()}
    with ExitStack() as both:
        described = None if saving.json is None else both.enter_context(atomic_file(saving.json))
        partial = both.enter_context(atomic_directory(output))
        _save(source, partial, output.name, made, record)
        if described is not None:
            described.write_text(to_json(record), encoding="utf-8")
    saving.say(*lines, f"\nSaved to {output}. To use it:\n")
    saving.say(*(f"    {line}" for line in loading_lines(source.model, output)))
    if saving.push_to_hub is not None:
        try:
            address = push_to_hub(output, saving.push_to_hub)
        except CheckpointError as error:
            raise CheckpointError(f"saved to {output}, but {error}") from error
        saving.say(f"\nOn the hub: {address}")


@contextmanager
def bar(description: str, unit: str, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on the main process; it takes what is done, how much there is, and a name for it."""
    hidden = True if quiet or not process_state().is_main_process else None  # None: where there is no terminal
    with tqdm(desc=description, unit=unit, disable=hidden, leave=False) as shown:

        def progress(done: int, total: int, name: str = "") -> None:
            shown.total, shown.n = total, done
            shown.set_description_str(name or description)

        yield progress


def output_of(given: Path | None, model: str, suffix: str) -> Path:
    """Give the output that was asked for, or one in the current directory named after MODEL."""
    return given or Path(title_of(model) + suffix)


def _save(source: Source, directory: Path, title: str, made: Made, record: dict[str, Any]) -> None:
    if made.standalone:
        make_standalone_(source.model)
    copy_companions(source.directory, directory)
    try:
        source.model.save_pretrained(directory)
    except ValueError as error:  # settings of generation that Transformers reads, but does not write
        raise CheckpointError(f"{source.directory} cannot be saved again: {one_line(error)}") from error
    origin = Origin(source.name, source.directory, source.repository)
    card = model_card(source.model, title, origin, made.compression, made.calibration, made.report, made.notes)
    (directory / CARD).write_text(str(card), encoding="utf-8")
    (directory / RECORD).write_text(to_json(record), encoding="utf-8")


def _versions() -> dict[str, str]:
    return {
        "collab-compress": version("collab-compress"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _check_json(path: Path, output: Path, model: Path) -> None:
    """Find out before the work, not after it, that the report has no place."""
    final, place = os.path.realpath(path), Path(os.path.realpath(output))
    if os.path.isdir(final) or not os.path.isdir(os.path.dirname(final)):
        raise CollabCompressError(f"--json {path}: expected a file in a directory that exists")
    if Path(final).is_relative_to(place):
        raise CollabCompressError(f"--json {path}: lies in the output, which has the report as {RECORD} anyway")
    refuse_place(path, model)
