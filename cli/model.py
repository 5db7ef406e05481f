"""Models and outputs of the commands: what they load and check before the work, and what they save after it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from transformers import AutoProcessor, PreTrainedModel

from collab_compress import CheckpointError, CollabCompressError
from collab_compress.checkpoint.files import atomic_directory, atomic_file, refuse_place, resolved, to_json
from collab_compress.errors import CompressionError, install, one_line

from .arguments import AUTO, EditArguments, Saving
from .card import CARD, edited_words, loading_lines, model_card
from .distributed import process_state
from .pretrained import (
    FETCHED,
    MODULES,
    NOT_FETCHED,
    find_directory,
    has_tokenizer,
    load_model,
    load_tokenizer,
    sentence_class,
    sentence_length,
    title_of,
)
from .progress import progress

RECORD = "collab_compress.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OF_TOKENS = ("vocab*", "merges.txt", "*.model", "*.spm", "*tokens*.json", "tekken.json", "generation_config.json")
"""Files that hold tokens or their ids."""


@dataclass(frozen=True)
class Source:
    """A loaded model in its own class and dtype, in evaluation mode, and its tokenizer, or None if it has none."""

    name: str
    directory: Path
    model: PreTrainedModel
    tokenizer: Any


def begin(
    arguments: EditArguments, suffix: str, edited: bool = True, inputs: Sequence[Path] = ()
) -> tuple[Source, Path]:
    """Check the outputs of a command, which may not lie in `inputs`; return its model and the output."""
    saving = arguments.saving
    output = arguments.output or Path(title_of(arguments.model) + suffix)
    directory = find_directory(arguments.model, saving.revision)
    check_outputs({"--output": output, "--json": saving.json}, directory, *inputs)
    refuse_pickled_modules(directory)
    return load_source(arguments.model, directory, arguments.device, edited), output


def check_outputs(outputs: Mapping[str, Path | None], *inputs: Path | None) -> None:
    """Refuse outputs (option → path) that exist, cannot be written, or lie in an input or in one another."""
    refuse_nested(outputs)
    for path in outputs.values():
        if path is not None:
            refuse_place(path, *(read for read in inputs if read is not None))


def refuse_nested(outputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs that are the same or lie in one another."""
    places = {option: resolved(path) for option, path in outputs.items() if path is not None}
    for (inner, path), (outer, directory) in permutations(places.items(), 2):
        if path == directory:
            raise CollabCompressError(f"{inner} and {outer} are both {outputs[outer]}; choose two places")
        if path.is_relative_to(directory):
            raise CollabCompressError(f"{inner} {outputs[inner]} lies in {outer} {outputs[outer]}; choose two places")


def refuse_pickled_modules(directory: Path) -> None:
    """Refuse a model of sentence-transformers with pickled weights of a further module, which are not copied."""
    for path in directory.glob("*/pytorch_model.bin") if (directory / MODULES).is_file() else ():
        if not any(path.parent.glob("*.safetensors")):
            raise CheckpointError(
                f"{path.parent} has weights that are no safetensors; load and save the model by "
                "sentence-transformers first"
            )


def copy_companions(directory: Path, target: Path, tokens: bool = True) -> None:
    """Copy what would be fetched of a model on the hub but its weights, with or without files that hold tokens."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    replaced = [*WEIGHTS, *(() if tokens else OF_TOKENS)]
    for name in filter_repo_objects(names, allow_patterns=FETCHED, ignore_patterns=[".*", "*/.*", *NOT_FETCHED]):
        if "/" not in name and any(fnmatch(name, pattern) for pattern in replaced):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
    for path in target.rglob("*.json"):
        stored = path.read_bytes()
        if b'"auto_map"' in stored:  # names code that is not copied
            with suppress(ValueError, RecursionError):  # no JSON
                settings = json.loads(stored)
                settings.pop("auto_map", None)
                path.write_text(to_json(settings), encoding="utf-8")


def push_to_hub(directory: Path, name: str) -> str:
    """Upload the directory of a saved model to the hub in one commit, and return its address."""
    api, message = HfApi(), "Upload a model made with collab-compress"
    try:
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(folder_path=directory, repo_id=repository, commit_message=message)
    except Exception as error:  # errors of the hub, of the connection, and of files
        raise CheckpointError(f"saved to {directory}, but the hub does not take {name}: {one_line(error)}") from error
    return f"{api.endpoint}/{repository}"


def load_source(name: str, directory: Path, device: str = AUTO, edited: bool = False) -> Source:
    """Load the model called `name`, which may be `edited` already, from the directory of `find_directory`."""
    progress(f"loading {name}")
    model = load_model(directory, edited)
    put_on(model, device)
    processor = load_tokenizer(directory, AutoProcessor) if has_tokenizer(directory) else None
    tokenizer = getattr(processor, "tokenizer", processor)
    limit, length = getattr(tokenizer, "model_max_length", None), sentence_length(directory)
    if tokenizer is not None and isinstance(limit, int | float) and length is not None:
        tokenizer.model_max_length = min(limit, length)
    return Source(title_of(name), directory, model, tokenizer)


def device_of(device: str) -> str:
    """Return the device of this process, of several on one machine; "auto" is the accelerator, if there is one."""
    if device == AUTO:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator.type
    state = process_state()
    if state.num_processes == 1 or device == "cpu":
        return device
    kind, _, number = device.partition(":")
    if number:
        raise CompressionError(
            f"device {device!r} would hold all {state.num_processes} processes; pass {kind}, and each takes its own"
        )
    return f"{kind}:{state.local_process_index}"


def put_on(model: PreTrainedModel, device: str) -> None:
    """Move a model, in place, to the device that `device_of` returns."""
    device = device_of(device)
    try:
        torch.zeros(1, device=device).item()  # fails on devices without memory, such as meta
        model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "" if device == "cpu" else "; --device cpu does without"
        raise CompressionError(f"device {device!r} cannot be used: {one_line(error)}{hint}") from error


def finish(
    source: Source,
    output: Path,
    saving: Saving,
    record: dict[str, Any],
    lines: Sequence[str],
    *,
    notes: Sequence[str] = (),
    new_tokens: bool = False,
    **conversion: Any,
) -> None:
    """Save the model with its companion files, its card and its record; print lines; upload it if `saving` says so.

    Only the main one of several processes does this. `record` is for `collab_compress.json` and `--json`; `notes` and
    `conversion` are for the card; `new_tokens` says that the tokenizer has changed, and is saved too.
    """
    state = process_state()
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    progress(f"saving to {output}")
    model, is_edited = source.model, bool(edited_words(source.model))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = to_json({**record, "versions": {"collab-compress": version("collab-compress"), **versions}})
    with ExitStack() as both:
        if saving.json is not None:  # written before the model, so that an error names this file
            both.enter_context(atomic_file(saving.json)).write_text(text, encoding="utf-8")
        partial = both.enter_context(atomic_directory(output))
        copy_companions(source.directory, partial, tokens=not new_tokens)
        if new_tokens:
            source.tokenizer.save_pretrained(partial)
        try:
            model.save_pretrained(partial)
        except ValueError as error:  # generation settings that Transformers reads, but refuses to write
            raise CheckpointError(f"{source.directory} cannot be saved again: {one_line(error)}") from error
        loaded_by = sentence_class(partial)
        card = model_card(model, output.name, source.name, notes=notes, loaded_by=loaded_by, **conversion)
        (partial / CARD).write_text(str(card), encoding="utf-8")
        (partial / RECORD).write_text(text, encoding="utf-8")
    saving.say(*lines, f"\nSaved to {output}.")
    if is_edited:
        saving.say(f"Wherever it is loaded: {install()}.")
    loading = loading_lines(model, output, loaded_by)
    saving.say("To use it:\n", *(f"    {line}" for line in loading))
    if saving.push_to_hub is not None:
        progress(f"uploading to {saving.push_to_hub}")
        saving.say(f"\nOn the hub: {push_to_hub(output, saving.push_to_hub)}")
