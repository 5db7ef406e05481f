"""Load configs, models and tokenizers that others made: no code of theirs is run, and nothing is unpickled.

Transformers asks on standard input whether a model's code may run where nobody says so beforehand, and reads
whatever file a weight index names. Everything in this project is loaded by these functions, which say no to both.
"""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from collab_compress.errors import CheckpointError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTIONS = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
LONGEST = 400  # characters of a message


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


def one_line(error: BaseException) -> str:
    """Give what an error says in one line, shortened where it is very long."""
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


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
