"""Metrics of whole data sets, added batch by batch.

Values are as the libraries return them: accuracy and F1 up to 1, correlations from −1 to 1 (papers print those of
GLUE times 100), BLEU by sacreBLEU up to 100, perplexity from 1.
"""

import math
import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
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

__all__ = [
    "METRICS",
    "Accuracy",
    "AccuracyAndF1",
    "Bleu",
    "BleuCompoundsSplit",
    "Correlation",
    "Matthews",
    "Metric",
    "Perplexity",
    "load_metric",
    "token_losses",
]

CLASSES = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
NUMBERS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}


class Metric(evaluate.Metric):  # type: ignore[misc]
    """An `evaluate.Metric` that needs no network and no files.

        metric.add_batch(predictions=..., references=...)   # for each batch
        result = metric.compute()

    All predictions are kept in memory until `compute`, so results are those of the whole set, not means over batches.
    The metric is empty afterwards. Rows that a sampler repeats to fill its last batch count twice: remove them first,
    as the Trainer and `gather_for_metrics` of Accelerate do.
    """

    scores: ClassVar[tuple[str, ...]]
    """Names of the results that the benchmark averages to one number."""

    scale: ClassVar[float] = 1.0
    """Factor of the benchmark."""

    greater_is_better: ClassVar[bool] = True
    formats: ClassVar[tuple[dict[str, Any], ...]]
    """Possible types of a prediction and a reference; the first that fits is used."""

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def benchmark_score(self, results: Mapping[str, float]) -> float:
        """Return the mean of the results that the benchmark averages, in its scale."""
        return float(self.scale * sum(results[name] for name in self.scores) / len(self.scores))

    def _info(self) -> evaluate.MetricInfo:
        formats = [datasets.Features(types) for types in self.formats]
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation="",
            inputs_description="",
            features=formats if len(formats) > 1 else formats[0],
        )

    def _build_data_dir(self) -> str:
        """Return no folder: nothing is written to files."""
        return ""

    def compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float]:
        """Return the results on all added batches and on this one."""
        if self.writer is None and not any(
            values is not None and len(values) for values in (predictions, references)
        ):
            return self._compute([], [])  # nothing was added in this process
        result: dict[str, float] = super().compute(predictions=predictions, references=references, **options)
        return result

    def add_batch(self, *, predictions: Any = None, references: Any = None, **options: Any) -> None:
        """Add the predictions and references of a batch."""
        try:
            super().add_batch(predictions=predictions, references=references, **options)
        except (OverflowError, ValueError) as error:
            raise DataError(f"{type(self).__name__} cannot score these values: {one_line(error)}") from error

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Score all rows."""
        if not len(predictions):
            raise DataError("nothing to score; add predictions and references before compute()")
        return self._score(predictions, references)

    @abstractmethod
    def _score(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Return the results on a whole set, which must not be empty."""


class ClassMetric(Metric):
    """Base of metrics of predicted classes, which refuses references without a label."""

    scale = 100.0
    formats = (CLASSES,)

    def _score(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        if min(references) < 0:
            raise DataError(
                "a reference is −1, which stands for no label; a test split without labels cannot be scored"
            )
        return self._class_scores(predictions, references)

    @abstractmethod
    def _class_scores(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        """Return the results on a whole set with labels."""


class Accuracy(ClassMetric):
    """Share of classes predicted right."""

    scores = ("accuracy",)

    def _class_scores(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}


class AccuracyAndF1(ClassMetric):
    """Accuracy, and F1 of class 1 of two; F1 is 0 where class 1 is neither predicted nor a reference."""

    scores = ("accuracy", "f1")

    def _class_scores(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        if other := {*predictions, *references} - {0, 1}:
            raise DataError(f"F1 needs two classes, 0 and 1; got class {min(other)}")
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, zero_division=0.0)),
        }


class Matthews(ClassMetric):
    """Matthews correlation of predicted classes; 0 where all predictions or all references are of one class."""

    scores = ("matthews_correlation",)

    def _class_scores(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        if len(set(predictions)) == 1 or len(set(references)) == 1:
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


class Correlation(Metric):
    """Pearson and Spearman correlation of scores.

    0 where all predictions, or all references, are the same; NaN where a prediction is not finite.
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
            warnings.simplefilter("ignore")  # predictions may be nearly the same
            return {"pearson": float(pearsonr(x, y).statistic), "spearmanr": float(spearmanr(x, y).statistic)}


class Bleu(Metric):
    """Corpus BLEU, from 0 to 100, of detokenized text against one or several references.

    Args:
        tokenize: sacreBLEU's tokenizer: 13a, intl, zh, char, none, …
        lowercase: whether case is ignored.
    """

    scores = ("bleu",)
    formats = (
        {"predictions": datasets.Value("string"), "references": datasets.Value("string")},
        {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))},
    )

    def __init__(self, tokenize: str = "13a", lowercase: bool = False) -> None:
        if tokenize not in list(BLEU.TOKENIZERS):
            raise DataError(f"unknown tokenizer {tokenize!r}; expected one of {', '.join(sorted(BLEU.TOKENIZERS))}")
        try:
            BLEU(tokenize=tokenize)
        except (ImportError, RuntimeError) as error:  # what it needs is not installed
            raise DataError(f"tokenizer {tokenize!r} cannot be used: {one_line(error)}") from error
        super().__init__()
        self.tokenize, self.lowercase = tokenize, lowercase
        self.signature: str | None = None
        """sacreBLEU's signature of the last score, to be reported with it."""

    def _score(
        self, predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
    ) -> dict[str, float]:
        rows = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
        counts = {len(row) for row in rows}
        if len(counts) > 1 or 0 in counts:
            raise DataError(f"all sentences need the same number of references; got {sorted(counts)}")
        force = self.tokenize == "none"  # tokenized texts are intended: do not warn
        bleu = BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=force)
        score = bleu.corpus_score(list(predictions), [list(stream) for stream in zip(*rows, strict=True)])
        self.signature = str(bleu.get_signature())
        return {
            "bleu": float(score.score),
            "brevity_penalty": float(score.bp),
            "length_ratio": score.sys_len / score.ref_len if score.ref_len else 0.0,
        }


class BleuCompoundsSplit(Bleu):
    """Corpus BLEU of German, from 0 to 100, with compounds split at their hyphens.

    As reported by "Attention Is All You Need" and papers that compare with it, by tensor2tensor's `get_ende_bleu.sh`:
    "rich-text format" is `rich ##AT##-##AT## text format`, so a hyphen is a word that may match. As in that script a
    hyphen stays where a single letter separates it from the previous one. Tokens are mteval's (13a) where the script
    has Moses', and punctuation is not normalised: scores are close to the script's, not equal.

    Args:
        lowercase: whether case is ignored.
    """

    scores = ("bleu_compounds_split",)

    def __init__(self, lowercase: bool = False) -> None:
        super().__init__("none", lowercase)

    def _score(
        self, predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
    ) -> dict[str, float]:
        rows = [[row] if isinstance(row, str) else row for row in references]
        result = super()._score(
            [_split_compounds(line) for line in predictions],
            [[_split_compounds(line) for line in row] for row in rows],
        )
        if self.signature is not None:
            self.signature = self.signature.replace("tok:none", "tok:13a-compounds-split")
        return {"bleu_compounds_split": result["bleu"]}


def _split_compounds(line: str) -> str:
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", Tokenizer13a()(line))


class Perplexity(Metric):
    """exp(Σ nll / Σ tokens), and the mean negative log-likelihood of a token ("nll", in nats).

    Predictions are negative log-likelihoods, summed over a row or a batch; references are the numbers of tokens. Both
    come from `token_losses`. Where tokens are subwords, count words to compare with the perplexities of papers.
    """

    scores = ("perplexity",)
    greater_is_better = False
    formats = ({"predictions": datasets.Value("float64"), "references": datasets.Value("int64")},)

    def _score(self, predictions: Sequence[float], references: Sequence[int]) -> dict[str, float]:
        tokens = sum(references)
        if tokens <= 0 or min(references) < 0:
            raise DataError(f"the token counts sum to {tokens}; expected more than 0, and no negative counts")
        try:
            nll = math.fsum(predictions) / tokens
        except (OverflowError, ValueError):  # beyond float64, or inf − inf
            with np.errstate(over="ignore", invalid="ignore"):
                nll = float(np.sum(predictions) / tokens)
        return {"perplexity": math.inf if nll >= math.log(1e308) else math.exp(nll), "nll": nll}


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
METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "accuracy+f1": AccuracyAndF1,
    "matthews": Matthews,
    "correlation": Correlation,
    "bleu": Bleu,
    "bleu-compounds-split": BleuCompoundsSplit,
    "perplexity": Perplexity,
}


def load_metric(name: str, **options: Any) -> Metric:
    """Return a metric of `METRICS`, without network access.

    Args:
        name: of the metric.
        options: tokenize and lowercase, for BLEU.

    Raises:
        DataError: the metric is unknown, or has no such option.
    """
    if name not in METRICS:
        raise DataError(f"unknown metric {name!r}; expected one of {', '.join(METRICS)}")
    try:
        return METRICS[name](**options)
    except TypeError as error:
        raise DataError(f"metric {name} does not take {', '.join(options)}; leave out what it lacks") from error
