"""The data of a report: sections with tables and pictures, from which the page and the files are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Literal, TypeAlias

from torch import Tensor

Cell: TypeAlias = str | int | float | None
Numbers: TypeAlias = "Tensor | Sequence[float | int | None]"
Scale: TypeAlias = Literal["sequential", "diverging"]
Weight: TypeAlias = Literal["line", "faint", "bold", "dashed"]
NONE = "–"


def written(cell: Cell) -> str:
    """Return a cell of a table as text."""
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:,}".replace("-", "−") if isinstance(cell, int) else short(cell)


def short(value: float | None) -> str:
    """Return a number as text with three significant digits, or more if it is 1000 or above."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    digits = floor(log10(abs(value)))
    if digits >= 15 or digits < -4:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return f"{value:,.{max(0, 2 - digits)}f}".replace("-", "−")


def finite(values: Numbers) -> tuple[float | None, ...]:
    """Return a vector (n,) or a list as numbers, None for those that are not finite."""
    listed: Iterable[float | int | None] = values.tolist() if isinstance(values, Tensor) else values
    return tuple(None if value is None or not isfinite(value) else float(value) for value in listed)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the unit of its numbers, as `ms` or `%`."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        name: short name, for files.
        title: one line.
        columns: headings.
        rows: a cell for each column; numbers that are not finite become None, which is shown as –.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(
            tuple(None if isinstance(cell, float) and not isfinite(cell) else cell for cell in row)
            for row in self.rows
        )
        if any(len(row) != len(self.columns) for row in rows):
            raise ValueError(f"table {self.name}: expected {len(self.columns)} cells in every row")
        object.__setattr__(self, "rows", rows)

    @classmethod
    def of(cls, name: str, title: str, records: Sequence[Mapping[str, Cell]]) -> Table:
        """Return a table of records with the same keys, which are headings, as "layer" or "dense [ms]"."""
        headings = (key.removesuffix("]").partition(" [") for key in records[0])
        columns = tuple(Column(heading, unit) for heading, _, unit in headings)
        return cls(name, title, columns, tuple(tuple(record.values()) for record in records))


@dataclass(frozen=True)
class Heatmap:
    """One matrix of a picture.

    Args:
        title: one or two words.
        values: (rows, columns); None is left blank.
        rows: names of the rows; empty for none.
        columns: names of the columns; empty for none.
    """

    title: str
    values: tuple[tuple[float | None, ...], ...]
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Heatmaps:
    """A picture of matrices on one scale.

    Args:
        title: what it shows.
        reading: how to read it, in one line.
        source: the paper's short name and figure, or another origin.
        maps: the matrices.
        low: value of the palest cell, or of the lowest on a diverging scale.
        high: value of the strongest cell.
        scale: one hue, or two that meet at 0.
        row_label: what rows are.
        column_label: what columns are.
        unit: of the values.
    """

    title: str
    reading: str
    source: str
    maps: Sequence[Heatmap]
    low: float = 0.0
    high: float = 1.0
    scale: Scale = "sequential"
    row_label: str = "head"
    column_label: str = "head"
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """One curve.

    Args:
        name: for the legend; curves of the same name share a colour. A curve without a name has no entry.
        x: ascending.
        y: of the same length; numbers that are not finite become None and interrupt the curve.
        weight: style of the line.
    """

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    weight: Weight = "line"

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", finite(self.x))
        object.__setattr__(self, "y", finite(self.y))
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.name}: {len(self.x)} and {len(self.y)} numbers; expected as many of both")


@dataclass(frozen=True)
class Panel:
    """Curves in one coordinate system, drawn in this order; the title is one or two words."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Curves:
    """A picture of curves, in panels side by side on the same scale of y.

    Args:
        title: what it shows.
        reading: how to read it, in one line.
        source: as for `Heatmaps`.
        panels: coordinate systems.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        bottom: least y of the axis, or None to fit.
        top: greatest y of the axis, or None to fit.
        log: whether both axes are logarithmic.
    """

    title: str
    reading: str
    source: str
    panels: Sequence[Panel]
    x_label: str
    y_label: str
    bottom: float | None = None
    top: float | None = None
    log: bool = False


Picture: TypeAlias = Heatmaps | Curves


@dataclass(frozen=True)
class Section:
    """The results of one group of measures.

    Args:
        name: short name, for options and files.
        title: heading.
        reading: what is measured, on how much data, and what it does not show.
        source: the papers' short names and sections.
        tables: tables.
        pictures: pictures.
        highlights: the most important numbers, a sentence each.
        actions: what to do about the results, a sentence each.
    """

    name: str
    title: str
    reading: str
    source: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    highlights: Sequence[str] = ()
    actions: Sequence[str] = ()


def heatmap(
    title: str,
    vectors: Tensor | Sequence[Tensor],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Heatmap:
    """Return a heatmap with a row for each vector; a shorter one ends in blanks. None numbers rows or columns."""
    longest = max(map(len, vectors))
    values = tuple(finite(vector) + (None,) * (longest - len(vector)) for vector in vectors)
    rows = list(map(str, range(len(values)))) if rows is None else rows
    columns = list(map(str, range(longest))) if columns is None else columns
    return Heatmap(title, values, tuple(rows), tuple(columns))


def curve(name: str, y: Numbers, start: int = 0, weight: Weight = "line") -> Curve:
    """Return a curve over start, start + 1, …."""
    values = finite(y)
    return Curve(name, range(start, start + len(values)), values, weight)
