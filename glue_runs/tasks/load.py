"""Load a task from files in a folder, or from the hub."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

import datasets
from datasets import Dataset, DatasetDict, NamedSplit, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tqdm import tqdm

from collab_compress.errors import DataError

from .catalogue import TASKS, Hub, Task
from .layouts import Layout, Row, malformed

Languages: TypeAlias = tuple[str, str] | None
"""Source and target language, for translation."""

Files: TypeAlias = dict[str, list[tuple[Path, ...]]]
"""Split → the files of each of its parts."""

EXPORT = "refs/convert/parquet"  # where the hub keeps conversions to Parquet


def find_files(
    task: Task, data_dir: Path, languages: Languages, splits: Sequence[str] | None
) -> tuple[Layout, Files]:
    """Return the layout of a task's files, and the files: of all `splits`, or else at least of required ones."""
    layouts = task.layouts
    if not data_dir.is_dir():
        raise DataError(f"{task.name}: no folder {data_dir}; {expected_files(layouts, languages)}")
    names = list(dict.fromkeys(split for layout in layouts for split in layout.files))
    if unknown := [split for split in splits or () if split not in names]:
        raise DataError(f"{task.name} has no split {unknown[0]!r}; expected {', '.join(names)}")
    folders = [data_dir / name for name in task.folders if (data_dir / name).is_dir()] + [data_dir]
    of = f" of {', '.join(splits)}" if splits else ""
    searched = ", ".join(map(str, folders))
    most, message = 0, f"none of its files{of} in {searched}; {expected_files(layouts, languages)}"
    for folder, layout in product(folders, layouts):
        files, missing = _search(layout, folder, languages, splits)
        if files and missing is None:
            return layout, files
        if len(files) > most:  # of incomplete layouts, describe the most complete one
            most, message = len(files), f"no {missing} in {folder}; {expected_files([layout], languages)}"
    raise DataError(f"{task.name}: {message}")


def _search(
    layout: Layout, folder: Path, languages: Languages, splits: Sequence[str] | None
) -> tuple[Files, str | None]:
    """Return the files of complete splits, and the name of the first missing file of a required or begun split."""
    files: Files = {}
    missing = None
    for split in splits or layout.files:
        complete: list[tuple[Path, ...]] = []
        lacking, begun = [], False
        for part in layout.files.get(split, ()):
            candidates = layout.candidates(part, languages)
            paths = {name: _existing(folder / name) for names in candidates for name in names}
            begun = begun or any(paths.values())
            for names in candidates:
                group = tuple(path for path in map(paths.get, names) if path)
                if len(group) == len(names):
                    complete.append(group)
                    break
            else:
                lacking += [name for name in candidates[0] if paths[name] is None]
        if complete and not lacking:
            files[split] = complete
        elif missing is None and (splits or split not in layout.optional or begun):
            missing = f"{lacking[0]} ({split})" if lacking else f"files of {split}"
    return files, missing


def _existing(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else packed if packed.is_file() else None


def expected_files(layouts: Sequence[Layout], languages: Languages) -> str:
    """Return the names of the files of a task, for each of its layouts."""
    alternatives = []
    for layout in layouts:
        names = []
        for split, parts in layout.files.items():
            files = " and ".join(name for part in parts for name in layout.candidates(part, languages)[0])
            names.append(f"[{files}]" if split in layout.optional else files)
        alternatives.append(", ".join(names))
    return f"expected {' or '.join(alternatives)} (plain or .gz; files in brackets are optional)"


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of `datasets` and of downloads in a `with` block."""
    before = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    _show_bars(shown, shown)
    try:
        yield
    finally:
        _show_bars(*before)


def _show_bars(mapping: bool, downloads: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (datasets.enable_progress_bars if mapping else datasets.disable_progress_bars)()
        (enable_progress_bars if downloads else disable_progress_bars)()


def load_hub(task: Task, languages: Languages, splits: Sequence[str] | None, progress: bool) -> DatasetDict:
    """Load a data set from the hub, or from its cache."""
    advice = f"pass --data-dir (data_dir=…) with a folder; {expected_files(task.layouts, languages)}"
    if task.hub is None:
        raise DataError(f"{task.name} is not on the hub; {advice}")
    options = {"data_dir": task.hub.config, "revision": EXPORT} if task.hub.exported else {"name": task.hub.config}
    with progress_bars(progress):
        try:
            stored = load_dataset(task.hub.path, **options)
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"cannot load {task.name} from the hub ({reason}); {advice}") from error
        if splits and (missing := [split for split in splits if split not in stored]):
            raise DataError(f"{task.hub.path} has no split {missing[0]!r}; it has {', '.join(stored)}")
        wanted = splits or dict.fromkeys(split for layout in task.layouts for split in layout.files)
        return DatasetDict(
            {split: _select_columns(task, task.hub, stored[split], languages) for split in wanted if split in stored}
        )


def _select_columns(task: Task, hub: Hub, data: Dataset, languages: Languages) -> Dataset:
    """Convert a data set to the canonical columns and drop all others."""
    source, target = languages or ("", "")
    columns = {column.format(source=source, target=target): name for name, column in hub.columns.items()}
    if missing := [column for column in columns if column not in data.column_names]:
        raise DataError(f"{hub.path} has no column {missing[0]!r}; it has {', '.join(data.column_names)}")
    rows = data.select_columns(list(columns)).rename_columns(columns)
    if not task.labels:
        return rows.cast(task.features)
    return rows.map(lambda row: {"label": task.number(row["label"])}, features=task.features)


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

    Columns have the same names for all data sets: text, label (and text_pair) for classification, source and target
    for translation, text for language modelling. Splits are train, validation and test; MNLI has validation_matched
    and validation_mismatched. Labels of a test split without labels are −1, as on the hub.

    Args:
        name: of a task in `TASKS`.
        data_dir: the folder of the task, or one that holds it under its usual name; the hub if not given.
        splits: splits to load; all that exist if not given.
        source: source language, as in the names of the files.
        target: target language.
        files: split → path, or paths to read one after another, instead of the usual ones; `{lang}` stands for the
            language. They are laid out as the task's usual files.
        train: whether training data are needed; without, they may be missing.

    Returns:
        Split → data set.

    Raises:
        DataError: no such task; files are missing or malformed (with file and line); or the hub cannot be reached.
    """
    task, languages = _resolve(name, source, target, files, train)
    if data_dir is None:
        if files:
            raise DataError(f"{name}: files are relative to a folder; pass data_dir too")
        return load_hub(task, languages, splits, progress)
    layout, paths = find_files(task, Path(data_dir).expanduser(), languages, splits)

    loaded = DatasetDict()
    for split, parts in paths.items():
        rows = _read_rows(task, layout, parts, split)
        shown = tqdm(rows, desc=f"{name} {split}", unit=" rows", disable=not progress)
        loaded[split] = Dataset.from_list(list(shown), task.features, split=NamedSplit(split))
    return loaded


def _resolve(
    name: str, source: str | None, target: str | None, files: Mapping[str, str | Sequence[str]] | None, train: bool
) -> tuple[Task, Languages]:
    """Return a task with the requested files, and its languages."""
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; expected one of {', '.join(sorted(TASKS))}")
    task = TASKS[name]
    layouts = task.layouts
    if files:
        parts = {split: (paths,) if isinstance(paths, str) else tuple(paths) for split, paths in files.items()}
        if empty := [split for split, paths in parts.items() if not all(paths) or not paths]:
            raise DataError(f"{name}: files of {empty[0]} name no path; pass one, or leave the split out")
        layouts = (replace(layouts[0], files=parts, optional=()),)
    if not train:
        others = [{split: files for split, files in of.files.items() if split != "train"} for of in layouts]
        layouts = tuple(replace(layout, files=files) for layout, files in zip(layouts, others, strict=True))
    task = replace(task, layouts=layouts)
    if task.kind != "translation":
        if source or target:
            raise DataError(f"{name} is {task.kind} and has no source or target language")
        return task, None
    if task.languages is not None:
        source, target = source or task.languages[0], target or task.languages[1]
    if not source or not target or source == target:
        raise DataError(f"{name} needs two languages, got source {source!r} and target {target!r}")
    return task, (source, target)


def _read_rows(task: Task, layout: Layout, parts: Sequence[tuple[Path, ...]], split: str) -> Iterator[Row]:
    """Read a split, with labels as numbers; raises a DataError where a file is malformed."""
    for paths in parts:
        row = None
        for place, row in layout.rows(paths, split in layout.unlabelled):
            if "label" in row:
                row["label"] = task.label(row["label"], layout, place)
            yield row
        if row is None:
            raise malformed((paths[0], 1), "the file is empty; expected rows of data")
