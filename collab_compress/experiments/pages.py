"""A page for each paper: its claims with verdicts, its tables with our numbers beside them, its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.experiments.comparison import REFERENCE, Estimate, estimate
from collab_compress.experiments.figures import FIGURES
from collab_compress.experiments.papers import (
    FAILS,
    HOLDS,
    OPEN,
    SEEDS,
    WITHDRAWN,
    PaperRow,
    PaperTable,
    Verdict,
    differences,
    judge,
    labelled,
    model_with_most,
    of_model,
    read_claims,
    read_papers,
    readings,
    signed,
    tried,
    unit_of,
)
from collab_compress.experiments.results import Result
from collab_compress.report import ReportResult, Section, render_page
from collab_compress.report.section import Cell, Column, Picture, Table, short

INDEX = "index"


@dataclass(frozen=True)
class Ours:
    """Our counterpart of one number of a paper.

    Args:
        label: method/stage.
        score: mean over seeds.
        difference: to the baseline with the same seed; None without one, and for the baseline itself.
    """

    label: str
    score: Estimate
    difference: Estimate | None


def write_pages(results: Sequence[Result], directory: Path) -> None:
    """Write `index.html` and `PAPER.html` for each paper; all of them or nothing. The pages fetch nothing.

    Args:
        results: of experiments, by `read_results`.
        directory: where to; must not exist.

    Raises:
        CheckpointError: it exists, or nothing can be written there.
    """
    pages = {name: render_page(findings) for name, findings in paper_pages(results).items()}
    with atomic_directory(directory) as partial:
        for name, page in pages.items():
            (partial / f"{name}.html").write_text(page, encoding="utf-8")


def paper_pages(results: Sequence[Result]) -> dict[str, ReportResult]:
    """Return the contents of each page: "index" and the papers' keys → findings."""
    papers: dict[str, list[PaperTable]] = {}
    for table in read_papers():
        papers.setdefault(table.paper, []).append(table)
    links = {f"{name}.html": name for name in (INDEX, *papers)}
    verdicts = verdicts_of(results)
    found = {key: _page(tables, verdicts[key], results, links) for key, tables in papers.items()}
    return {INDEX: _index(papers, verdicts, found, results, links), **found}


def verdicts_of(results: Sequence[Result]) -> dict[str, list[Verdict]]:
    """Judge all claims: the paper's key → verdicts."""
    return {
        paper: [verdict for claim in claims for verdict in judge(claim, results)]
        for paper, claims in read_claims().items()
    }


def ours_beside(row: PaperRow, table: PaperTable, task: str, of: str, results: Sequence[Result]) -> Ours | None:
    """Return our numbers beside a row: of its first name with records, the model with most seeds.

    The baseline is that of the paper's table, or plain fine-tuning where it has none.
    """
    baseline = table.baseline(row)
    against = REFERENCE if baseline is None else labelled(baseline.ours[0]) if baseline.ours else ""
    for label in map(labelled, row.ours):
        found = readings(results, label, task, of)
        if not found:
            continue
        model = model_with_most(found)
        base = {} if row.baseline or label == against else readings(results, against, task, of)
        changes = of_model(differences(found, base), model)
        return Ours(label, estimate(of_model(found, model)), estimate(changes) if changes else None)
    return None


def columns_beside(table: PaperTable) -> list[tuple[str, str]]:
    """Return our columns that may stand beside those of a paper's table: task and quantity."""
    tasks = dict.fromkeys((*table.columns, *table.beside))
    return [(task, of) for task in tasks for of in table.of]


def _page(
    tables: Sequence[PaperTable], verdicts: Sequence[Verdict], results: Sequence[Result], links: Mapping[str, str]
) -> ReportResult:
    first = tables[0]
    omitted: dict[str, str] = {}
    sections = [_verdicts(verdicts, first.source)]
    for table in tables:
        drawn, lacking = _table(table, results)
        doubts = f" But: {table.note}" if table.note else ""
        name = table.name.lower().replace(" ", "_")
        sections.append(Section(name, table.name, f"{table.about}{doubts}", first.source, (drawn,)))
        if lacking:
            omitted[f"Ours beside {table.name}"] = lacking
    pictures: list[Picture] = []
    for figure in FIGURES[first.paper]:
        found = figure.pictures(results)
        pictures += found
        if not found:
            omitted[f"{figure.name}, {figure.shows}"] = f"needs: {figure.needs}"
    about = "Of all records that have what a figure takes; which figure it is after stands below each title."
    sections.append(Section("figures", "Figures, from records", about, first.source, (), tuple(pictures)))
    facts = {"paper": first.source, **_facts(results)}
    return ReportResult(first.title, facts, tuple(sections), omitted, "", links)


def _verdicts(verdicts: Sequence[Verdict], source: str) -> Section:
    return Section(
        "claims", "What holds",
        "A claim holds where the whole 95 % t-interval of the differences, paired by seed, is on its side of its "
        f"bound, and does not where it is all on the other; fewer than {SEEDS} seeds tell nothing. Each interval is "
        "for itself: of many claims that differ in nothing, one in twenty is decided by chance.",
        source, (_claims(verdicts),), (), tuple(verdict.sentence for verdict in tried(verdicts)),
    )  # fmt: skip


def _table(table: PaperTable, results: Sequence[Result]) -> tuple[Table, str]:
    """Draw a table with ours beside it; and say what is lacking where no row has ours."""
    beside = {
        (task, of): found
        for task, of in columns_beside(table)
        if any(found := [ours_beside(row, table, task, of, results) for row in table.rows])
    }
    named = [name for name in ("model", "method", "stage") if any(getattr(row, name) for row in table.rows)]
    columns = [Column(name) for name in named]
    rows: list[list[Cell]] = [[getattr(row, name) for name in named] for row in table.rows]
    for name in dict.fromkeys((*table.columns, *table.beside)):
        if name in table.columns:
            columns.append(Column(name, table.columns[name]))
            for row, cells in zip(table.rows, rows, strict=True):
                cells.append("/".join(map(str, row.scores[name])) if name in row.scores else None)
        for of in table.of:
            if (name, of) not in beside:
                continue
            what = name if of == "score" else f"{name}, {of}"
            columns += [Column(f"ours: {what}", unit_of(of, name, results)), Column("change")]
            for ours, cells in zip(beside[name, of], rows, strict=True):
                cells += _cells(ours)
    title = f"{table.name} as printed, and ours" if beside else f"{table.name} as printed"
    about = (
        ": mean ± sample deviation over seeds (their number), method; change: to our baseline, paired by seed, ± "
        "half of its 95 % t-interval (pairs)"
    )
    drawn = Table("table", title + (about if beside else ""), tuple(columns), tuple(map(tuple, rows)))
    return drawn, "" if beside else _lacking(table)


def _cells(ours: Ours | None) -> tuple[Cell, Cell]:
    if ours is None:
        return None, None
    score, difference, change = ours.score, ours.difference, None
    spread = "" if score.deviation is None else f" ± {short(score.deviation)}"
    if difference is not None:
        half = "" if difference.interval is None else f" ± {short(difference.interval)}"
        change = f"{signed(difference.mean)}{half} ({difference.count})"
    return f"{short(score.mean)}{spread} ({score.count}), {ours.label.removesuffix('/tuned')}", change


def _lacking(table: PaperTable) -> str:
    if not table.sweep:
        return "nothing: these are no results of training"
    return f"needs: `collab-sweep {table.sweep}`, or records of its methods at another scale"


def _claims(verdicts: Sequence[Verdict]) -> Table:
    columns = ("claim", "verdict", "on", "compared", "difference", "low", "high", "seeds", "model")
    rows: list[tuple[Cell, ...]] = []
    for verdict in verdicts:
        difference = verdict.difference
        mean, count = (None, 0) if difference is None else (difference.mean, difference.count)
        low, high = (difference and difference.ends) or (None, None)
        outcome = (verdict.claim.says, verdict.outcome, verdict.where, verdict.compared)
        rows.append((*outcome, mean, low, high, count, verdict.model))
    return Table("claims", "Claims", tuple(map(Column, columns)), tuple(rows))


def _index(
    papers: Mapping[str, Sequence[PaperTable]], verdicts: Mapping[str, Sequence[Verdict]],
    pages: Mapping[str, ReportResult], results: Sequence[Result], links: Mapping[str, str],
) -> ReportResult:  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    highlights = []
    for key, tables in papers.items():
        found = Counter(verdict.outcome for verdict in verdicts[key])
        printed, ours = sum(len(table.rows) for table in tables), sum(1 for _ in _repeated(tables, results))
        lacking = sum(name.startswith("Figure") for name in pages[key].omitted)
        drawn = len(FIGURES[key]) - lacking
        rows.append((key, found[HOLDS], found[FAILS], found[OPEN], found[WITHDRAWN], printed, ours, drawn, lacking))
        highlights.append(
            f"{tables[0].title}: {found[HOLDS]} claims hold, {found[FAILS]} do not, {found[OPEN]} cannot be told, "
            f"{found[WITHDRAWN]} are withdrawn; "
            f"{drawn} of {len(FIGURES[key])} figures are drawn."
        )
    columns = (
        "paper", "holds", "does not hold", "cannot be told", "withdrawn", "rows in its tables",
        f"rows of ours, {SEEDS} seeds or more", "figures drawn", "figures that need more",
    )  # fmt: skip
    section = Section(
        "papers", "The papers at our scale",
        "Verdicts on claims, one for each task that a claim is tried on; rows of the papers' tables that stand beside"
        " ours; figures drawn from records. What lacks is named on each page.",
        "five papers on attention heads",
        (Table("papers", "What was found", tuple(map(Column, columns)), tuple(rows)),), (), tuple(highlights),
    )  # fmt: skip
    return ReportResult("The papers beside our records", _facts(results), (section,), {}, "", links)


def _repeated(tables: Sequence[PaperTable], results: Sequence[Result]) -> Iterator[PaperRow]:
    """Return the rows with enough seeds for a verdict on some task."""
    for table in tables:
        for row in table.rows:
            found = (ours_beside(row, table, task, of, results) for task, of in columns_beside(table))
            if any(ours is not None and ours.score.count >= SEEDS for ours in found):
                yield row


def _facts(results: Sequence[Result]) -> dict[str, str]:
    seeds = sorted({result.seed for result in results})
    return {
        "records": str(len(results)),
        "tasks": ", ".join(sorted({result.column.name for result in results})),
        "models": ", ".join(sorted({result.variant.model for result in results})),
        "seeds": ", ".join(map(str, seeds)),
    }
