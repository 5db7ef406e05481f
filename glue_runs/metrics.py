"""Metrics of whole data sets, on scikit-learn, SciPy and sacreBLEU.

Values are as the libraries return them: accuracy and F1 up to 1, correlations from −1 to 1 (papers print those of
GLUE times 100), BLEU by sacreBLEU up to 100, perplexity from 1.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor
from torch.nn.functional import cross_entropy

from collab_compress.devices import float64_device
from collab_compress.errors import DataError, one_line
from collab_compress.transformers_parts import UNLABELLED

__all__ = ["METRICS", "Metric", "load_metric", "token_losses"]


@dataclass(frozen=True)
class Metric:
    """A metric of a whole data set.

    Args:
        function: predictions and references (a row each) → results by name.
        scores: names of the results that the benchmark averages to one number.
        scale: factor of the benchmark.
        greater_is_better: whether it is.
    """

    function: Callable[..., dict[str, float]]
    scores: tuple[str, ...]
    scale: float = 1.0
    greater_is_better: bool = True

    def compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        """Return the results on a whole set.

        Raises:
            DataError: the set is empty, or cannot be scored.
        """
        if not len(predictions):
            raise DataError("nothing to score; the predictions are empty")
        try:
            return self.function(predictions, references)
        except (TypeError, ValueError) as error:
            raise DataError(f"these values cannot be scored: {one_line(error)}") from error

    def benchmark_score(self, results: Mapping[str, float]) -> float:
        """Return the mean of the results that the benchmark averages, in its scale."""
        return float(self.scale * sum(results[name] for name in self.scores) / len(self.scores))


def accuracy(predictions: Any, references: Any) -> dict[str, float]:
    """Return the share of classes predicted right."""
    predicted, labels = _classes(predictions, references)
    return {"accuracy": float(accuracy_score(labels, predicted))}


def accuracy_and_f1(predictions: Any, references: Any) -> dict[str, float]:
    """Return accuracy, and F1 of class 1 of two; F1 is 0 where class 1 is neither predicted nor a reference."""
    predicted, labels = _classes(predictions, references)
    if other := {*predicted.tolist(), *labels.tolist()} - {0, 1}:
        raise DataError(f"F1 needs two classes, 0 and 1; got class {min(other)}")
    f1 = f1_score(labels, predicted, zero_division=0.0)
    return {"accuracy": float(accuracy_score(labels, predicted)), "f1": float(f1)}


def matthews(predictions: Any, references: Any) -> dict[str, float]:
    """Return Matthews correlation; 0 where all predictions or all references are of one class."""
    predicted, labels = _classes(predictions, references)
    is_constant = len(np.unique(predicted)) == 1 or len(np.unique(labels)) == 1
    return {"matthews_correlation": 0.0 if is_constant else float(matthews_corrcoef(labels, predicted))}


def correlation(predictions: Any, references: Any) -> dict[str, float]:
    """Return Pearson and Spearman correlation.

    0 where all predictions, or all references, are the same; NaN where a prediction is not finite.
    """
    x, y = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return {"pearson": math.nan, "spearmanr": math.nan}
    if (x == x[0]).all() or (y == y[0]).all():
        return {"pearson": 0.0, "spearmanr": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # predictions may be nearly the same
        return {"pearson": float(pearsonr(x, y).statistic), "spearmanr": float(spearmanr(x, y).statistic)}


def bleu(
    predictions: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, float]:
    """Return corpus BLEU, from 0 to 100, of detokenized text."""
    if tokenize not in list(BLEU.TOKENIZERS):
        raise DataError(f"unknown tokenizer {tokenize!r}; expected one of {', '.join(sorted(BLEU.TOKENIZERS))}")
    try:
        force = tokenize == "none"  # tokenized texts are intended: do not warn
        metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=force)
    except (ImportError, RuntimeError) as error:  # what it needs is not installed
        raise DataError(f"tokenizer {tokenize!r} cannot be used: {one_line(error)}") from error
    score = metric.corpus_score(list(predictions), [list(references)])
    ratio = score.sys_len / score.ref_len if score.ref_len else 0.0
    return {"bleu": float(score.score), "brevity_penalty": float(score.bp), "length_ratio": ratio}


def bleu_compounds_split(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return corpus BLEU of German, from 0 to 100, with compounds split at their hyphens.

    As reported by "Attention Is All You Need" and papers that compare with it, by tensor2tensor's `get_ende_bleu.sh`:
    "rich-text format" is `rich ##AT##-##AT## text format`, so a hyphen is a word that may match. As in that script a
    hyphen stays where a single letter separates it from the previous one. Tokens are mteval's (13a) where the script
    has Moses', and punctuation is not normalised: scores are close to the script's, not equal.
    """
    ours, theirs = (list(map(_split_compounds, lines)) for lines in (predictions, references))
    return {"bleu_compounds_split": bleu(ours, theirs, tokenize="none")["bleu"]}


def perplexity(predictions: Any, references: Any) -> dict[str, float]:
    """Return exp(Σ nll / Σ tokens), and the mean negative log-likelihood of a token ("nll", in nats).

    Where tokens are subwords, count words to compare with the perplexities of papers.
    """
    losses, counts = np.asarray(predictions, np.float64), np.asarray(references, np.int64)
    tokens = int(counts.sum())
    if tokens <= 0 or counts.min() < 0:
        raise DataError(f"the token counts sum to {tokens}; expected more than 0, and no negative counts")
    try:
        nll = math.fsum(losses) / tokens
    except (OverflowError, ValueError):  # beyond float64, or inf − inf
        with np.errstate(over="ignore", invalid="ignore"):
            nll = float(losses.sum() / tokens)
    return {"perplexity": math.inf if nll >= math.log(1e308) else math.exp(nll), "nll": nll}


def _classes(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return classes as arrays; refuse references without a label."""
    predicted, labels = np.asarray(predictions), np.asarray(references)
    if labels.min() < 0:
        raise DataError("a reference is −1, which stands for no label; a test split without labels cannot be scored")
    return predicted, labels


def _split_compounds(line: str) -> str:
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", Tokenizer13a()(line))


def token_losses(logits: Tensor, labels: Tensor, *, shift: bool = True) -> Tensor:
    """Return the summed negative log-likelihood of each row's labels, and their number, (B, 2) in float64.

    Args:
        logits: (B, T, V).
        labels: (B, T); −100 is no label.
        shift: whether position t predicts label t + 1, as in a decoder without an encoder; otherwise label t.
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    try:
        losses = cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=UNLABELLED, reduction="none")
    except IndexError as error:  # on a CPU; an accelerator asserts
        raise DataError(
            f"a label is none of the {logits.shape[-1]} classes of the logits: {one_line(error)}"
        ) from error
    both = torch.stack([losses, (labels != UNLABELLED).to(losses)])
    return both.to(float64_device(losses.device)).double().sum(2).T


# name → metric
METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, ("accuracy",), scale=100.0),
    "accuracy+f1": Metric(accuracy_and_f1, ("accuracy", "f1"), scale=100.0),
    "matthews": Metric(matthews, ("matthews_correlation",), scale=100.0),
    "correlation": Metric(correlation, ("pearson", "spearmanr"), scale=100.0),
    "bleu": Metric(bleu, ("bleu",)),
    "bleu-compounds-split": Metric(bleu_compounds_split, ("bleu_compounds_split",)),
    "perplexity": Metric(perplexity, ("perplexity",), greater_is_better=False),
}


def load_metric(name: str, **options: Any) -> Metric:
    """Return a metric of `METRICS`.

    Args:
        name: of the metric.
        options: tokenize and lowercase, for BLEU.

    Raises:
        DataError: the metric is unknown.
    """
    if name not in METRICS:
        raise DataError(f"unknown metric {name!r}; expected one of {', '.join(METRICS)}")
    metric = METRICS[name]
    return replace(metric, function=partial(metric.function, **options)) if options else metric
