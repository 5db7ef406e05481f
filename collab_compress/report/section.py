"""The data of a report: sections with tables and pictures, from which the page and the files are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, isfinite, log10
from typing import Any, TypeAlias

Label: TypeAlias = Callable[[str], str]
"""Function of a module's path to its short name."""

Progress: TypeAlias = Callable[[str], Callable[[int, int | None], None]]
"""Function of the name of some work to the `progress` argument of a measure."""


@dataclass(frozen=True)
class Table:
    """A table. All rows have the same keys, which are its headings, as "layer" or "dense [ms]"."""

    title: str
    rows: Sequence[Mapping[str, Any]]  # numbers that are None or not finite are shown as –


@dataclass(frozen=True)
class Heatmaps:
    """A picture of matrices on one scale: from 0 to `high`, or from -`high` in two hues that meet at 0."""

    title: str
    reading: str  # how to read it, in one line, with its source
    maps: Mapping[str, Sequence[Sequence[float]]]  # title → rows; numbers that are not finite are left blank
    high: float = 1.0
    diverging: bool = False
    row_label: str = "head"
    column_label: str = "head"
    row_names: Sequence[str] = ()  # numbers if not given


@dataclass(frozen=True)
class Curves:
    """A picture of curves in one coordinate system, whose y axis begins at 0 or below."""

    title: str
    reading: str  # as for `Heatmaps`
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]  # name and points (x, y), x ascending
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Section:
    """The results of one group of measures."""

    title: str
    reading: str  # what is measured, on how much data, what it does not show, and its source
    tables: Mapping[str, Table] = field(default_factory=dict)
    pictures: Sequence[Heatmaps | Curves] = ()
    highlights: Sequence[str] = ()  # the most important numbers, a sentence each


def short(cell: str | float | None) -> str:
    """Return a cell of a table as text; a float has three significant digits, or more if it is 1000 or above."""
    if isinstance(cell, str):
        return cell
    if cell is None or not isfinite(cell):
        return "–"
    if cell == 0 or isinstance(cell, int):
        return f"{cell:,.0f}".replace("-", "−")
    digits = floor(log10(abs(float(f"{cell:.2e}"))))  # of the rounded number: 0.9999 is 1.00
    if digits >= 15 or digits < -4:
        return f"{cell:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return f"{cell:,.{max(0, 2 - digits)}f}".replace("-", "−")
