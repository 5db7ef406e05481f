"""Predictions for each example.

A stage leaves `SPLIT.examples.npz` beside its record, with arrays of one row for each example:

| task | arrays |
|---|---|
| classification, regression | `predictions`, the class or the value, and `labels` |
| language modelling | `losses`, summed over the labels of a sequence, in nats, and `tokens`, their number |
| translation | those two, and `ngrams`: matches of 1 to 4 words, n-grams of 1 to 4, words, words of the reference |

The files of records in the repository have those of scored splits in `FILE.examples.npz`, under a key that the
record names.
"""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import TypeAlias

import numpy as np
from sacrebleu.metrics import BLEU

Arrays: TypeAlias = dict[str, np.ndarray]

ENDING = ".examples.npz"


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
