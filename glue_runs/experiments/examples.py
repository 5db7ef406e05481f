"""Predictions for each example.

A stage leaves `SPLIT.examples.npz` next to its record, with arrays of one row for each example:

| task | arrays |
|---|---|
| classification, regression | `predictions`, the class or the value, and `labels` |
| language modelling, translation | `losses`, summed over a sequence, in nats, and `tokens`, their number |

Translations are in `SPLIT.txt`. The files of records in the repository have those of scored splits in
`FILE.examples.npz`, under a key that the record names.
"""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

Arrays: TypeAlias = dict[str, np.ndarray]

ENDING = ".examples.npz"


def scored_splits(splits: Iterable[str]) -> list[str]:
    """Return the splits that count for a score: the tests, or all where there is none."""
    names = list(splits)
    return [name for name in names if name.startswith("test")] or names
