"""Write findings: numbers as JSON, tables as CSV, and the page."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.report.findings import Findings, render_page
from collab_compress.report.section import Section, Table

DIGITS = 6
PAGE, NUMBERS = "index.html", "numbers.json"


def write_findings(findings: Findings, directory: Path) -> None:
    """Write `index.html`, `numbers.json`, and `SECTION-TABLE.csv` for each table; all files or none.

    Numbers have six significant digits. Undefined numbers are null in JSON and empty in CSV.

    Args:
        findings: results to write.
        directory: new folder; must not exist.

    Raises:
        CheckpointError: the folder exists or cannot be written.
    """
    page, numbers = render_page(findings), json.dumps(to_json(findings), allow_nan=False, indent=1)
    with atomic_directory(directory) as partial:
        (partial / PAGE).write_text(page, encoding="utf-8")
        (partial / NUMBERS).write_text(numbers + "\n", encoding="utf-8")
        for section in findings.sections:
            for table in section.tables:
                (partial / f"{section.name}-{table.name}.csv").write_text(to_csv(table), encoding="utf-8")


def to_json(findings: Findings) -> dict[str, Any]:
    """Return the findings in JSON types."""
    return {
        "title": findings.title,
        "facts": findings.facts,
        "actions": findings.actions,
        "highlights": findings.highlights,
        "sections": {section.name: _section(section) for section in findings.sections},
        "omitted": findings.omitted,
    }


def to_csv(table: Table) -> str:
    """Return a table as CSV with a header line and units in brackets."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([f"{column.name} [{column.unit}]" if column.unit else column.name for column in table.columns])
    writer.writerows([["" if cell is None else _rounded(cell) for cell in row] for row in table.rows])
    return file.getvalue()


def _section(section: Section) -> dict[str, Any]:
    tables = {
        table.name: {
            "title": table.title,
            "columns": [asdict(column) for column in table.columns],
            "rows": _rounded(table.rows),
        }
        for table in section.tables
    }
    return {
        "title": section.title,
        "reading": section.reading,
        "source": section.source,
        "tables": tables,
        "pictures": [_rounded(asdict(picture)) for picture in section.pictures],
    }


def _rounded(value: Any) -> Any:
    """Return a value with all floats in it rounded."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
