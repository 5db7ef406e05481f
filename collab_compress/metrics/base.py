"""What all metrics share: they gather predictions batch by batch, in one process or in several."""

from typing import Any, ClassVar

import datasets
import evaluate
import pyarrow as pa
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

    data: Any  # of evaluate.Metric: what was added, once it is all there

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

    def _finalize(self) -> None:
        """Close what was added, and put that of all processes together."""
        gather = self.gather and dist.is_initialized() and dist.get_world_size() > 1
        if self.writer is None and gather:
            self.selected_feature_format = datasets.Features(self.formats[0])
            self._init_writer()
        if self.writer is None:
            raise DataError("nothing to score; add predictions and references before compute()")
        super()._finalize()
        if gather:
            self.data = _gathered(self.data)
        if not len(self.data):
            raise DataError("nothing to score; no process added predictions and references before compute()")


def _gathered(data: datasets.Dataset) -> datasets.Dataset:
    """Put the rows of all processes one after another."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, data.to_dict())
    return datasets.Dataset(pa.table({name: [row for share in shares for row in share[name]] for name in shares[0]}))


CLASSES = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
NUMBERS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
