"""Models and outputs of the commands: what they load and check before the work, and what they save after it."""

import inspect
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from collab_compress import CheckpointError, CollabCompressError
from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import (
    MODULES,
    atomic_directory,
    atomic_file,
    companions_of,
    copy_companions,
    has_tokenizer,
    not_copied,
    push_to_hub,
    refuse_place,
    to_json,
)
from collab_compress.checkpoint.edits import is_edits
from collab_compress.checkpoint.pretrained import find_directory, title_of
from collab_compress.errors import CompressionError, install, one_line

from .arguments import AUTO, EditArguments, Saving
from .card import CARD, edited_words, loading_lines, model_card
from .distributed import process_state
from .progress import progress

_logger = logging.getLogger("collab_compress.cli")  # held with the warnings of the library
RECORD = "collab_compress.json"
SHOWN = 8  # names of files that are not copied
RUNS_AS = (None, "eager", "sdpa")  # attention implementations that a config may name


@dataclass(frozen=True)
class Source:
    """A loaded model.

    Args:
        name: short name for titles and output directories.
        directory: where its files are.
        model: in its own class and dtype, in evaluation mode.
        tokenizer: its tokenizer, or None if it has none.
    """

    name: str
    directory: Path
    model: PreTrainedModel
    tokenizer: Any


def begin(
    arguments: EditArguments, suffix: str, edited: bool = True, inputs: Sequence[Path] = ()
) -> tuple[Source, Path]:
    """Check the outputs of a command, then load its model.

    Args:
        arguments: of the command.
        suffix: of the default output, after the name of the model.
        edited: whether the model may be converted already.
        inputs: what is read beside the model, in which no output may lie.

    Returns:
        The model, and the output directory.

    Raises:
        CheckpointError: there is no such model, or no place for an output.
        CollabCompressError: an output lies in the other.
    """
    saving = arguments.saving
    output = arguments.output or Path(title_of(arguments.model) + suffix)
    directory = find_directory(arguments.model, saving.revision)
    check_outputs({"--output": output, "--json": saving.json}, directory, *inputs)
    companions_of(directory)
    source = load_source(arguments.model, edited, saving.revision)
    put_on(source.model, arguments.device)
    return source, output


def check_outputs(outputs: Mapping[str, Path | None], *inputs: Path | None) -> None:
    """Refuse outputs that exist, that cannot be written, or that lie in an input or in one another.

    Args:
        outputs: option → its path, if given.
        inputs: files and directories that the command reads.

    Raises:
        CheckpointError: the path exists, lies in an input, or cannot be written.
        CollabCompressError: two outputs are the same, or one lies in the other.
    """
    refuse_nested(outputs)
    for path in outputs.values():
        if path is not None:
            refuse_place(path, *(read for read in inputs if read is not None))


def refuse_nested(outputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs that are the same or lie in one another.

    Raises:
        CollabCompressError: two of them do.
    """
    places = {option: Path(os.path.realpath(path)) for option, path in outputs.items() if path is not None}
    for (inner, path), (outer, directory) in permutations(places.items(), 2):
        if path == directory:
            raise CollabCompressError(f"{inner} and {outer} are both {outputs[outer]}; choose two places")
        if path.is_relative_to(directory):
            raise CollabCompressError(f"{inner} {outputs[inner]} lies in {outer} {outputs[outer]}; choose two places")


def load_source(name: str, edited: bool = False, revision: str | None = None) -> Source:
    """Load MODEL: `minilm`, a local directory, or a name on the hub.

    Args:
        name: as typed by the user.
        edited: whether the model may be converted already.
        revision: of a model on the hub.

    Raises:
        CheckpointError: it cannot be found or read, or is incomplete.
    """
    progress(f"loading {name}")
    directory = find_directory(name, revision)
    model = load_model(directory, edited)
    return Source(title_of(name), directory, model, load_tokenizer(directory))


def load_model(directory: Path, edited: bool = False) -> PreTrainedModel:
    """Load a model in the checkpoint's own dtype, from safetensors only.

    Its class is the one that the config names; the base model if none of the weights of the head is stored. A pooler
    without weights is left out.

    Args:
        directory: where its files are.
        edited: whether it may be converted already.

    Raises:
        CheckpointError: config or weights are missing, damaged, incomplete, not finite, or already converted.
    """
    config = pretrained.load_config(directory)
    _refuse_quantized(directory, config, edited)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in RUNS_AS:
        raise CheckpointError(
            f"{directory / 'config.json'}: attn_implementation is {implementation!r}; expected eager or sdpa, so "
            "remove that entry"
        )
    model, loading = pretrained.load_model(_model_class(directory, config), directory, dtype="auto")
    if _lacks_head(model, loading["missing_keys"]):
        named, head = type(model), min(loading["missing_keys"])
        model, loading = pretrained.load_model(type(model.base_model), directory, dtype="auto")
        message = "%s: the config names %s, but no weights of its head are stored, such as %s; loaded as %s"
        _logger.warning(message, directory, named.__name__, head, type(model).__name__)
    if _lacks_pooler(model, loading["missing_keys"]):
        model, loading = pretrained.load_model(type(model), directory, dtype="auto", add_pooling_layer=False)
        _logger.warning("%s: no weights of the pooler are stored; %s has none", directory, type(model).__name__)
    missing, unexpected = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if missing:
        raise CheckpointError(
            f"{directory} lacks weights that {type(model).__name__} needs, such as {missing[0]}, which would be "
            "random; use a complete checkpoint"
        )
    if unexpected:
        message = "%s: ignored %d tensors that %s does not use, such as %s"
        _logger.warning(message, directory, len(unexpected), type(model).__name__, unexpected[0])
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{directory}: {name} holds NaN or infinite values; the checkpoint is damaged")
    model.eval()
    return model


def _lacks_head(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Return whether all weights that a checkpoint lacks are those of the head, and none of the head is stored."""
    head = {name for name in model.state_dict() if not name.startswith(f"{model.base_model_prefix}.")}
    stored = head - set(missing) - set(model.all_tied_weights_keys)
    return bool(missing) and model.base_model is not model and head.issuperset(missing) and not stored


def _lacks_pooler(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Return whether a checkpoint lacks a pooler alone, and the class can be built without one."""
    is_optional = "add_pooling_layer" in inspect.signature(type(model).__init__).parameters
    return bool(missing) and is_optional and all(name.startswith("pooler.") for name in missing)


def _refuse_quantized(directory: Path, config: Any, edited: bool) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    if is_edits(quantization) and edited:
        return
    if is_edits(quantization):
        raise CheckpointError(
            f"{directory} is already converted, or its heads mixed or pruned; start from the dense checkpoint"
        )
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    raise CheckpointError(f"{directory} is quantized ({method}); use the unquantized checkpoint instead")


def _model_class(directory: Path, config: Any) -> type[PreTrainedModel]:
    """Return the model class that a config names.

    Raises:
        CheckpointError: it is not a class of Transformers, or belongs to another kind of config.
    """
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{directory / 'config.json'}: architectures is {names!r}; expected names of classes")
    named = [getattr(transformers, name, None) for name in names]
    classes = [named_class for named_class in named if isinstance(named_class, type)]
    classes = [model_class for model_class in classes if issubclass(model_class, PreTrainedModel)]
    if names and not classes:
        raise CheckpointError(
            f"{directory} needs the class {names[0]}, which is no model of Transformers; code that comes with a "
            "model is not run"
        )
    model_class: type[PreTrainedModel] = classes[0] if classes else transformers.AutoModel
    expected = getattr(model_class, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise CheckpointError(
            f"{directory / 'config.json'} names {model_class.__name__}, which takes a {expected.__name__}, but "
            f"describes a {config.model_type}"
        )
    return model_class


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer, from its processor if there is one; None if the model has none."""
    if not has_tokenizer(directory):
        return None
    processor = pretrained.load_processor(directory)
    return getattr(processor, "tokenizer", processor)


def device_of(device: str) -> str:
    """Return the device of this process; each of several processes on one machine has its own.

    Args:
        device: as torch names it; "auto" for the accelerator, or the CPU if there is none.

    Raises:
        CompressionError: one device is named for several processes.
    """
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
    """Move a model, in place, to the device that `device_of` returns.

    Raises:
        CompressionError: there is no such device, it is full, or one is named for several processes.
    """
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

    Only the main one of several processes does this.

    Args:
        source: the edited model.
        output: where to save it.
        saving: options of the command.
        record: for `collab_compress.json` and `--json`.
        lines: to print.
        notes: paragraphs for the card.
        new_tokens: whether the tokenizer has changed, and is saved too.
        conversion: compression, calibration and report for `model_card`.

    Raises:
        CheckpointError: it cannot be written, or the hub does not take it.
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
        modules = (partial / MODULES).is_file()
        card = model_card(model, output.name, source.name, notes=notes, sentence_transformers=modules, **conversion)
        (partial / CARD).write_text(str(card), encoding="utf-8")
        (partial / RECORD).write_text(text, encoding="utf-8")
    saving.say(*lines, f"\nSaved to {output}.")
    is_embedded = pretrained.repository_of(record["model"]) == pretrained.EMBEDDED_REPOSITORY
    if left_out := [] if is_embedded else not_copied(source.directory):
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        saving.say(f"Not copied from {source.directory}: {', '.join(left_out[:SHOWN])}{more}.")
    if is_edited:
        saving.say(f"Wherever it is loaded: {install()}.")
    loading = loading_lines(model, output, sentence_transformers=(output / MODULES).is_file())
    saving.say("To use it:\n", *(f"    {line}" for line in loading))
    if saving.push_to_hub is not None:
        progress(f"uploading to {saving.push_to_hub}")
        try:
            address = push_to_hub(output, saving.push_to_hub)
        except CheckpointError as error:
            raise CheckpointError(f"saved to {output}, but {error}") from error
        saving.say(f"\nOn the hub: {address}")


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record beside a converted model; empty if there is none."""
    with suppress(OSError, ValueError):
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return {}
