"""Model directories: written beside their final place and renamed when whole, and the files that travel along.

What belongs to a model besides config and weights is a list, `COMPANIONS`.
"""

import fnmatch
import glob
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from collab_compress.errors import CheckpointError, one_line

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "source.spm",
)  # fmt: skip
RUST_OS_ERROR = re.compile(r"\(os error \d+\)")  # how safetensors and tokenizers tell of a full disk
MODULES = "modules.json"  # of sentence-transformers
COMPANIONS = (
    # tokenizers
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "*.spm", "*.model", "bpe.codes", "dict.txt", "emoji.txt", "target_vocab.json",
    "normalizer.json", "word_shape.json", "word_pronunciation.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja",
    # processors
    "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json",
    # generation, sentence-transformers
    "generation_config.json", MODULES, "sentence_*_config.json", "config_sentence_transformers.json",
    # licences
    "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*",
)  # fmt: skip
IN_FOLDERS = ("*.json", "*.txt", "*.safetensors", "*.model", "*.spm", "*.jinja")
PICKLED = ("*.bin", "*.pt", "*.pth")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` if the block succeeds, and is removed if it does not.

    A process killed outright can leave its working directory `.<name>.partial-<host>-<pid>`, never `path`; the next
    write to the same path clears those whose process is gone.

    Args:
        path: where the result is wanted; must not exist.

    Raises:
        CheckpointError: `path` exists, or nothing can be written there.
    """
    refuse_existing(path)
    with _cannot_write(path), _made_parents(_final(path)) as final:
        _clear_abandoned(final)
        partial = _partial(final)
        partial.mkdir()
        try:
            yield partial
            refuse_existing(path)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there becomes `path` if the block succeeds, and is removed if it does not.

    Args:
        path: where the file is wanted; must not exist. Directories that are missing are made.

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
            with suppress(OSError):
                partial.unlink()


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
    """Give a value as the JSON that files hold; what JSON has no form for is its `str`."""
    return json.dumps(value, indent=2, default=str) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_atomically` writes text; what JSON has no form for is written as its `str`."""
    write_atomically(path, to_json(value))


def has_tokenizer(directory: Path) -> bool:
    """Say whether a model directory holds a tokenizer; Transformers may make up an empty one where it does not."""
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
    sentence-transformers; not weights, code, its model card, or what else a person keeps there.

    Raises:
        CheckpointError: `modules.json` cannot be read, names a folder outside the model or the model itself, or one
            whose weights are pickled.
    """
    found = [path.relative_to(directory) for path in _matching(directory, COMPANIONS)]
    for folder in sentence_transformers_folders(directory):
        paths = sorted(each for each in (directory / folder).rglob("*") if each.is_file())
        if any(_matches(path, PICKLED) for path in paths) and not any(
            _matches(path, ("*.safetensors",)) for path in paths
        ):
            raise CheckpointError(
                f"{directory / folder} has weights that are no safetensors; load and save the model by "
                "sentence-transformers first"
            )
        found += [path.relative_to(directory) for path in paths if _matches(path, IN_FOLDERS)]
    return list(dict.fromkeys(found))


def copy_companions(directory: Path, target: Path) -> None:
    """Copy what `companions_of` lists; links are followed.

    Args:
        directory: of the model.
        target: a directory.
    """
    for name in companions_of(directory):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)


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
    """Turn errors of the file system into ours, whichever language they are told in."""
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
    """Make the directories above a path; take them away again where nothing came to be."""
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
    return path.with_name(f".{path.name}.partial-{_host()}-{os.getpid()}")


def _host() -> str:
    return re.sub(r"\W", "", platform.node())[:32] or "host"


def _clear_abandoned(path: Path) -> None:
    """Remove what processes of this machine that are gone left of the same output."""
    start = f".{path.name}.partial-{_host()}-"
    for left in path.parent.glob(glob.escape(start) + "*"):
        pid = left.name[len(start) :]
        if pid.isdigit() and left.is_dir() and not left.is_symlink() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        return psutil.pid_exists(pid)  # os.kill(pid, 0) would end the process on Windows
    except OverflowError:  # no number that a process has, so not what we wrote
        return True


def _matching(directory: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    yield from sorted(path for path in found if path.is_file())


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
