"""What belongs to a model besides config and weights, and travels along where it is converted: a list of it."""

import fnmatch
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from collab_compress.checkpoint.load import one_line
from collab_compress.errors import CheckpointError

MODULES = "modules.json"  # of sentence-transformers
COMPANIONS = (
    # tokenizers
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "*.spm", "*.model", "bpe.codes", "dict.txt", "emoji.txt", "target_vocab.json",
    "chat_template.jinja", "chat_template.json",
    # processors
    "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
    # generation, sentence-transformers
    "generation_config.json", MODULES, "sentence_*_config.json", "config_sentence_transformers.json",
    # licences
    "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*",
)  # fmt: skip
IN_FOLDERS = ("*.json", "*.txt", "*.safetensors", "*.model", "*.spm", "*.jinja")
PICKLED = ("*.bin", "*.pt", "*.pth")


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


def _matching(directory: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and _matches(path, patterns):
            yield path


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
