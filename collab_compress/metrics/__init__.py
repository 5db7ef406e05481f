"""Metrics of whole sets, gathered batch by batch over one process or several.

Values are as the libraries have them: accuracy, F1 and correlations up to 1, BLEU up to 100, perplexity from 1.
"""

from collab_compress.metrics.base import Metric
from collab_compress.metrics.bleu import Bleu
from collab_compress.metrics.catalogue import METRICS, load_metric
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
