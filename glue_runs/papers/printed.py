"""Print the papers' tables, with our records beside them: `python glue_runs/papers/printed.py [RECORDS ...]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from quantities import read_records, tabulate

PRINTED = Path(__file__).with_name("printed.yaml")


def beside(table: Mapping[str, Any], records: pd.DataFrame) -> pd.DataFrame:
    """Return a table as printed, and mean ± deviation over the seeds of our records of the same methods."""
    records, rows = records[records["task"].isin([*table["columns"], *table.get("beside", [])])], []
    for row in table["rows"]:
        names = [row["ours"]] if isinstance(row.get("ours"), str) else row.get("ours", [])
        line = {name: row.get(name, "") for name in ("model", "method", "stage")}
        line |= {name: str(score or "") for name, score in zip(table["columns"], row["scores"], strict=True)}
        for of in table.get("of", ["score"]):
            ours = records[records["label"].isin(names)].dropna(subset=of)
            for (task, model, label), values in ours.groupby(["task", "model", "label"])[of]:
                line[f"{of}, {task}, {model}"] = f"{values.mean():.4g} ± {values.std():.2g} ({label})"
        rows.append(line)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    records = tabulate(read_records())
    for paper, about in yaml.safe_load(PRINTED.read_text(encoding="utf-8")).items():
        for name, table in about["tables"].items():
            text = beside(table, records).to_string(na_rep="")
            print(f"\n{paper}, {name}: {table['about']} {table.get('note', '')}\n{text}")
