"""Scores on resampled test sets, and the error of a mean by chance of seeds and of test examples."""

from collections.abc import Callable
from functools import lru_cache
from math import inf, isclose, sqrt
from typing import TypeAlias
from zlib import crc32

import numpy as np

from collab_compress.errors import RecipeError

from ..metrics import METRICS
from .examples import Arrays, Examples

DRAWS = 2000
"""Resampled test sets."""

BLOCK = 100
"""Resampled test sets that are scored at once."""

Score: TypeAlias = Callable[[Arrays, np.ndarray], np.ndarray]
"""Function of the outcomes of n examples, and of how often each is drawn (draws, n), to scores (draws,)."""


def resampled_scores(metric: str, task: str, examples: Examples) -> np.ndarray | None:
    """Return a score on `DRAWS` test sets drawn with replacement; None without outcomes that it can be made of.

    Results on the same examples get the same draws. Several splits are drawn each by itself, and averaged.

    Args:
        metric: name in `METRICS`.
        task: name of the column.
        examples: outcomes of the splits that the score counts.
    """
    needed, compute = SCORES[metric]
    if not examples or not all(needed in arrays for arrays in examples.values()):
        return None
    scores = []
    for split, arrays in examples.items():
        counts = _draws(len(arrays[needed]), crc32(f"{task} {split}".encode()), DRAWS)
        blocks = np.array_split(counts, -(-len(counts) // BLOCK))
        scores.append(np.concatenate([compute(arrays, block.astype(np.float64)) for block in blocks]))
    mean: np.ndarray = METRICS[metric].scale * np.mean(scores, axis=0)
    return mean


def check_score(metric: str, examples: Examples, score: float, place: str) -> None:
    """Refuse outcomes that do not have the recorded score.

    Raises:
        RecipeError: it is another.
    """
    needed, compute = SCORES[metric]
    ones = (compute(arrays, np.ones((1, len(arrays[needed])))) for arrays in examples.values())
    recomputed = METRICS[metric].scale * float(np.mean(list(ones)))
    if not isclose(recomputed, score, rel_tol=1e-4, abs_tol=1e-3):
        raise RecipeError(
            f"{place} has the score {score:.4f}, and the outcomes of its examples have {recomputed:.4f}"
        )


def error_of_mean(values: np.ndarray, resampled: np.ndarray | None = None) -> tuple[float, float]:
    """Return the standard error of a mean over seeds, and its degrees of freedom.

    The variances by chance of seeds, s² / n, and of the test set add up; the degrees of freedom are Satterthwaite's
    (1946). What one seed gets right on some examples and another on others counts in both, so the error is,
    if anything, overestimated.

    Args:
        values: on the test set itself, (n,), two or more.
        resampled: the same on each resampled test set, (n, draws); None to leave its chance out.
    """
    of_seeds = values.var(ddof=1) / len(values)
    of_examples = 0.0 if resampled is None else resampled.mean(axis=0).var(ddof=1)
    freedom = (len(values) - 1) * (1 + of_examples / of_seeds) ** 2 if of_seeds else inf
    return sqrt(of_seeds + of_examples), float(freedom)


@lru_cache(maxsize=4)
def _draws(count: int, seed: int, draws: int) -> np.ndarray:
    """Return how often each of `count` examples is drawn, (draws, count); once on average, so a byte holds it."""
    generator = np.random.default_rng([count, seed])
    chances = np.full(count, 1 / count)
    return np.stack([generator.multinomial(count, chances).astype(np.uint8) for _ in range(draws)])


def _confusion(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    """Return how often each label meets each prediction, (draws, classes, classes)."""
    labels, predictions = (arrays[name].astype(int) for name in ("labels", "predictions"))
    classes = max(2, 1 + int(max(labels.max(), predictions.max())))
    cells = np.eye(classes**2)[labels * classes + predictions]
    confusion: np.ndarray = (counts @ cells).reshape(-1, classes, classes)
    return confusion


def _accuracy(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    accuracy: np.ndarray = np.trace(_confusion(arrays, counts), axis1=1, axis2=2) / counts.sum(1)
    return accuracy


def _accuracy_and_f1(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    cells = _confusion(arrays, counts)
    positives = cells[:, 1, :].sum(1) + cells[:, :, 1].sum(1)
    mean: np.ndarray = (_accuracy(arrays, counts) + _ratio(2 * cells[:, 1, 1], positives)) / 2
    return mean


def _matthews(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    cells, total = _confusion(arrays, counts), counts.sum(1)
    labels, predictions = cells.sum(2), cells.sum(1)
    covariance = np.trace(cells, axis1=1, axis2=2) * total - (labels * predictions).sum(1)
    return _ratio(covariance, np.sqrt((total**2 - (labels**2).sum(1)) * (total**2 - (predictions**2).sum(1))))


def _correlation(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    x, y = (arrays[name].astype(np.float64) for name in ("predictions", "labels"))
    pearson = _pearson(x, y, counts)
    mean: np.ndarray = (pearson + _pearson(_ranks(x, counts), _ranks(y, counts), counts)) / 2
    return mean


def _pearson(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the correlation of values (n,) or (draws, n), each as often as it is drawn."""
    total = counts.sum(1, keepdims=True)
    x, y = (values - (counts * values).sum(1, keepdims=True) / total for values in (x, y))
    covariance, *variances = ((counts * product).sum(1) for product in (x * y, x * x, y * y))
    return _ratio(covariance, np.sqrt(variances[0] * variances[1]))


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean rank of each value in each draw, (draws, n)."""
    distinct, places = np.unique(values, return_inverse=True)
    order = np.argsort(places, kind="stable")
    starts = np.searchsorted(places[order], np.arange(len(distinct)))
    repeats = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks: np.ndarray = (np.cumsum(repeats, axis=1) - (repeats - 1) / 2)[:, places]
    return ranks


def _bleu(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    """Return corpus BLEU with sacreBLEU's exponential smoothing."""
    sums = counts @ arrays["ngrams"].astype(np.float64)
    matches, ngrams, words, reference_words = sums[:, :4], sums[:, 4:8], sums[:, 8], sums[:, 9]
    missing = matches == 0
    smoothed = np.where(missing, 0.5 ** missing.cumsum(1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(ngrams > 0, smoothed / ngrams, 0)
        penalty = np.where(words < reference_words, np.exp(1 - reference_words / words), 1)
        bleu = 100 * penalty * np.exp(np.log(precision).mean(1))
    return np.where(missing.all(1), 0, bleu)


def _perplexity(arrays: Arrays, counts: np.ndarray) -> np.ndarray:
    perplexity: np.ndarray = np.exp((counts @ arrays["losses"].astype(np.float64)) / (counts @ arrays["tokens"]))
    return perplexity


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return a quotient, 0 where the denominator is 0."""
    ratio: np.ndarray = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
    return ratio


SCORES: dict[str, tuple[str, Score]] = {
    "accuracy": ("predictions", _accuracy),
    "accuracy+f1": ("predictions", _accuracy_and_f1),
    "matthews": ("predictions", _matthews),
    "correlation": ("predictions", _correlation),
    "bleu": ("ngrams", _bleu),
    "perplexity": ("losses", _perplexity),
}
"""Name in `METRICS` → an array that the score is computed from, and the score, before it is scaled."""
