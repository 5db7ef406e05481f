"""What all metrics share: they gather predictions batch by batch, in one process or in several."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import torch.distributed as dist

from collab_compress.errors import DataError


class Metric(evaluate.Metric):  # type: ignore[misc]
    """An `evaluate.Metric` that needs no network and no files.

        metric.add_batch(predictions=..., references=...)   # as often as there are batches
        result = metric.compute()

    All predictions are kept in memory until `compute`, so results are those of the whole set and not means over
    batches, and the metric is empty afterwards.

    Rows that a sampler repeats to fill its last batch count twice: take them off before, as the Trainer and
    `gather_for_metrics` of Accelerate do.

    Args:
        gather: whether `compute` scores what all processes of `torch.distributed` added, in the order of their ranks;
            each then calls it, and has the result. Not for a `compute_metrics` of the Trainer, which hands the
            predictions of all to each.
    """

    scores: ClassVar[tuple[str, ...]]
    """Names of the results that the benchmark averages to one figure."""

    scale: ClassVar[float] = 1.0
    """What the benchmark multiplies them by."""

    greater_is_better: ClassVar[bool] = True
    formats: ClassVar[tuple[dict[str, Any], ...]]
    """What a prediction and a reference may be; the first that fits counts."""

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__(keep_in_memory=True)
        self.gather = gather

    def _info(self) -> evaluate.MetricInfo:
        formats = [datasets.Features(types) for types in self.formats]
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation="",
            inputs_description="",
            features=formats if len(formats) > 1 else formats[0],
        )

    def _build_data_dir(self) -> str:
        """Make no folder: nothing is kept in files."""
        return ""

    def compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float]:
        """Give the results on all that was added, and on what is given here."""
        if self.writer is None and predictions is None and references is None:  # nothing was added in this process
            return self._compute([], [])
        result: dict[str, float] = super().compute(predictions=predictions, references=references, **options)
        return result

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Score the rows of all processes, one after another."""
        if self.gather and dist.is_initialized() and dist.get_world_size() > 1:
            shares: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shares, (predictions, references))
            predictions, references = ([row for share in shares for row in share[place]] for place in range(2))
        if not len(predictions):
            raise DataError("nothing to score; add predictions and references before compute()")
        return self._score(predictions, references)

    @abstractmethod
    def _score(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Give the results on a whole set, which is not empty."""


CLASSES = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
NUMBERS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
