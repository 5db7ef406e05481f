"""Perplexity of a whole set: every token counts the same, in whatever batch it was."""

import math
from collections.abc import Sequence

import torch
from datasets import Value
from torch import Tensor
from torch.nn.functional import cross_entropy

from collab_compress.errors import DataError
from collab_compress.metrics.base import Metric


class Perplexity(Metric):
    """exp(Σ nll / Σ tokens), and the mean nll a token ("nll", in nats).

    Predictions are summed negative log-likelihoods, of a row or of a batch; references are how many tokens each is
    the sum of. Both come from `token_losses`. Where tokens are subwords, count words instead to compare with the
    perplexities of papers.
    """

    scores = ("perplexity",)
    greater_is_better = False
    formats = ({"predictions": Value("float64"), "references": Value("int64")},)

    def _score(self, predictions: Sequence[float], references: Sequence[int]) -> dict[str, float]:
        tokens = sum(references)
        if tokens <= 0 or min(references) < 0:
            raise DataError(f"perplexity is over {tokens} tokens; expected some, and no negative counts")
        nll = math.fsum(predictions) / tokens
        return {"perplexity": math.exp(nll) if nll < math.log(1e308) else math.inf, "nll": nll}


def token_losses(logits: Tensor, labels: Tensor, *, shift: bool = True) -> Tensor:
    """Sum the negative log-likelihood of each row's labels.

    Args:
        logits: (B, T, V).
        labels: (B, T); −100 is no label.
        shift: whether position t predicts label t + 1, as in a decoder without an encoder; otherwise label t.

    Returns:
        Row by row the sum and the number of labels it is over, (B, 2), in double precision.
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=-100, reduction="none")
    return torch.stack([losses.double().sum(1), (labels != -100).double().sum(1)], dim=1)
