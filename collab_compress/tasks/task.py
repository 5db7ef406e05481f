"""What a task is: where its data are, what the columns mean, and how it is scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from datasets import ClassLabel, Features, Value

from collab_compress.errors import DataError
from collab_compress.tasks.layouts import Layout, Place, malformed

Kind: TypeAlias = Literal["classification", "regression", "translation", "language modelling"]
SCORES = (0.0, 5.0)  # of STS-B, the one task of regression
NO_LABEL = -1


@dataclass(frozen=True)
class Hub:
    """Where a data set is on the hub.

    Args:
        path: name of the repository.
        columns: canonical column → columns there whose texts, joined by spaces, it holds; a dot goes into a nested
            one. `{source}`, `{target}` and `{foreign}` (that of the two which is not English) are filled in.
        config: which of the repository's data sets; filled in the same way.
        exported: whether only its conversion to Parquet can be read, because the data set itself is a script; the
            config is then a folder there.
    """

    path: str
    columns: Mapping[str, tuple[str, ...]]
    config: str | None = None
    exported: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task as data.

    Args:
        name: as in `load_task(name)`.
        kind: decides the columns: text, label (and text_pair) for classification and regression; source, target for
            translation; text for language modelling.
        metric: its name in `collab_compress.metrics.METRICS`.
        layouts: how its files may be laid out; the first that fits counts.
        hub: where it is on the hub, if it is.
        labels: names of the classes, in the order of their numbers.
        pair: whether there is a second text.
        languages: source and target, where none are given.
        escaped: whether texts have line ends and quotes written with a backslash.
        folders: where its folder may be within a folder of tasks.
    """

    name: str
    kind: Kind
    metric: str
    layouts: tuple[Layout, ...]
    hub: Hub | None = None
    labels: tuple[str, ...] = ()
    pair: bool = False
    languages: tuple[str, str] | None = None
    escaped: bool = False
    folders: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int | None:
        """Outputs that a model's head needs: a class each, one for regression, None without a head."""
        return {"classification": len(self.labels), "regression": 1}.get(self.kind)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns that hold text."""
        if self.kind == "translation":
            return ("source", "target")
        return ("text", "text_pair") if self.pair else ("text",)

    @property
    def features(self) -> Features:
        """Columns and their types."""
        features = {name: Value("string") for name in self.text_columns}
        if self.kind == "classification":
            features["label"] = ClassLabel(names=list(self.labels))
        elif self.kind == "regression":
            features["label"] = Value("float32")
        return Features(features)

    def clean(self, text: str) -> str:
        """Give a text as it was before it was escaped."""
        return text.replace("\\n", "\n").replace('\\"', '"') if self.escaped else text

    def number(self, label: int | str) -> int:
        """Give the number of a class as the hub has it: its name, or the number itself, −1 where there is none.

        Raises:
            DataError: there is no such class.
        """
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, str) or not NO_LABEL <= label < len(self.labels):
            raise DataError(f"{self.name}: {self._unknown(label)}")
        return label

    def label(self, written: Any, layout: Layout, place: Place) -> int | float:
        """Turn a label as a file has it into the number of its class, or a score; None becomes −1.

        Raises:
            DataError: there is no such label.
        """
        if written is None:
            return NO_LABEL
        if self.kind == "regression":
            return _score(written, place)
        if layout.first_label is None:
            if written not in self.labels:
                raise malformed(place, self._unknown(written))
            return self.labels.index(written)
        first, last = layout.first_label, layout.first_label + len(self.labels) - 1
        if not written.isascii() or not written.isdigit() or not first <= int(written) <= last:
            raise malformed(place, f"label {written!r} is no number of a class; expected {first} to {last}")
        return int(written) - first

    def _unknown(self, label: int | str) -> str:
        return f"unknown label {label!r}; expected one of {', '.join(self.labels)}"


def _score(written: str, place: Place) -> float:
    try:
        score = float(written)
    except ValueError:
        raise malformed(place, f"score {written!r} is no number") from None
    if not SCORES[0] <= score <= SCORES[1]:
        raise malformed(place, f"score {written} is out of range; expected {SCORES[0]:g} to {SCORES[1]:g}")
    return score
