"""Load a task's data set from the hub, and give it the canonical columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError

from collab_compress.errors import DataError
from collab_compress.tasks.find import Languages, expected_files
from collab_compress.tasks.progress import progress_bars
from collab_compress.tasks.task import NO_LABEL, Hub, Task

EXPORT = "refs/convert/parquet"  # where the hub keeps what it has converted


def load_hub(task: Task, languages: Languages, splits: Sequence[str] | None, progress: bool = False) -> DatasetDict:
    """Load a data set from the hub, or from the cache of earlier times.

    Args:
        task: the task.
        languages: of the source and the target, for translation.
        splits: which to load; all of the task's that are there if not given.
        progress: whether to show progress bars.

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
            {split: _canonical(task, task.hub, there[split], words) for split in wanted if split in there}
        )


def _words(languages: Languages) -> dict[str, str]:
    """Give what stands for the placeholders in names on the hub."""
    if languages is None:
        return {}
    source, target = languages
    return {"source": source, "target": target, "foreign": target if source == "en" else source}


def _canonical(task: Task, hub: Hub, data: Dataset, words: Mapping[str, str]) -> Dataset:
    """Give a data set the canonical columns, and no others."""
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
    )
    if any(layout.left_out for layout in task.layouts):
        rows = rows.filter(_labelled, input_columns=["label"])
    return rows


def _labelled(label: int) -> bool:
    return label != NO_LABEL


def _rename(batch: Mapping[str, Any], task: Task, columns: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """Give the canonical columns of a batch of rows."""
    renamed: dict[str, list[Any]] = {}
    for name, parts in columns.items():
        found = [_column(batch, there) for there in parts]
        if name != "label":
            renamed[name] = [
                task.clean(" ".join(text for text in texts if text)) for texts in zip(*found, strict=True)
            ]
        elif task.kind == "regression":
            renamed[name] = found[0]
        else:
            renamed[name] = [task.number(label) for label in found[0]]
    return renamed


def _column(batch: Mapping[str, Any], there: str) -> list[Any]:
    first, _, inner = there.partition(".")
    return [value[inner] for value in batch[first]] if inner else batch[first]
