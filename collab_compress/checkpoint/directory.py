"""Model directories: written beside their final place and renamed when whole, files that travel along, uploads."""

import fnmatch
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from collab_compress.errors import CheckpointError, one_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "source.spm",
    "tekken.json",
)
RUST_OS_ERROR = re.compile(r"\(os error \d+\)")  # in errors of safetensors and tokenizers, as of a full disk
MODULES = "modules.json"  # of sentence-transformers
COMPANIONS = (  # tokenizers, processors, settings, licences; no weights, code or data
    "*.json",
    "*.jinja",
    "*.model",
    "*.spm",
    "*.codes",
    "*.tiktoken",
    "vocab*.txt",
    "merges*.txt",
    "dict.txt",
    "emoji.txt",
    "LICENSE*",
    "LICENCE*",
    "COPYING*",
    "NOTICE*",
)
LEFT_BEHIND = (  # written anew, or of other weights or a training run
    "config.json",
    "*.index.json",
    "adapter_*.json",
    "trainer_state.json",
    "*_results.json",
)
PICKLED = (".bin", ".pt", ".pth")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there becomes `path` if the block succeeds, and is removed if it does not.

    A process that is killed can leave `.<name>.partial-<random>`, never `path`.

    Args:
        path: where the result is wanted; must not exist. Directories that are missing are made.

    Raises:
        CheckpointError: `path` exists, or nothing can be written there.
    """
    refuse_existing(path)
    with _cannot_write(path), _made_parents(_final(path)) as final:
        partial = _partial(final)
        try:
            yield partial
            refuse_existing(path)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # of a directory
            with suppress(OSError):
                partial.unlink()


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path`, as `atomic_file` does with a file."""
    with atomic_file(path) as partial:
        partial.mkdir()
        yield partial


def write_new(path: Path, text: str) -> None:
    """Write text to a file that must not be there yet; all of it or nothing.

    Raises:
        CheckpointError: something is there, or nothing can be written there.
    """
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write text beside `path` and rename it when it is whole; a file that is there is replaced.

    This is for files that were written here before. Where a person says where to write, `write_new` is used.

    Args:
        path: where the file is wanted; directories that are missing are made.
        text: what to write.

    Raises:
        CheckpointError: what is there is no regular file, or nothing can be written there.
    """
    with _cannot_write(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"cannot write {path}: it is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()


def to_json(value: Any) -> str:
    """Return a value as the JSON that files hold; `str` of it where JSON has no form for it."""
    return json.dumps(value, indent=2, default=str) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as `to_json` returns it, by `write_atomically`."""
    write_atomically(path, to_json(value))


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model directory holds a tokenizer; Transformers may make up an empty one where it does not."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite: whatever is at `path`, a link, a device or a pipe too, stays as it is.

    Raises:
        CheckpointError: something is at `path`, or nothing can be.
    """
    with _cannot_write(path):
        if os.path.lexists(path) or os.path.lexists(_final(path)):  # `new/..` is there, though `new` is not
            raise CheckpointError(f"{path} exists; choose another output or remove it")


def refuse_place(path: Path, *inputs: Path) -> None:
    """Refuse, before the work that leads to it, an output that could not be written or would change an input.

    Args:
        path: of a file or a directory to be written.
        inputs: files and directories that are read.

    Raises:
        CheckpointError: something is at `path`, it lies inside an input, or nothing can be written there.
    """
    refuse_existing(path)
    with _cannot_write(path):
        final = _final(path)
        for read in inputs:
            if final.is_relative_to(_final(read)):
                raise CheckpointError(f"{path} lies in {read}, which is read; choose an output elsewhere")
        parent = next(each for each in final.parents if each.exists())
        if not parent.is_dir():
            raise CheckpointError(f"cannot write {path}: {parent} is not a directory")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot write {path}: Permission denied")
        with suppress(FileNotFoundError):
            os.lstat(parent / _partial(final).name)  # is the name short enough?


def companions_of(directory: Path) -> list[Path]:
    """List the files that travel along with a model, relative to its directory.

    These are its tokenizer, its processor, its generation settings, licences, and the further modules of
    sentence-transformers; not weights, code, its model card, or data.

    Raises:
        CheckpointError: a file cannot be read, `modules.json` cannot be read or names a folder outside the model or
            the model itself, or the weights of such a folder are pickled.
    """
    paths = [path for path in directory.iterdir() if _matches(path, COMPANIONS) and not _matches(path, LEFT_BEHIND)]
    paths += (directory / "additional_chat_templates").glob("*.jinja")
    folders = sentence_transformers_folders(directory)
    for folder in folders:
        inside = list((directory / folder).rglob("*"))
        weights = [path for path in inside if path.suffix == ".safetensors"]
        if not weights and any(path.suffix in PICKLED for path in inside):
            raise CheckpointError(
                f"{directory / folder} has weights that are no safetensors; load and save the model by "
                "sentence-transformers first"
            )
        paths += weights + [path for path in inside if _matches(path, COMPANIONS)]
    companions = sorted({path for path in paths if path.is_file()})
    for path in (*companions, *(directory / folder for folder in folders)):
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"cannot read {path}: Permission denied")
    return [path.relative_to(directory) for path in companions]


def copy_companions(directory: Path, target: Path) -> None:
    """Copy what `companions_of` lists; links are followed.

    References to code of the model's own (`auto_map`) are left out, as that code is.

    Args:
        directory: of the model.
        target: a directory.
    """
    for name in companions_of(directory):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
        if name.suffix == ".json":
            _drop_auto_map(target / name)


def sentence_transformers_folders(directory: Path) -> list[str]:
    """List the folders of a sentence-transformers model's further modules; empty for other models.

    Raises:
        CheckpointError: `modules.json` cannot be read, names the model itself or a folder outside it.
    """
    listing = directory / MODULES
    if not listing.is_file():
        return []
    try:
        folders = [module["path"] for module in json.loads(listing.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {listing}: {type(error).__name__}: {one_line(error)}") from error
    root = directory.resolve()
    for folder in folders:
        if not isinstance(folder, str) or "\0" in folder:
            raise CheckpointError(f"{listing} names {folder!r}; expected the name of a folder")
        place = (directory / folder).resolve()
        if not place.is_relative_to(root) or (folder and place == root):
            raise CheckpointError(f"{listing} names {folder!r}, which is no folder inside the model")
    return [folder for folder in dict.fromkeys(folders) if folder and (directory / folder).is_dir()]


@contextmanager
def _cannot_write(path: Path) -> Iterator[None]:
    """Raise errors of the file system, those of Rust libraries too, as `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif RUST_OS_ERROR.search(str(error)) or "null byte" in str(error):
            reason = str(error)
        else:
            raise
        raise CheckpointError(f"cannot write {path}: {reason}") from error


@contextmanager
def _made_parents(path: Path) -> Iterator[Path]:
    """Make the directories above a path; remove them again if nothing was written to it."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        if not path.exists():
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()


def _final(path: Path) -> Path:
    """Follow links and `..`; unlike `Path.resolve`, a circle of links is no error here."""
    return Path(os.path.realpath(path))


def _partial(path: Path) -> Path:
    """Return a path beside `path` that no other process has, whatever earlier ones left."""
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:12]}")


def _drop_auto_map(path: Path) -> None:
    """Rewrite a JSON file without its `auto_map`, in place; a file that has none keeps its bytes."""
    stored = path.read_bytes()
    with suppress(ValueError, RecursionError):  # what is no JSON stays as it is
        if b'"auto_map"' in stored and isinstance(settings := json.loads(stored), dict):
            settings.pop("auto_map", None)
            path.write_text(to_json(settings), encoding="utf-8")


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)


def check_upload(name: str) -> None:
    """Refuse, before the work that leads to it, an upload that could not be done.

    Args:
        name: of the model on the hub, `org/name`, or `name` among one's own.

    Raises:
        CheckpointError: no such name can be, the hub is switched off, or nobody is logged in.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} cannot be a name on the hub: {one_line(error)}") from error
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{name} cannot be put on the hub: HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise CheckpointError(
            f"{name} cannot be put on the hub: nobody is logged in; run hf auth login, or set HF_TOKEN"
        )


def push_to_hub(directory: str | Path, name: str, *, private: bool | None = None, message: str | None = None) -> str:
    """Upload the folder of a saved model to the hub, with its card, in one commit.

    Args:
        directory: of the model, as `collab-compress` or `save_pretrained` wrote it.
        name: of the model on the hub, `org/name`, or `name` among one's own; made if it is not there.
        private: whether to make it for one's own eyes; what the account or organization does if not given.
        message: of the commit.

    Returns:
        Where it can be looked at.

    Raises:
        CheckpointError: there is no model in the directory, or the hub does not take it.
    """
    if not (Path(directory) / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is no model directory")
    check_upload(name)
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(
            folder_path=directory,
            repo_id=repository,
            commit_message=message or "Upload a model made with collab-compress",
        )
    except Exception as error:  # the hub's own errors, those of its transport, and of the files
        raise CheckpointError(f"the hub does not take {name}: {one_line(error)}") from error
    return f"{api.endpoint}/{repository}"
