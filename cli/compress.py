"""`collab-compress`: convert a pretrained model's attention into collaborative form, or let its heads mix."""

import inspect
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from tqdm import tqdm

from collab_compress import (
    CollabCompressError,
    Compression,
    Report,
    alphas_of,
    compress,
    make_standalone_,
    mix_heads_,
)
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.directory import refuse_existing, whole_directory, write_whole_json
from collab_compress.processes import processes

from .arguments import Arguments
from .command import silence_libraries, stopping_in_one_line
from .source import Source, load_source, sentence_transformers_folders
from .table import mixing_lines, report_lines

WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".index.json")
RECORD = "collab_compress.json"
EDITED = {"collaborative": "shared attention", "per-head": "smaller heads", "alphas": "mixed heads"}
REPLACED = ("config.json", "README.md")


def main() -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-compress"):
        run(tyro.cli(Arguments, prog="collab-compress", description=inspect.cleandoc(Arguments.__doc__ or "")))


def run(arguments: Arguments) -> Report | None:
    """Load, convert or mix or both, save and print; returns the report of the conversion."""
    silence_libraries()
    if arguments.output is not None:
        refuse_existing(arguments.output)
    source = load_source(arguments.model)
    sentence_transformers_folders(source.directory)
    output = arguments.output or Path(source.name + arguments.suffix)
    refuse_existing(output)
    if arguments.json is not None:
        _check_json(arguments.json, output)
    report = None if arguments.compression.rank is None else _convert(source, arguments)
    if arguments.mix:
        mix_heads_(source.model)
    together = processes()
    together.wait_for_everyone()
    if not together.is_main_process:
        return report
    with whole_directory(output) as directory:
        _save(source, directory, arguments, report)
        if arguments.json is not None:
            write_whole_json(arguments.json, _record(source, arguments, report))
    lines = [] if report is None else report_lines(report, arguments.calibration)
    for line in lines + mixing_lines(_mixed(source)):
        print(line)
    print(f"\nSaved to {output}. To use it:\n")
    for line in loading_lines(source, output):
        print(f"    {line}")
    return report


def _convert(source: Source, arguments: Arguments) -> Report:
    compression = Compression(**asdict(arguments.compression))
    together = processes()
    hidden = None if together.is_main_process else True  # None: where there is no terminal
    with tqdm(desc="calibrating", unit="module", disable=hidden, leave=False) as bar:

        def progress(name: str, done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.set_description_str(name or "done")

        return compress(
            source.model, compression, arguments.calibration, tokenizer=source.tokenizer, progress=progress,
            spread=together.num_processes > 1,
        )  # fmt: skip


def _mixed(source: Source) -> dict[str, int]:
    """Attention modules whose heads mix → number of heads."""
    return {name: len(alphas) for name, alphas in alphas_of(source.model).items()}


def _save(source: Source, directory: Path, arguments: Arguments, report: Report | None) -> None:
    """Save the model, what travels along with it, and how it was made."""
    if arguments.standalone:
        make_standalone_(source.model)
    _copy_companions(source.directory, directory)
    source.model.save_pretrained(directory)
    write_whole_json(directory / RECORD, _record(source, arguments, report))


def _copy_companions(source: Path, directory: Path) -> None:
    """Copy tokenizer, processor and sentence-transformers files; leave weights, code, and what is written anew."""
    for path in source.iterdir():
        if path.is_file() and not (
            path.name in REPLACED or path.name.startswith(".") or path.name.endswith((*WEIGHTS, ".py"))
        ):
            shutil.copyfile(path, directory / path.name)
    for folder in sentence_transformers_folders(source):
        shutil.copytree(source / folder, directory / folder, copy_function=shutil.copyfile)


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


def _check_json(path: Path, output: Path) -> None:
    """Find out before the work, not after it, that the report has no place."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise CollabCompressError(f"--json {path}: expected a file in a directory that exists")
    if path.resolve().is_relative_to(output.resolve()):
        raise CollabCompressError(f"--json {path}: lies in the output, which has the report as {RECORD} anyway")


def loading_lines(source: Source, output: Path) -> list[str]:
    """Say how to load the result, in three lines."""
    name = type(source.model).__name__
    kinds = {edit.kind for edit in edits_of(source.model)}
    edited = " and ".join(words for kind, words in EDITED.items() if kind in kinds)
    return [
        f"import collab_compress  # lets Transformers rebuild the {edited}",
        f"from transformers import {name}",
        f'model = {name}.from_pretrained("{output}")',
    ]


if __name__ == "__main__":
    main()
