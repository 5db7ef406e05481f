"""Model directories: atomic writing, files that are copied along with a model, uploads to the hub."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

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
RUST_OS_ERROR = re.compile(r"\(os error \d+\)")  # in errors of safetensors and tokenizers, such as a full disk
MODULES = "modules.json"  # of sentence-transformers
TEMPLATES = "additional_chat_templates"  # folder of Transformers
TOKENIZERS = """
    special_tokens_map.json added_tokens.json merges.txt bpe.codes dict.txt emoji.json normalizer.json byte_maps.json
    entity_vocab.json prophetnet.tokenizer sentencepiece.bpe.model sentencepiece.model spm.model spm_char.model
    tiktoken.model target.spm target_vocab.json vocab-src.json vocab-tgt.json word_shape.json word_pronunciation.json
    chat_template.json chat_template.jinja
"""
PROCESSORS = """
    preprocessor_config.json processor_config.json video_preprocessor_config.json audio_tokenizer_config.json
    speaker_embeddings_path.json
"""
SENTENCE_TRANSFORMERS = """
    config_sentence_transformers.json sentence_bert_config.json sentence_roberta_config.json
    sentence_distilbert_config.json sentence_camembert_config.json sentence_albert_config.json
    sentence_xlnet_config.json sentence_xlm-roberta_config.json router_config.json
"""
LICENCES = [f"{name}{end}" for name in ("LICENSE", "LICENCE", "COPYING", "NOTICE") for end in ("", ".txt", ".md")]
COMPANIONS = {
    *TOKENIZER_FILES,
    *TOKENIZERS.split(),
    *PROCESSORS.split(),
    *SENTENCE_TRANSFORMERS.split(),
    *LICENCES,
    MODULES,
    "generation_config.json",
}
"""Names of the files that are copied along with a model."""
OF_TOKENS = {*TOKENIZER_FILES, *TOKENIZERS.split(), "generation_config.json"}
"""Names of those that hold tokens or their ids."""
MODULE_FILES = {
    *("config.json", "model.safetensors.index.json", "idf.json"),
    *(f"{name}_config.json" for name in ("wordembedding", "whitespacetokenizer", "phrasetokenizer", "lstm", "cnn")),
}
"""Names of the files that are copied, besides `COMPANIONS` and weights, from the folder of a further module."""
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
REPLACED = re.compile(
    rf"{WEIGHTS.pattern}|model\.safetensors\.index\.json|config\.json|README\.md|collab_compress\.json|\..*"
)
"""Names of files that are written for the new model, and of hidden ones."""
PICKLED = (".bin", ".pt", ".pth")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` if the block succeeds, and removed if it fails.

    A process that is killed can leave `.<name>.partial-<random>`, never `path`.

    Args:
        path: must not exist. Missing directories are made.

    Raises:
        CheckpointError: `path` exists, or cannot be written.
    """
    refuse_existing(path)
    with _write_errors(path):
        final = _final(path)
        missing = [parent for parent in final.parents if not parent.exists()]
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(final)
        try:
            yield partial
            refuse_existing(path)
            partial.rename(final)
        finally:
            _remove(partial)
            for parent in () if final.exists() else missing:
                with suppress(OSError):
                    parent.rmdir()


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path`, as `atomic_file` does with a file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with atomic_directory(Path(folder) / "model") as partial:
        ...         model.save_pretrained(partial)
        ...     sorted(path.name for path in (Path(folder) / "model").iterdir())
        ['config.json', 'model.safetensors']
    """
    with atomic_file(path) as partial:
        partial.mkdir()
        yield partial


def write_new(path: Path, text: str) -> None:
    """Write text to a file that must not exist, by `atomic_file`."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a file, replacing an earlier one as a whole; use `write_new` for a file that must not exist.

    An earlier file keeps its permissions.

    Args:
        path: missing directories are made.
        content: what to write.

    Raises:
        CheckpointError: `path` is no regular file, or cannot be written.
    """
    with _write_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"cannot write {path}: it is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
        finally:
            _remove(partial)


def to_json(value: object) -> str:
    """Return a value as JSON for a file; values that JSON cannot hold become strings.

    Example:
        >>> print(to_json({"path": Path("model")}))
        {
          "path": "model"
        }
    """
    return json.dumps(value, indent=2, default=str) + "\n"


def mapped(leaf: Callable[[Any], Any], value: Any) -> Any:
    """Apply `leaf` to every value in nested mappings and lists; tuples become lists.

    Example:
        >>> mapped(str, {"widths": (1, 2)})
        {'widths': ['1', '2']}
    """
    if isinstance(value, Mapping):
        return {name: mapped(leaf, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(leaf, inner) for inner in value]
    return leaf(value)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, by `write_atomically`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "new" / "report.json", {"dk": 8})
        ...     print((Path(folder) / "new" / "report.json").read_text())
        {
          "dk": 8
        }
    """
    write_atomically(path, to_json(value))


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite anything: a file, a directory, a link, a device or a pipe.

    Raises:
        CheckpointError: `path` exists, or cannot exist.

    Example:
        >>> refuse_existing(Path("."))
        Traceback (most recent call last):
            ...
        collab_compress.errors.CheckpointError: . exists; choose another output or remove it
    """
    with _write_errors(path):
        if os.path.lexists(path) or os.path.lexists(_final(path)):  # `new/..` exists, though `new` does not
            raise CheckpointError(f"{path} exists; choose another output or remove it")


def refuse_place(path: Path, *inputs: Path) -> None:
    """Refuse an output that cannot be written or would change an input, before the work starts.

    Args:
        path: file or directory to be written.
        inputs: files and directories that are read.

    Raises:
        CheckpointError: `path` exists, lies inside an input, or cannot be written.
    """
    refuse_existing(path)
    with _write_errors(path):
        final = _final(path)
        for read in inputs:
            if final.is_relative_to(_final(read)):
                raise CheckpointError(f"{path} lies in {read}, which is read; choose an output elsewhere")
        parent = next(parent for parent in final.parents if os.path.lexists(parent))
        if not parent.is_dir():
            raise CheckpointError(f"cannot write {path}: {parent} is not a directory")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot write {path}: Permission denied")
        with suppress(FileNotFoundError):
            os.lstat(parent / _partial(final).name)  # raises if the name is too long


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise errors of the file system, including those of Rust libraries, as `CheckpointError`."""
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


def _final(path: Path) -> Path:
    """Resolve links and `..`; unlike `Path.resolve`, a circle of links raises no error."""
    return Path(os.path.realpath(path))


def _partial(path: Path) -> Path:
    """Return a unique temporary path beside `path`."""
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:12]}")


def _remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model directory holds a tokenizer; if not, Transformers may make up an empty one."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def companions_of(directory: Path) -> list[Path]:
    """List the files to copy along with a model, relative to its directory.

    These are its tokenizer, its processor, its generation settings, licences, and the further modules of
    sentence-transformers, by the names that these libraries give them; nothing else.

    Raises:
        CheckpointError: `modules.json` is invalid, or a further module has pickled weights.
    """
    paths = [path for path in directory.iterdir() if path.name in COMPANIONS]
    paths += (directory / TEMPLATES).glob("*.jinja")
    folders = sentence_transformers_folders(directory)
    for folder in folders:
        inside = list((directory / folder).rglob("*"))
        if any(path.suffix in PICKLED for path in inside) and not any(map(_holds_weights, inside)):
            raise CheckpointError(
                f"{directory / folder} has weights that are no safetensors; load and save the model by "
                "sentence-transformers first"
            )
        paths += [path for path in inside if path.name in COMPANIONS | MODULE_FILES or _holds_weights(path)]
    return sorted({path.relative_to(directory) for path in paths if path.is_file()})


def not_copied(directory: Path) -> list[str]:
    """List the files and folders of a model directory that are neither copied along nor written anew, by name."""
    copied = {path.parts[0] for path in companions_of(directory)} | {TEMPLATES}
    names = {path.name for path in directory.iterdir() if not REPLACED.fullmatch(path.name)}
    return sorted(names - copied - set(sentence_transformers_folders(directory)))


def _holds_weights(path: Path) -> bool:
    return WEIGHTS.fullmatch(path.name) is not None


def copy_companions(directory: Path, target: Path, tokens: bool = True) -> None:
    """Copy the files of `companions_of` without references to the model's own code, which is not copied.

    Args:
        directory: of the model.
        target: where to copy them.
        tokens: whether those are copied too that hold tokens of the model or their ids.
    """
    for name in companions_of(directory):
        if not tokens and str(name) in OF_TOKENS:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
        stored = (target / name).read_bytes()
        if name.suffix == ".json" and b'"auto_map"' in stored:  # other files keep their bytes
            with suppress(ValueError, RecursionError):  # no JSON
                settings = json.loads(stored)
                if isinstance(settings, dict):
                    settings.pop("auto_map", None)
                    (target / name).write_text(to_json(settings), encoding="utf-8")


def sentence_transformers_folders(directory: Path) -> list[str]:
    """List the folders of a sentence-transformers model's further modules; empty for other models.

    Raises:
        CheckpointError: `modules.json` cannot be read, or names a folder outside the model or the model itself.
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
        if not isinstance(folder, str):
            raise CheckpointError(f"{listing} names {folder!r}; expected the name of a folder")
        place = (directory / folder).resolve()
        if not place.is_relative_to(root) or (folder and place == root):
            raise CheckpointError(f"{listing} names {folder!r}, which is no folder inside the model")
    return [folder for folder in dict.fromkeys(folders) if folder and (directory / folder).is_dir()]


def push_to_hub(directory: str | Path, name: str) -> str:
    """Upload the directory of a saved model to the hub, with its card, in one commit.

    Args:
        directory: of the model.
        name: of the model on the hub, `org/name`, or `name` in the user's own account.

    Returns:
        The model's address.

    Raises:
        CheckpointError: the hub refuses it.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(
            folder_path=directory, repo_id=repository, commit_message="Upload a model made with collab-compress"
        )
    except Exception as error:  # errors of the hub, of the connection, and of files
        raise CheckpointError(f"the hub does not take {name}: {one_line(error)}") from error
    return f"{api.endpoint}/{repository}"
