"""Predictions for each example, for bootstrap intervals.

A stage leaves `SPLIT.examples.npz` beside its record, with arrays of one row for each example:

| task | arrays |
|---|---|
| classification, regression | `predictions`, the class or the value, and `labels` |
| language modelling | `losses`, summed over the labels of a sequence, in nats, and `tokens`, their number |
| translation | those two, and `ngrams`: matches of 1 to 4 words, n-grams of 1 to 4, words, words of the reference |

`FILE.jsonl` of many records has those of scored splits in `FILE.examples.npz`, under a key that the record names.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from sacrebleu.metrics import BLEU

from collab_compress.errors import RecipeError

Arrays: TypeAlias = dict[str, np.ndarray]
Examples: TypeAlias = dict[str, Arrays]
"""Split → array's name → array."""

ENDING = ".examples.npz"

FOREIGN = "cannot read the outcomes in {}: it is no .npz file as --records writes it"


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a compressed `.npz` file."""
    file = BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def ngram_counts(translations: Iterable[str], references: Iterable[str], tokenize: str) -> np.ndarray:
    """Return what BLEU sums over sentences, (sentences, 10): the columns of `ngrams`."""
    bleu = BLEU(tokenize=tokenize)
    rows = []
    for line, reference in zip(translations, references, strict=True):
        score = bleu.corpus_score([line], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.array(rows, np.uint16).reshape(-1, 10)


def scored_splits(splits: Iterable[str]) -> list[str]:
    """Return the splits that count for a score: the tests, or all where there is none."""
    names = list(splits)
    return [name for name in names if name.startswith("test")] or names


def read_examples(path: Path, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Examples]:
    """Return the outcomes beside records: place of the record → examples of its scored splits, where there are any.

    Args:
        path: the folder, or the file, that the records are from.
        records: place → record, by `read_records`.

    Raises:
        RecipeError: a file of outcomes cannot be read.
    """
    if path.is_dir():
        outcomes = {}
        for place, record in records.items():
            files = {
                split: Path(place).parent / f"{split}{ENDING}" for split in scored_splits(record.get("metrics") or ())
            }
            if files and all(file.is_file() for file in files.values()):
                outcomes[place] = {split: _load(file) for split, file in files.items()}
        return outcomes
    file = path.with_suffix(ENDING)
    if not file.is_file():
        return {}
    by_key: dict[str, Examples] = {}
    for name, array in _load(file).items():
        if name.count("/") != 2:
            raise RecipeError(FOREIGN.format(file))
        key, split, kind = name.split("/")
        by_key.setdefault(key, {}).setdefault(split, {})[kind] = array
    keys = {place: str(record.get("examples")) for place, record in records.items()}
    return {place: by_key[key] for place, key in keys.items() if key in by_key}


def gather_examples(all_examples: Sequence[Examples | None]) -> tuple[list[str | None], Arrays]:
    """Return the key of each record's examples, None without any, and the arrays of the file for all records."""
    keys: list[str | None] = []
    gathered: Arrays = {}
    for examples in all_examples:
        splits = (examples or {}).items()
        arrays = {f"{split}/{name}": array for split, outcomes in splits for name, array in outcomes.items()}
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode() + arrays[name].tobytes())
        keys.append(digest.hexdigest()[:16] if arrays else None)
        gathered |= {f"{keys[-1]}/{name}": array for name, array in arrays.items()}
    return keys, gathered


def _load(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except OSError as error:
        raise RecipeError(f"cannot read the outcomes in {path}: {error}") from error
    except (ValueError, EOFError, KeyError, BadZipFile) as error:  # whose texts are about pickles
        raise RecipeError(FOREIGN.format(path)) from error
