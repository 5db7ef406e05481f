"""Turn what a person types for MODEL into a loaded model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import has_tokenizer
from collab_compress.checkpoint.edits import METHOD
from collab_compress.checkpoint.pretrained import find_directory, repository_of, title_of
from collab_compress.distributed import process_state
from collab_compress.errors import CheckpointError, CompressionError, one_line

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
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{directory}: {name} holds NaN or infinite values; the checkpoint is damaged")
    model.eval()
    return model


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer, or what holds one; None where the model has none."""
    if not has_tokenizer(directory):
        return None
    processor = pretrained.load_processor(directory)
    return getattr(processor, "tokenizer", processor)


def device_of(asked: str | None) -> str | None:
    """Say where this process works: of several on one machine, each has a device of its own.

    Args:
        asked: as torch names it; None for where a model is loaded.

    Raises:
        CompressionError: one device is named for several processes.
    """
    together = process_state()
    if asked is None or together.num_processes == 1 or asked == "cpu":
        return asked
    kind, _, number = asked.partition(":")
    if number:
        raise CompressionError(
            f"device {asked!r} would hold all {together.num_processes} processes; pass {kind}, and each takes its own"
        )
    return f"{kind}:{together.local_process_index}"


def put_on(model: PreTrainedModel, device: str | None) -> None:
    """Move a model, in place.

    Raises:
        CompressionError: there is no such device, or it is full.
    """
    if device is not None:
        try:
            torch.zeros(1, device=device).item()  # a device that is there, and holds values
            model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise CompressionError(f"device {device!r} cannot be used: {one_line(error)}") from error


def _refuse_quantized(directory: Path, config: Any, edited: bool) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method == METHOD and edited:
        return
    if method == METHOD:
        raise CheckpointError(f"{directory} is already converted; start from the dense checkpoint")
    raise CheckpointError(f"{directory} is quantized ({method}); take the unquantized checkpoint instead")


def _model_class(directory: Path, config: Any) -> type[PreTrainedModel]:
    """Find the class that a config names, which must be one for such configs.

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
