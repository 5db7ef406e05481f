"""Load a task from files in a folder, or from the hub."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict, DatasetInfo, Features, NamedSplit, load_dataset
from datasets.exceptions import DatasetsError
from datasets.fingerprint import Hasher
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tqdm import tqdm

from collab_compress.errors import DataError
from collab_compress.tasks.catalogue import NO_LABEL, TASKS, Hub, Task
from collab_compress.tasks.layouts import Layout, Row, malformed

Languages = tuple[str, str] | None


@dataclass(frozen=True)
class Found:
    """A layout, and for each split that is there the files of its parts."""

    layout: Layout
    splits: dict[str, list[tuple[Path, ...]]]


def find_files(task: Task, data_dir: Path, languages: Languages, splits: Sequence[str] | None) -> Found:
    """Return the files of a task and the layout that they have.

    Args:
        task: the task.
        data_dir: the task's folder, or one that holds it.
        languages: of the source and the target, for translation.
        splits: which to find, all needed; every split, the optional ones where they are there, if not given.

    Raises:
        DataError: no such folder, or files are missing; says what was expected.
    """
    layouts = task.layouts
    if not data_dir.is_dir():
        raise DataError(f"{task.name}: no folder {data_dir}; {expected_files(layouts, languages)}")
    names = list(dict.fromkeys(split for layout in layouts for split in layout.files))
    if unknown := [split for split in splits or () if split not in names]:
        raise DataError(f"{task.name} has no split {unknown[0]!r}; expected {', '.join(names)}")
    folders = [data_dir / name for name in task.folders if (data_dir / name).is_dir()] + [data_dir]
    best: tuple[int, str, Layout, Path] | None = None
    for folder in folders:
        for layout in layouts:
            there, missing = _look(layout, folder, languages, splits)
            if there and not missing:
                return Found(layout, there)
            if there and (best is None or len(there) > best[0]):
                best = len(there), missing[0], layout, folder
    if best is not None:
        raise DataError(f"{task.name}: no {best[1]} in {best[3]}; {expected_files([best[2]], languages)}")
    looked = ", ".join(str(folder) for folder in folders)
    of = f" of {', '.join(splits)}" if splits else ""
    raise DataError(f"{task.name}: none of its files{of} in {looked}; {expected_files(layouts, languages)}")


def _look(
    layout: Layout, folder: Path, languages: Languages, splits: Sequence[str] | None
) -> tuple[dict[str, list[tuple[Path, ...]]], list[str]]:
    """Return the files of the splits that exist, and the names of the required splits that are missing."""
    there, missing = {}, []
    for split in splits or layout.files:
        parts = [_first(layout.candidates(part, languages), folder) for part in layout.files.get(split, ())]
        if parts and all(part is not None for part in parts):
            there[split] = [part for part in parts if part is not None]
        elif splits or split not in layout.optional or _begun(layout, folder, languages, split):
            missing.append(_missing(layout, folder, languages, split, parts))
    return there, missing


def _missing(
    layout: Layout, folder: Path, languages: Languages, split: str, parts: Sequence[tuple[Path, ...] | None]
) -> str:
    """Name the first file that a split lacks."""
    for part, found in zip(layout.files.get(split, ()), parts, strict=True):
        if found is None:
            names = layout.candidates(part, languages)[0]
            return f"{next(name for name in names if _there(folder / name) is None)} ({split})"
    return f"files of {split}"


def _begun(layout: Layout, folder: Path, languages: Languages, split: str) -> bool:
    """Return whether some, but not all, files of a split exist."""
    groups = (layout.candidates(part, languages) for part in layout.files[split])
    return any(_there(folder / name) for candidates in groups for names in candidates for name in names)


def _first(candidates: Sequence[tuple[str, ...]], folder: Path) -> tuple[Path, ...] | None:
    """Return the first group of files that exists."""
    for names in candidates:
        files = [_there(folder / name) for name in names]
        if all(file is not None for file in files):
            return tuple(file for file in files if file is not None)
    return None


def _there(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else packed if packed.is_file() else None


def expected_files(layouts: Sequence[Layout], languages: Languages) -> str:
    """Return the names of the files of a task, for each of its layouts."""
    ways = []
    for layout in layouts:
        names = []
        for split, parts in layout.files.items():
            files = " and ".join(name for part in parts for name in layout.candidates(part, languages)[0])
            names.append(f"[{files}]" if split in layout.optional else files)
        ways.append(", ".join(names))
    return f"expected {' or '.join(ways)} (plain or with .gz, those in brackets where there are any)"


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of `datasets` and of downloads inside, and leave them as they were.

    The environment variables that force them on or off keep their say.
    """
    before = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _show(shown, shown)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _show(*before)


def shared(data: Dataset, num_proc: int | None) -> int | None:
    """Return the number of processes for a data set; None, for this process alone, if it is small."""
    most = min(num_proc or 1, len(data) // CHUNK)
    return most if most > 1 else None


def _show(mapping: bool, downloads: bool) -> None:
    (datasets.enable_progress_bars if mapping else datasets.disable_progress_bars)()
    (enable_progress_bars if downloads else disable_progress_bars)()


CHUNK = 10_000
EXPORT = "refs/convert/parquet"  # where the hub keeps what it has converted


def load_hub(
    task: Task,
    languages: Languages,
    splits: Sequence[str] | None,
    progress: bool = False,
    num_proc: int | None = None,
) -> DatasetDict:
    """Load a data set from the hub, or from the cache of earlier times.

    Args:
        task: the task.
        languages: of the source and the target, for translation.
        splits: which to load; all of the task's that are there if not given.
        progress: whether to show progress bars.
        num_proc: processes that work on the data; one if not given.

    Raises:
        DataError: the task is on no hub, it cannot be reached, or what is there is not what was expected.
    """
    advice = f"pass --data-dir (data_dir=…) with a folder; {expected_files(task.layouts, languages)}"
    if task.hub is None:
        raise DataError(f"{task.name} cannot be had from the hub; {advice}")
    words = _words(languages)
    config = task.hub.config.format(**words) if task.hub.config else None
    place = {"data_dir": config, "revision": EXPORT} if task.hub.exported else {"name": config}
    with progress_bars(progress):
        try:
            there = load_dataset(task.hub.path, **place)
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"cannot load {task.name} from the hub ({reason}); {advice}") from error
        wanted = splits or dict.fromkeys(split for layout in task.layouts for split in layout.files)
        if splits and (lacking := [split for split in splits if split not in there]):
            raise DataError(f"{task.hub.path} has no split {lacking[0]!r}; it has {', '.join(there)}")
        return DatasetDict(
            {split: _canonical(task, task.hub, there[split], words, num_proc) for split in wanted if split in there}
        )


def _words(languages: Languages) -> dict[str, str]:
    """Return the values of the placeholders in names on the hub."""
    if languages is None:
        return {}
    source, target = languages
    return {"source": source, "target": target, "foreign": target if source == "en" else source}


def _canonical(task: Task, hub: Hub, data: Dataset, words: Mapping[str, str], num_proc: int | None) -> Dataset:
    """Convert a data set to the canonical columns and drop all others."""
    columns = {name: [there.format(**words) for there in parts] for name, parts in hub.columns.items()}
    for there in (there for parts in columns.values() for there in parts):
        first, _, inner = there.partition(".")
        if first not in data.column_names or (inner and inner not in data.features[first]):
            raise DataError(f"{hub.path} has no column {there!r}; it has {', '.join(data.column_names)}")
    rows = data.map(
        _rename,
        batched=True,
        fn_kwargs={"task": task, "columns": columns},
        remove_columns=data.column_names,
        features=task.features,
        num_proc=shared(data, num_proc),
    )
    if any(layout.left_out for layout in task.layouts):
        rows = rows.filter(_labelled, input_columns=["label"])
    return rows


def _labelled(label: int) -> bool:
    return label != NO_LABEL


def _rename(batch: Mapping[str, Any], task: Task, columns: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """Return the canonical columns of a batch of rows."""
    renamed: dict[str, list[Any]] = {}
    for name, parts in columns.items():
        found = [_column(batch, there) for there in parts]
        if name in task.text_columns:
            renamed[name] = [
                task.clean(" ".join(text for text in texts if text)) for texts in zip(*found, strict=True)
            ]
        elif task.kind == "classification":
            renamed[name] = [task.number(label) for label in found[0]]
        else:
            renamed[name] = found[0]
    return renamed


def _column(batch: Mapping[str, Any], there: str) -> list[Any]:
    first, _, inner = there.partition(".")
    return [value[inner] for value in batch[first]] if inner else batch[first]


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
    num_proc: int | None = None,
) -> DatasetDict:
    """Load the data set of a task.

    Columns have the same names whatever the data set: text, label (and text_pair) for classification, source and
    target for translation, text for language modelling.
    Splits are train, validation and test; MNLI has validation_matched and validation_mismatched. Where a test split
    has no labels they are −1, as on the hub.
    Files are read into memory; of a corpus too large for that, say with how many processes to tokenize it
    (`num_proc`): it is then read once into the cache of `datasets` (`HF_DATASETS_CACHE`), and mapped from there until
    the size or time of a file changes.

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
        num_proc: processes that work on the data, which lie on disk; files are read into memory if not given.

    Returns:
        Split → data set.

    Raises:
        DataError: no such task, files that are missing or malformed (with file and line), no hub to be reached, or
            the cache cannot be written.
    """
    task, languages = _chosen(name, source, target, files, train)
    if data_dir is None:
        if files:
            raise DataError(f"{name}: files are looked up in a folder; pass data_dir too")
        return load_hub(task, languages, splits, progress, num_proc)
    found = find_files(task, Path(data_dir).expanduser(), languages, splits)
    features = task.features

    def read(split: str) -> Iterable[Row]:
        return tqdm(_rows(task, found, split), desc=f"{name} {split}", unit=" rows", disable=not progress)

    if num_proc is not None:
        return DatasetDict({split: _on_disk(partial(read, split), task, found, split) for split in found.splits})
    return DatasetDict({split: _dataset(read(split), features, split) for split in found.splits})


def task_files(
    name: str,
    data_dir: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    files: Mapping[str, str | Sequence[str]] | None = None,
    train: bool = True,
) -> dict[str, list[Path]]:
    """Return the files that `load_task` reads with the same arguments.

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
    """Return a task with the requested files and languages."""
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; expected one of {', '.join(sorted(TASKS))}")
    task = _with_files(TASKS[name], files) if files else TASKS[name]
    if not train:
        task = _without_train(task)
    return task, _languages(task, source, target)


def _languages(task: Task, source: str | None, target: str | None) -> Languages:
    """Return the source and target language; None for other tasks."""
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
    """Return the task with other file names."""
    parts = {split: (paths,) if isinstance(paths, str) else tuple(paths) for split, paths in files.items()}
    return replace(task, layouts=(replace(task.layouts[0], files=parts, optional=()),))


def _without_train(task: Task) -> Task:
    """Return the task without the files of its training data."""
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


def _on_disk(read: Callable[[], Iterable[Row]], task: Task, found: Found, split: str) -> Dataset:
    """Read a split into the cache of `datasets`, if it is not there, and map it from there.

    Raises:
        DataError: as `_rows`, or the cache cannot be written.
    """
    files = [(str(file), file.stat()) for paths in found.splits[split] for path in paths for file in _inner(path)]
    known = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    key = Hasher.hash([task.name, repr(found.layout), str(task.features), split, version("collab-compress"), known])
    try:
        with progress_bars(False):  # the reader shows its own
            rows: Dataset = Dataset.from_generator(
                read, features=task.features, split=NamedSplit(split), fingerprint=key
            )
    except (DatasetsError, OSError) as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise DataError(
            f"{task.name} cannot be read into {datasets.config.HF_DATASETS_CACHE} ({error.__cause__ or error}); "
            "say by HF_DATASETS_CACHE where there is room, or leave num_proc out"
        ) from error
    return rows


def _inner(path: Path) -> list[Path]:
    """List the files in a folder, or the one."""
    return sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path.resolve()]


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
