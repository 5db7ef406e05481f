"""The numbers that the papers print, to stand beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from collab_compress.errors import RecipeError

PAPERS = Path(__file__).with_name("papers.yaml")


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table.

    Args:
        model: the model, or what else the row is about.
        scores: column → the printed number, or two where the paper gives both metrics of a task; columns without
            one are left out.
        method: what acts on heads, in the paper's words.
        stage: tuned, or the conversion, as ours are called; empty where the paper does not convert.
        parameters: in millions.
        average: over the columns, as printed.
        baseline: whether rows of the same model in this table are compared with it.
    """

    model: str
    scores: Mapping[str, tuple[Decimal, ...]]
    method: str = ""
    stage: str = ""
    parameters: Decimal | None = None
    average: Decimal | None = None
    baseline: bool = False

    def score(self, column: str) -> Decimal | None:
        """Give one number for a column: the mean of two, as ours is; None without any."""
        printed = self.scores.get(column)
        return None if printed is None else sum(printed, Decimal()) / len(printed)

    def mean(self, columns: Sequence[str]) -> Decimal | None:
        """Give the mean over columns; None if there are none, or one of them is missing."""
        scores = [score for score in map(self.score, columns) if score is not None]
        return sum(scores, Decimal()) / len(scores) if scores and len(scores) == len(columns) else None


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a figure or section whose text gives numbers.

    Args:
        paper: the paper's key.
        title: of the paper.
        source: authors, and where it appeared.
        name: as in "Table 2".
        columns: name → metric; those of tasks are named as ours are.
        rows: as printed.
        about: the conditions.
        note: where the paper contradicts itself; empty if it does not.
    """

    paper: str
    title: str
    source: str
    name: str
    columns: Mapping[str, str]
    rows: tuple[PaperRow, ...]
    about: str = ""
    note: str = ""

    @property
    def place(self) -> str:
        """Where its rows stand: the paper's key and the table's name."""
        return f"{self.paper}, {self.name}"

    def baseline(self, row: PaperRow) -> PaperRow | None:
        """Give what a row is compared with; None for a baseline itself, and where there is none."""
        found = [other for other in self.rows if other.baseline and other.model == row.model]
        return found[0] if found and row is not found[0] else None

    def rows_for(self, columns: Sequence[str]) -> list[PaperRow]:
        """Give the rows that have a number in one of these columns."""
        return [row for row in self.rows if any(column in row.scores for column in columns)]


def read_papers(path: Path = PAPERS) -> list[PaperTable]:
    """Read the tables of all papers; numbers keep the digits they are printed with.

    Raises:
        RecipeError: the file cannot be read, or a table in it is malformed.
    """
    try:
        papers = yaml.load(path.read_text(encoding="utf-8"), _Exact)
        return [
            _table(key, paper, name, table)
            for key, paper in papers.items()
            for name, table in paper["tables"].items()
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the papers' numbers in {path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not laid out as the papers' numbers are: {error}") from error


def select_tables(
    tables: Sequence[PaperTable], paper: str | None = None, table: str | None = None
) -> list[PaperTable]:
    """Choose tables of papers.

    Args:
        tables: to choose from.
        paper: key of the paper; all papers if not given.
        table: its number or name: "2", "Table 2", "Figure 3"; all of them if not given.

    Raises:
        RecipeError: there is no such paper or table, naming those there are.
    """
    papers = dict.fromkeys(one.paper for one in tables)
    if paper is not None and paper not in papers:
        raise RecipeError(f"unknown paper {paper!r}; expected one of {', '.join(papers)}")
    found = [one for one in tables if paper in (None, one.paper)]
    if table is None:
        return found
    chosen = [one for one in found if table.casefold() in (one.name.casefold(), one.name.removeprefix("Table "))]
    if not chosen:
        raise RecipeError(
            f"no table {table!r}; expected one of {', '.join(dict.fromkeys(one.name for one in found))}"
        )
    return chosen


def _table(key: str, paper: Mapping[str, Any], name: str, table: Mapping[str, Any]) -> PaperTable:
    rows = tuple(_row(row, list(table["columns"]), f"{key}, {name}") for row in table["rows"])
    return PaperTable(key, paper["title"], paper["source"], name, **{**table, "rows": rows})


def _row(row: Mapping[str, Any], columns: Sequence[str], where: str) -> PaperRow:
    scores = row["scores"]
    if len(scores) != len(columns):
        raise RecipeError(f"{where}, {row['model']}: {len(scores)} scores; expected {len(columns)}, null for none")
    printed = {
        column: tuple(score if isinstance(score, list) else [score])
        for column, score in zip(columns, scores, strict=True)
        if score is not None
    }
    return PaperRow(**{**row, "scores": printed})


class _Exact(yaml.SafeLoader):
    """Reads numbers as decimals, which keep their digits."""


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Decimal:
    return Decimal(loader.construct_scalar(node))


for kind in ("int", "float"):
    _Exact.add_constructor(f"tag:yaml.org,2002:{kind}", _decimal)
