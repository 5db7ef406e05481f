"""Load a task's data set: from its authors' files in a folder, or from the hub."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, DatasetInfo, Features, NamedSplit
from tqdm import tqdm

from collab_compress.errors import DataError
from collab_compress.tasks.find import Found, Languages, find_files
from collab_compress.tasks.hub import load_hub
from collab_compress.tasks.layouts import Row, malformed
from collab_compress.tasks.table import TASKS
from collab_compress.tasks.task import Task

CHUNK = 10_000


def load_task(
    name: str,
    data_dir: str | Path | None = None,
    *,
    splits: Sequence[str] | None = None,
    source: str | None = None,
    target: str | None = None,
    files: Mapping[str, str | Sequence[str]] | None = None,
    train: bool = True,
    progress: bool = False,
) -> DatasetDict:
    """Load the data set of a task.

    Columns have the same names whatever the data set: text, label (and text_pair) for classification, source and
    target for translation, text for language modelling. Splits are train, validation and test; MNLI has
    validation_matched and validation_mismatched. Where a test split has no labels they are −1, as on the hub.
    Files are read into memory; a corpus too large for that is saved once with `save_to_disk`, and `load_from_disk`
    then maps it from there.

    Args:
        name: of a task in `TASKS`.
        data_dir: the folder of the task, or one that holds it under its usual name; the hub if not given.
        splits: which to load; all that are there if not given.
        source: language to translate from, as it is in the names of the files.
        target: language to translate to.
        files: split → path, or paths to read one after another, in the place of the usual ones; `{lang}` stands for
            the language.
        train: whether training data are wanted; if not, they need not be there.
        progress: whether to show progress bars.

    Returns:
        Split → data set.

    Raises:
        DataError: no such task, files that are missing or malformed (with file and line), or no hub to be reached.
    """
    task, languages = _chosen(name, source, target, files, train)
    if data_dir is None:
        if files:
            raise DataError(f"{name}: files are looked up in a folder; pass data_dir too")
        return load_hub(task, languages, splits, progress)
    found = find_files(task, Path(data_dir).expanduser(), languages, splits)
    features = task.features
    return DatasetDict(
        {
            split: _dataset(
                tqdm(_rows(task, found, split), desc=f"{name} {split}", unit=" rows", disable=not progress),
                features,
                split,
            )
            for split in found.splits
        }
    )


def task_files(
    name: str,
    data_dir: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    files: Mapping[str, str | Sequence[str]] | None = None,
    train: bool = True,
) -> dict[str, list[Path]]:
    """Find the files that `load_task` reads, which takes the same arguments.

    Returns:
        Split → files, or folders of them, in the order in which they are read.

    Raises:
        DataError: no such task, or files are missing.
    """
    task, languages = _chosen(name, source, target, files, train)
    found = find_files(task, Path(data_dir).expanduser(), languages, None)
    return {split: [path for part in parts for path in part] for split, parts in found.splits.items()}


def _chosen(
    name: str,
    source: str | None,
    target: str | None,
    files: Mapping[str, str | Sequence[str]] | None,
    train: bool,
) -> tuple[Task, Languages]:
    """Give a task, with the files and the languages that were asked for."""
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; expected one of {', '.join(sorted(TASKS))}")
    task = _with_files(TASKS[name], files) if files else TASKS[name]
    if not train:
        task = _without_train(task)
    return task, _languages(task, source, target)


def _languages(task: Task, source: str | None, target: str | None) -> Languages:
    """Give the languages to translate between; None for other tasks."""
    if task.kind != "translation":
        if source or target:
            raise DataError(f"{task.name} is {task.kind} and has no source or target language")
        return None
    usual = task.languages or (None, None)
    source, target = source or usual[0], target or usual[1]
    if not source or not target or source == target:
        raise DataError(f"{task.name} needs two languages, got source {source!r} and target {target!r}")
    return source, target


def _with_files(task: Task, files: Mapping[str, str | Sequence[str]]) -> Task:
    """Give the task files in the place of its usual ones."""
    parts = {split: (paths,) if isinstance(paths, str) else tuple(paths) for split, paths in files.items()}
    return replace(task, layouts=(replace(task.layouts[0], files=parts, optional=()),))


def _without_train(task: Task) -> Task:
    """Leave the training data out of the task's files."""
    layouts = (
        replace(layout, files={split: parts for split, parts in layout.files.items() if split != "train"})
        for layout in task.layouts
    )
    return replace(task, layouts=tuple(layouts))


def _rows(task: Task, found: Found, split: str) -> Iterator[Row]:
    """Read a split: its texts as they were, its labels as numbers.

    Raises:
        DataError: a file has no rows, or anything in it is malformed.
    """
    layout = found.layout
    for paths in found.splits[split]:
        empty = True
        for place, row in layout.rows(paths, split in layout.unlabelled):
            empty = False
            if "label" in row:
                if row["label"] in layout.left_out:
                    continue
                row["label"] = task.label(row["label"], layout, place)
            if task.escaped:
                row |= {name: task.clean(row[name]) for name in task.text_columns}
            yield row
        if empty:
            raise malformed((paths[0], 1), "the file is empty; expected rows of data")


def _dataset(rows: Iterable[Row], features: Features, split: str) -> Dataset:
    """Collect rows into a data set, a chunk at a time."""
    schema, iterator = features.arrow_schema, iter(rows)
    chunks: list[Any] = []
    while chunk := list(islice(iterator, CHUNK)):
        chunks.append(pa.Table.from_pylist(chunk, schema=schema))
    return Dataset(
        pa.concat_tables(chunks or [schema.empty_table()]),
        info=DatasetInfo(features=features),
        split=NamedSplit(split),
    )
