"""Results and the papers' numbers as Markdown."""

from collections.abc import Sequence
from decimal import Decimal

from collab_compress.experiments.comparison import AVERAGE, REFERENCE, Comparison, Estimate, Row
from collab_compress.experiments.papers import PaperRow, PaperTable
from collab_compress.experiments.results import Column


def comparison_markdown(comparison: Comparison, papers: Sequence[PaperTable]) -> str:
    """Format scores, differences and notes, with the papers' rows on the same tasks below ours."""
    columns = comparison.columns
    header = [*(["from"] if papers else []), "model", "method", "stage"]
    words = len(header)
    rows = [[*_named(row, papers), _millions(row), *_scores(row, columns)] for row in comparison.rows]
    rows += [
        [place(table), row.model, row.method, row.stage, _text(row.parameters), *paper_scores(row, columns)]
        for table in papers
        for row in table.rows_for([column.name for column in columns])
    ]
    header += ["parameters (M)", *(_header(column, "lower") for column in columns)]
    blocks = [
        "Mean ± sample standard deviation over seeds (number of seeds)." + _about_papers(papers),
        _grid(header, rows, words),
    ]
    differences = [
        [*_named(row, papers), *_differences(row, columns)] for row in comparison.rows if row.differences
    ] + _paper_differences(comparison, papers)
    if differences:
        header = [*header[:words], *(_header(column, "negative") for column in columns)]
        blocks += [
            f"Difference to {comparison.reference} of the same model, task and seed: mean ± half of its "
            "95 % t-interval (number of pairs)." + _about_differences(comparison, papers),
            _grid(header, differences, words),
        ]
    notes = [f"* {note}." for note in comparison.notes] + [f"* {_conditions(table)}" for table in papers]
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])]) + "\n"


def papers_markdown(tables: Sequence[PaperTable]) -> str:
    """Format the papers' tables as they are printed."""
    blocks = []
    for table in tables:
        columns = [f"{name} ({metric})" for name, metric in table.columns.items()]
        header = ["model", "method", "stage", "parameters (M)", *columns, "average"]
        rows = [
            [row.model, row.method, row.stage, _text(row.parameters), *_printed(row, table), _text(row.average)]
            for row in table.rows
        ]
        used = [place for place in range(len(header)) if any(row[place] for row in rows)]
        filled = [[line[place] for place in used] for line in (header, *rows)]
        blocks += [_conditions(table), _grid(filled[0], filled[1:], words=sum(place < 3 for place in used))]
    return "\n\n".join(blocks) + "\n"


def place(table: PaperTable) -> str:
    """Name where a paper's row stands."""
    return f"{table.paper}, {table.name}"


def paper_scores(row: PaperRow, columns: Sequence[Column]) -> list[str]:
    """Give a paper's numbers in our columns; an average is over the tasks that we have, as ours is."""
    tasks = [column.name for column in columns if column.name != AVERAGE]
    averages = [_rounded(row.mean(tasks))] * (len(columns) - len(tasks))
    return [*(_text(row.score(task)) for task in tasks), *averages]


def _paper_differences(comparison: Comparison, papers: Sequence[PaperTable]) -> list[list[str]]:
    """Compare the papers' rows with the baselines of their own tables, where ours are compared with the baseline."""
    if comparison.reference != REFERENCE:
        return []
    tasks = [column.name for column in comparison.columns if column.name != AVERAGE]
    lines = []
    for table in papers:
        for row in table.rows_for(tasks):
            if (base := table.baseline(row)) is None:
                continue
            changes = [_change(row.score(task), base.score(task)) for task in tasks]
            if len(tasks) < len(comparison.columns):
                changes.append(_change(row.mean(tasks), base.mean(tasks)))
            if any(changes):
                lines.append([place(table), row.model, row.method, row.stage, *changes])
    return lines


def _named(row: Row, papers: Sequence[PaperTable]) -> list[str]:
    variant = row.variant
    return [*(["ours"] if papers else []), variant.model, variant.method, variant.stage]


def _scores(row: Row, columns: Sequence[Column]) -> list[str]:
    return [_cell(row.scores[column]) if column in row.scores else "" for column in columns]


def _differences(row: Row, columns: Sequence[Column]) -> list[str]:
    found = [row.differences.get(column) for column in columns]
    return ["" if one is None else _signed(one) for one in found]


def _cell(estimate: Estimate) -> str:
    spread = "" if estimate.deviation is None else f" ± {estimate.deviation:.2f}"
    return f"{estimate.mean:.2f}{spread} ({estimate.count})"


def _signed(difference: Estimate) -> str:
    spread = "" if difference.interval is None else f" ± {difference.interval:.2f}"
    return f"{difference.mean:+.2f}{spread} ({difference.count})"


def _header(column: Column, better: str) -> str:
    return f"{column.name} ({column.metric}{'' if column.greater_is_better else f', {better} is better'})"


def _millions(row: Row) -> str:
    return "" if row.parameters is None else f"{row.parameters / 1e6:.2f}"


def _printed(row: PaperRow, table: PaperTable) -> list[str]:
    return ["/".join(map(str, row.scores.get(column, ()))) for column in table.columns]


def _text(number: Decimal | None) -> str:
    return "" if number is None else str(number)


def _rounded(number: Decimal | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _change(number: Decimal | None, base: Decimal | None) -> str:
    return "" if number is None or base is None else f"{number - base:+.2f}"


def _about_papers(papers: Sequence[PaperTable]) -> str:
    return " A paper's number is the mean of the two it prints for a task with two metrics." if papers else ""


def _about_differences(comparison: Comparison, papers: Sequence[PaperTable]) -> str:
    return " A paper's is to the baseline of its table." if _paper_differences(comparison, papers) else ""


def _conditions(table: PaperTable) -> str:
    """Say where a table is from, under what conditions, and what is doubtful about it."""
    doubts = f" **But:** {table.note}" if table.note else ""
    return f"{place(table)} (“{table.title}”, {table.source}): {table.about}{doubts}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Format a table whose first columns hold words, and the others numbers."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rule = ["-" * width if place < words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    padded = [
        [cell.ljust(width) if place < words else cell.rjust(width) for place, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (padded[0], rule, *padded[1:]))
