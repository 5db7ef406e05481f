"""A page for each paper: verdicts on its claims, its tables with our numbers beside them, its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.report import ReportResult, Section, render_page
from collab_compress.report.section import Cell, Column, Picture, Table, short

from .comparison import CONTROL, REFERENCE, Estimate, estimate
from .figures import Figure, read_figures
from .papers import (
    PaperRow,
    PaperTable,
    differences,
    labelled,
    model_with_most,
    of_model,
    read_papers,
    readings,
    signed,
    unit_of,
)
from .results import Result
from .verdicts import OUTCOMES, SEEDS, Verdict, counted, tried, verdicts_of

INDEX = "index"


@dataclass(frozen=True)
class Ours:
    """Our counterpart of one number of a paper: method/stage, mean over seeds, and difference to the baseline.

    The difference is paired by seed; it is None without a baseline, and for the baseline itself.
    """

    label: str
    score: Estimate
    difference: Estimate | None


def write_pages(results: Sequence[Result], directory: Path) -> None:
    """Write `index.html` and `PAPER.html` for each paper; all of them or nothing. The pages fetch nothing.

    Args:
        results: of experiments, by `read_results`.
        directory: of the pages; must not exist.

    Raises:
        CheckpointError: it exists, or cannot be written.
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
    facts = {
        "records": str(len(results)),
        "tasks": ", ".join(sorted({result.column.name for result in results})),
        "models": ", ".join(sorted({result.variant.model for result in results})),
        "seeds": ", ".join(map(str, sorted({result.seed for result in results}))),
    }
    verdicts, figures = verdicts_of(results), read_figures()
    pages, summaries, sentences = {}, [], []
    for key, tables in papers.items():
        omitted: dict[str, str] = {}
        sections = (
            _claims_section(verdicts[key], tables[0].source),
            *(_table_section(table, results, omitted) for table in tables),
            _figures_section(figures[key], tables[0].source, results, omitted),
        )
        about = {"paper": tables[0].source, **facts}
        pages[key] = ReportResult(tables[0].title, about, sections, omitted, links)
        counts = Counter(verdict.outcome for verdict in verdicts[key])
        lacking = sum(name.startswith("Figure") for name in omitted)
        drawn = len(figures[key]) - lacking
        summaries.append(
            {"paper": key}
            | {outcome: counts[outcome] for outcome in OUTCOMES}
            | {
                "rows in its tables": sum(len(table.rows) for table in tables),
                f"rows of ours, {SEEDS} seeds or more": _count_repeated(tables, results),
                "figures drawn": drawn,
                "figures that need more": lacking,
            }
        )
        sentences.append(
            f"{tables[0].title}: {counted(verdicts[key])}; {drawn} of {len(figures[key])} figures are drawn."
        )
    section = Section(
        "papers",
        "The papers at our scale",
        "Verdicts on claims, one for each task that a claim is tried on; rows of the papers' tables that stand beside"
        " ours; figures drawn from records. Each page lists what is missing.",
        "five papers on attention heads",
        tables=(Table.of("papers", "What was found", summaries),),
        highlights=tuple(sentences),
    )
    return {
        INDEX: ReportResult("The papers beside our records", facts, (section,), {}, links),
        **pages,
    }


def _claims_section(verdicts: Sequence[Verdict], source: str) -> Section:
    records = []
    for verdict in verdicts:
        difference = verdict.difference
        low, high = verdict.interval or (None, None)
        records.append(
            {
                "claim": verdict.claim.says,
                "source": verdict.claim.source,
                "verdict": verdict.outcome,
                "on": verdict.where,
                "compared": verdict.compared,
                "difference": None if difference is None else difference.mean,
                "low": low,
                "high": high,
                "p": verdict.p,
                "seeds": 0 if difference is None else difference.count,
                "model": verdict.model,
                "because": "; ".join(verdict.reasons),
                "paired revisions": "; ".join(verdict.revisions),
            }
        )
    return Section(
        "claims",
        "What holds",
        "A claim holds where p < 0.05 after Holm's correction over the paper's claims and the whole 95 % interval of "
        "the differences, paired by seed, is on its side of its bound; it does not hold where all of it is on the "
        f"other. With fewer than {SEEDS} seeds, or models not trained to the end, a claim cannot be told.",
        source,
        tables=(Table.of("claims", "Claims", records),),
        highlights=tuple(verdict.sentence for verdict in tried(verdicts)),
    )


def _table_section(table: PaperTable, results: Sequence[Result], omitted: dict[str, str]) -> Section:
    """Return a paper's table with ours beside it; add what is lacking to `omitted` if no row has ours."""
    beside = {
        (task, of): [_ours(row, table, task, of, results) for row in table.rows] for task, of in _columns(table)
    }
    beside = {column: cells for column, cells in beside.items() if any(cells)}
    named = [name for name in ("model", "method", "stage") if any(getattr(row, name) for row in table.rows)]
    columns = [Column(name) for name in named]
    rows: list[list[Cell]] = [[getattr(row, name) for name in named] for row in table.rows]
    for task, of in _columns(table):
        if of == table.of[0] and task in table.columns:
            columns.append(Column(task, table.columns[task]))
            for row, cells in zip(table.rows, rows, strict=True):
                cells.append("/".join(map(str, row.scores[task])) if task in row.scores else None)
        if (task, of) in beside:
            heading = f"ours: {task}" if of == "score" else f"ours: {task}, {of}"
            columns += [Column(heading, unit_of(of, task, results)), Column("change")]
            for ours, cells in zip(beside[task, of], rows, strict=True):
                cells += _cells(ours)
    title = f"{table.name} as printed"
    if beside:
        title += (
            ", and ours: mean ± sample deviation over seeds (their number), method; change: to our baseline, paired "
            "by seed, ± half of its 95 % t-interval (pairs)"
        )
    elif table.sweep:
        needs = f"needs: `collab-sweep {table.sweep}`, or records of its methods at another scale"
        omitted[f"Ours beside {table.name}"] = needs
    else:
        omitted[f"Ours beside {table.name}"] = "nothing: these are no results of training"
    reading = f"{table.about} But: {table.note}" if table.note else table.about
    drawn = Table("table", title, tuple(columns), tuple(map(tuple, rows)))
    return Section(table.name.lower().replace(" ", "_"), table.name, reading, table.source, (drawn,))


def _columns(table: PaperTable) -> list[tuple[str, str]]:
    """Return the columns of a table in which ours may stand: task and quantity."""
    tasks = dict.fromkeys((*table.columns, *table.beside))
    return [(task, of) for task in tasks for of in table.of]


def _ours(row: PaperRow, table: PaperTable, task: str, of: str, results: Sequence[Result]) -> Ours | None:
    """Return our numbers beside a row: of its first name with records, and of the model with most seeds.

    The baseline is that of the paper's table, or plain fine-tuning where it has none; that of models tuned again is
    the dense model tuned again.
    """
    baseline = table.baseline(row)
    usual = REFERENCE if baseline is None else labelled(baseline.ours[0]) if baseline.ours else ""
    for label in map(labelled, row.ours):
        against = CONTROL if label.endswith("-again") else usual
        values = readings(results, label, task, of)
        if not values:
            continue
        model = model_with_most(values)
        base = {} if row.baseline or label == against else readings(results, against, task, of)
        changes = of_model(differences(values, base), model)
        return Ours(label, estimate(of_model(values, model)), estimate(changes) if changes else None)
    return None


def _cells(ours: Ours | None) -> tuple[Cell, Cell]:
    if ours is None:
        return None, None
    score, difference, change = ours.score, ours.difference, None
    spread = "" if score.deviation is None else f" ± {short(score.deviation)}"
    if difference is not None:
        half = "" if difference.interval is None else f" ± {short(difference.interval)}"
        change = f"{signed(difference.mean)}{half} ({difference.count})"
    return f"{short(score.mean)}{spread} ({score.count}), {ours.label.removesuffix('/tuned')}", change


def _count_repeated(tables: Sequence[PaperTable], results: Sequence[Result]) -> int:
    """Return the number of rows with enough seeds of ours for a verdict on some task."""
    count = 0
    for table in tables:
        for row in table.rows:
            ours = (_ours(row, table, task, of, results) for task, of in _columns(table))
            count += any(one is not None and one.score.count >= SEEDS for one in ours)
    return count


def _figures_section(
    figures: Sequence[Figure], source: str, results: Sequence[Result], omitted: dict[str, str]
) -> Section:
    """Return the figures that records have; add what the others need to `omitted`."""
    pictures: list[Picture] = []
    for figure in figures:
        drawn = figure.pictures(results)
        pictures += drawn
        if not drawn:
            omitted[f"{figure.name}, {figure.shows}"] = f"needs: {figure.needs}"
    about = "Of all records that have what a figure takes; which figure it is after stands below each title."
    return Section("figures", "Figures, from records", about, source, pictures=tuple(pictures))
