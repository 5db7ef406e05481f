"""The metrics of GLUE, from 0 to 1 (correlations from −1 to 1): the papers' tables have them times 100."""

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from collab_compress.errors import DataError
from collab_compress.metrics.base import CLASSES, NUMBERS, Metric


class Accuracy(Metric):
    """Share of classes predicted right."""

    scores = ("accuracy",)
    scale = 100.0
    formats = (CLASSES,)

    def _score(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        _check_labels(references)
        return {"accuracy": float(accuracy_score(references, predictions))}


class AccuracyAndF1(Metric):
    """Accuracy, and F1 of class 1 of two; F1 is 0 where class 1 is neither there nor predicted."""

    scores = ("accuracy", "f1")
    scale = 100.0
    formats = (CLASSES,)

    def _score(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        _check_labels(references)
        if other := {*predictions, *references} - {0, 1}:
            raise DataError(f"F1 is of two classes, 0 and 1; got class {min(other)}")
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, zero_division=0.0)),
        }


class Matthews(Metric):
    """Matthews correlation of predicted classes; 0 where only one class is predicted, or is there."""

    scores = ("matthews_correlation",)
    scale = 100.0
    formats = (CLASSES,)

    def _score(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        _check_labels(references)
        if len(set(predictions)) == 1 or len(set(references)) == 1:
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


class Correlation(Metric):
    """Pearson and Spearman correlation of scores.

    They are 0 where all predictions, or all references, are the same: such predictions tell nothing. They are NaN
    where a prediction is no finite number.
    """

    scores = ("pearson", "spearmanr")
    scale = 100.0
    formats = (NUMBERS,)

    def _score(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        x, y = np.asarray(predictions), np.asarray(references)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return {"pearson": float("nan"), "spearmanr": float("nan")}
        if (x == x[0]).all() or (y == y[0]).all():
            return {"pearson": 0.0, "spearmanr": 0.0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of predictions that are nearly the same
            return {"pearson": float(pearsonr(x, y).statistic), "spearmanr": float(spearmanr(x, y).statistic)}


def _check_labels(references: Sequence[int]) -> None:
    if min(references) < 0:
        raise DataError("a reference is −1, which stands for no label; a test split without labels cannot be scored")
