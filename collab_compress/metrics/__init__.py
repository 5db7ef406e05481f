"""Metrics of whole sets, gathered batch by batch over one process or several.

Values are as the libraries have them: accuracy, F1 and correlations up to 1, BLEU up to 100, perplexity from 1.
"""

from typing import Any

from collab_compress.errors import DataError
from collab_compress.metrics.base import Metric
from collab_compress.metrics.bleu import Bleu
from collab_compress.metrics.glue import Accuracy, AccuracyAndF1, Correlation, Matthews
from collab_compress.metrics.perplexity import Perplexity, token_losses

__all__ = [
    "METRICS",
    "Accuracy",
    "AccuracyAndF1",
    "Bleu",
    "Correlation",
    "Matthews",
    "Metric",
    "Perplexity",
    "load_metric",
    "token_losses",
]

# name → metric
METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "accuracy+f1": AccuracyAndF1,
    "matthews": Matthews,
    "correlation": Correlation,
    "bleu": Bleu,
    "perplexity": Perplexity,
}


def load_metric(name: str, *, gather: bool = False, **options: Any) -> Metric:
    """Make a metric, by its name and without a network.

    Args:
        name: of a metric in `METRICS`.
        gather: whether it scores what all processes of `torch.distributed` add.
        options: of the metric: tokenize and lowercase for BLEU.

    Raises:
        DataError: no such metric.
    """
    if name not in METRICS:
        raise DataError(f"unknown metric {name!r}; expected one of {', '.join(METRICS)}")
    return METRICS[name](gather=gather, **options)
