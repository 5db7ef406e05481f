"""MODEL in, DIR out: options of the commands that read or write models, what they do before the work and after it."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from collab_compress import CheckpointError, CollabCompressError, Compression, Report, make_standalone_
from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import (
    atomic_directory,
    atomic_file,
    check_upload,
    companions_of,
    copy_companions,
    has_tokenizer,
    push_to_hub,
    to_json,
)
from collab_compress.checkpoint.edits import METHOD
from collab_compress.checkpoint.pretrained import find_directory, repository_of, title_of
from collab_compress.conversion.card import CARD, Origin, edited_words, loading_lines, model_card
from collab_compress.distributed import process_state
from collab_compress.errors import CompressionError, one_line

from .arguments import AUTO, Saving
from .outputs import check_outputs

_logger = logging.getLogger(__name__)
RECORD = "collab_compress.json"
RUNS_AS = (None, "eager", "sdpa")  # attention that can be read from a config


@dataclass(frozen=True)
class Source:
    """A model as it was found.

    Args:
        name: short name for titles and output directories.
        directory: where its files are.
        model: in its own class and dtype, in evaluation mode.
        tokenizer: its tokenizer, or None where it has none.
        repository: its name on the hub, where that is where it is from.
    """

    name: str
    directory: Path
    model: PreTrainedModel
    tokenizer: Any
    repository: str | None = None


@dataclass(frozen=True)
class Made:
    """Description of an edited model, for its record and its card.

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


def output_of(given: Path | None, model: str, suffix: str) -> Path:
    """Return the requested output, or one in the current directory named after MODEL."""
    return given or Path(title_of(model) + suffix)


def begin(
    model: str, output: Path, saving: Saving, device: str = "cpu", edited: bool = False, inputs: Sequence[Path] = ()
) -> Source:
    """Check the outputs, then load MODEL.

    Args:
        model: what was typed.
        output: the directory that the command writes.
        saving: its further outputs.
        device: where to put the model, as torch names it, or "auto".
        edited: whether the model may be converted already.
        inputs: what is read beside MODEL, in which no output may lie.

    Raises:
        CheckpointError: there is no such model, or no place for an output.
        CollabCompressError: the report has no place.
    """
    directory = find_directory(model, saving.revision)
    check_json(saving.json)
    check_outputs({"--output": output, "--json": saving.json}, directory, *inputs)
    if saving.push_to_hub is not None:
        check_upload(saving.push_to_hub)
    companions_of(directory)
    source = load_source(model, edited, saving.revision)
    put_on(source.model, device)
    return source


def check_json(path: Path | None) -> None:
    """Refuse a report whose directory does not exist.

    Raises:
        CollabCompressError: it has none.
    """
    final = "" if path is None else os.path.realpath(path)
    if path is not None and (os.path.isdir(final) or not os.path.isdir(os.path.dirname(final))):
        raise CollabCompressError(f"--json {path}: expected a file in a directory that exists")


def load_source(name: str, edited: bool = False, revision: str | None = None) -> Source:
    """Load MODEL: `minilm`, a local directory, or a name on the hub.

    Args:
        name: what was typed.
        edited: whether a model may be converted already.
        revision: of a model on the hub.

    Raises:
        CheckpointError: it cannot be found, read, or trusted to be whole.
    """
    directory = find_directory(name, revision)
    model = load_model(directory, edited)
    return Source(title_of(name), directory, model, load_tokenizer(directory), repository_of(name))


def load_model(directory: Path, edited: bool = False) -> PreTrainedModel:
    """Load the class that the config names, in the checkpoint's own dtype, from safetensors only.

    Args:
        directory: where its files are.
        edited: whether it may be converted already.

    Raises:
        CheckpointError: config or weights are missing, damaged, incomplete, not finite, or already converted.
    """
    config = pretrained.load_config(directory)
    _refuse_quantized(directory, config, edited)
    runs_as = getattr(config, "_attn_implementation", None)
    if runs_as not in RUNS_AS:
        raise CheckpointError(
            f"{directory / 'config.json'}: attn_implementation is {runs_as!r}; collaborative attention runs as eager "
            "or sdpa, so take that entry out"
        )
    model_class = _model_class(directory, config)
    model, found = pretrained.load_model(model_class, directory, dtype="auto")
    if found["missing_keys"]:
        raise CheckpointError(
            f"{directory} lacks weights that {model_class.__name__} needs, such as "
            f"{min(found['missing_keys'])}; converting random weights would be meaningless"
        )
    if found["unexpected_keys"]:
        _logger.warning(
            "%s: left out what %s does not use, %r first (tensors: %d)",
            directory, model_class.__name__, min(found["unexpected_keys"]), len(found["unexpected_keys"]),
        )  # fmt: skip
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{directory}: {name} holds NaN or infinite values; the checkpoint is damaged")
    model.eval()
    return model


def _refuse_quantized(directory: Path, config: Any, edited: bool) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method == METHOD and edited:
        return
    if method == METHOD:
        raise CheckpointError(
            f"{directory} is already converted, or its heads mixed or pruned; start from the dense checkpoint"
        )
    raise CheckpointError(f"{directory} is quantized ({method}); take the unquantized checkpoint instead")


def _model_class(directory: Path, config: Any) -> type[PreTrainedModel]:
    """Return the model class that a config names, which must fit the config.

    Raises:
        CheckpointError: it names none of Transformers, or one for another kind of model.
    """
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{directory / 'config.json'}: architectures is {names!r}; expected names of classes")
    named = [getattr(transformers, name, None) for name in names]
    found = [each for each in named if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    if names and not found:
        raise CheckpointError(
            f"{directory} wants the class {names[0]}, which is no model of Transformers; code that a model brings "
            "along is not run"
        )
    model_class: type[PreTrainedModel] = found[0] if found else transformers.AutoModel
    expected = getattr(model_class, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise CheckpointError(
            f"{directory / 'config.json'} names {model_class.__name__}, which takes a {expected.__name__}, but "
            f"describes a {config.model_type}"
        )
    return model_class


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer, or what holds one; None where the model has none."""
    if not has_tokenizer(directory):
        return None
    processor = pretrained.load_processor(directory)
    return getattr(processor, "tokenizer", processor)


def device_of(asked: str) -> str:
    """Return the device of this process; each of several processes on one machine has its own.

    Args:
        asked: as torch names it; auto for the accelerator, or the CPU where there is none.

    Raises:
        CompressionError: one device is named for several processes.
    """
    if asked == AUTO:
        found = torch.accelerator.current_accelerator(check_available=True)
        asked = "cpu" if found is None else found.type
    together = process_state()
    if together.num_processes == 1 or asked == "cpu":
        return asked
    kind, _, number = asked.partition(":")
    if number:
        raise CompressionError(
            f"device {asked!r} would hold all {together.num_processes} processes; pass {kind}, and each takes its own"
        )
    return f"{kind}:{together.local_process_index}"


def put_on(model: PreTrainedModel, asked: str) -> None:
    """Move a model, in place, to what `device_of` says.

    Raises:
        CompressionError: there is no such device, it is full, or one is named for several processes.
    """
    device = device_of(asked)
    try:
        torch.zeros(1, device=device).item()  # a device that is there, and holds values
        model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "" if device == "cpu" else "; --device cpu does without"
        raise CompressionError(f"device {device!r} cannot be used: {one_line(error)}{hint}") from error


@contextmanager
def bar(description: str, unit: str, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on the main process; it takes what is done, how much there is, and a name for it."""
    hidden = True if quiet or not process_state().is_main_process else None  # None: where there is no terminal
    with tqdm(desc=description, unit=unit, disable=hidden, leave=False) as shown:

        def progress(done: int, total: int, name: str = "") -> None:
            shown.total, shown.n = total, done
            shown.set_description_str(name or description)

        yield progress


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
    saving.say(*lines, f"\nSaved to {output}.")
    if edited_words(source.model) and not made.standalone:
        saving.say("Wherever it is loaded: pip install collab-compress (or convert with --standalone).")
    saving.say("To use it:\n", *(f"    {line}" for line in loading_lines(source.model, output)))
    if saving.push_to_hub is not None:
        try:
            address = push_to_hub(output, saving.push_to_hub)
        except CheckpointError as error:
            raise CheckpointError(f"saved to {output}, but {error}") from error
        saving.say(f"\nOn the hub: {address}")


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


def read_record(directory: Path) -> dict[str, Any]:
    """Read what stands beside a converted model; empty where nothing does."""
    with suppress(OSError, ValueError):
        found = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
