"""The data of a report: sections with tables and pictures, from which the page and the files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import TypeAlias

from torch import Tensor

Cell: TypeAlias = str | int | float | None
Numbers: TypeAlias = "Tensor | Sequence[float | int | None]"
NONE = "–"


def written(cell: Cell) -> str:
    """Return a cell of a table as text."""
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    return f"{cell:,}".replace("-", "−") if isinstance(cell, int) else short(cell)


def short(value: float | None) -> str:
    """Return a number as text with three significant digits, or more if it is 1000 or above."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    digits = floor(log10(abs(float(f"{value:.2e}"))))  # of the rounded number: 0.9999 is 1.00
    if digits >= 15 or digits < -4:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return f"{value:,.{max(0, 2 - digits)}f}".replace("-", "−")


def finite(values: Numbers) -> tuple[float | None, ...]:
    """Return a vector (n,) or a list as numbers, None for those that are not finite."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    return tuple(None if value is None or not isfinite(value) else float(value) for value in listed)


@dataclass(frozen=True)
class Table:
    """A table by records with the same keys, which are headings, as "layer" or "dense [ms]".

    Example:
        >>> table = Table("costs", "Costs", [{"layer": "0", "dense [ms]": 1.5}, {"layer": "1", "dense [ms]": 2.5}])
        >>> table.columns, table.rows
        ([{'name': 'layer', 'unit': ''}, {'name': 'dense', 'unit': 'ms'}], [('0', 1.5), ('1', 2.5)])
    """

    name: str  # short, for files
    title: str
    records: Sequence[Mapping[str, Cell]]  # numbers that are not finite are shown as –

    @property
    def columns(self) -> list[dict[str, str]]:
        """The name and the unit of each column; the unit may be empty."""
        headings = [heading.removesuffix("]").partition(" [") for heading in self.records[0]]
        return [{"name": name, "unit": unit} for name, _, unit in headings]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells of each row; None for numbers that are not finite."""
        return [
            tuple(None if isinstance(cell, float) and not isfinite(cell) else cell for cell in record.values())
            for record in self.records
        ]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, which are aligned to the right."""
        return [not any(isinstance(cell, str) for cell in column) for column in zip(*self.rows, strict=True)]


@dataclass(frozen=True)
class Heatmap:
    """One matrix of a picture.

    Example:
        >>> Heatmap("layer 0", ((1.0, 0.2), (0.2, 1.0)), rows=("0", "1"), columns=("0", "1")).values[0]
        (1.0, 0.2)
    """

    title: str  # one or two words
    values: tuple[tuple[float | None, ...], ...]  # (rows, columns); None is left blank
    rows: tuple[str, ...] = ()  # their names; empty for none
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Heatmaps:
    """A picture of matrices on one scale.

    Example:
        >>> heat = Heatmap("layer 0", ((1.0, 0.2), (0.2, 1.0)))
        >>> Heatmaps("CKA of heads", "Strong cells are similar heads.", "Diversity, Table 3", [heat]).high
        1.0
    """

    title: str
    reading: str  # how to read it, in one line
    source: str  # the paper's short name and figure, or another origin
    maps: Sequence[Heatmap]
    high: float = 1.0  # value of the strongest cell
    diverging: bool = False  # one hue from 0 to high, or two that meet at 0, from -high
    row_label: str = "head"
    column_label: str = "head"


@dataclass(frozen=True)
class Curve:
    """One curve; numbers that are not finite become None and interrupt it.

    Example:
        >>> Curve("layer 0", x=(1, 2), y=(0.5, float("nan")))
        Curve(name='layer 0', x=(1.0, 2.0), y=(0.5, None), dashed=False)
    """

    name: str  # for the legend; curves of one name share a colour
    x: Sequence[float | None]  # ascending
    y: Sequence[float | None]
    dashed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", finite(self.x))
        object.__setattr__(self, "y", finite(self.y))
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.name}: {len(self.x)} and {len(self.y)} numbers; expected as many of both")


@dataclass(frozen=True)
class Panel:
    """Curves in one coordinate system, drawn in this order.

    Example:
        >>> Panel("all heads", [Curve("layer 0", (1, 2), (0.5, 0.4))]).title
        'all heads'
    """

    title: str  # one or two words
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Curves:
    """A picture of curves, in panels side by side on the same scale of y.

    Example:
        >>> panel = Panel("all heads", [Curve("layer 0", (1, 2), (0.5, 0.4))])
        >>> Curves("Loss", "Lower is better.", "measured here", [panel], x_label="width", y_label="loss").log
        False
    """

    title: str
    reading: str  # how to read it, in one line
    source: str  # as for `Heatmaps`
    panels: Sequence[Panel]
    x_label: str
    y_label: str
    bottom: float | None = None  # least y of the axis, or None to fit
    top: float | None = None
    log: bool = False  # both axes


Picture: TypeAlias = Heatmaps | Curves


@dataclass(frozen=True)
class Section:
    """The results of one group of measures.

    Example:
        >>> table = Table("costs", "Costs", [{"layer": "0", "dense [ms]": 1.5}])
        >>> Section("cost", "What a layer costs", "Measured here.", "this package", [table]).pictures
        ()
    """

    name: str  # short, for options and files
    title: str
    reading: str  # what is measured, on how much data, and what it does not show
    source: str  # the papers' short names and sections
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    highlights: Sequence[str] = ()  # the most important numbers, a sentence each


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


def curve(name: str, y: Numbers, start: int = 0) -> Curve:
    """Return a curve over start, start + 1, …."""
    values = finite(y)
    return Curve(name, range(start, start + len(values)), values)
