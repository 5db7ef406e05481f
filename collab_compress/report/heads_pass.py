"""What all heads show in one pass over all batches: similarity and diversity are computed from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis import confidence, with_progress
from collab_compress.analysis.between import LayerCovariance
from collab_compress.analysis.diversity import Coefficients, Discrepancies
from collab_compress.analysis.responses import Covariances, Samples
from collab_compress.analysis.stream import Observer, Progress, observed
from collab_compress.architectures import FAMILIES, AttentionSite, Kind, find_attention
from collab_compress.calibration import Batch

WIDEST = 10_000  # L·H·d up to which layers are compared: memory and time grow with its square
TOGETHER: tuple[tuple[Kind, ...], ...] = (("encoder",), ("decoder", "cross"))  # read the same tokens


@dataclass(frozen=True)
class Pass:
    """What the heads of one model showed.

    Args:
        confidence: as `confidence` gives.
        distances: has what `discrepancy` gives.
        overlaps: has what `bhattacharyya` gives.
        samples: has what `head_samples` gives.
        layers: have what `layer_covariance` gives, by head, of modules that read the same tokens.
        heads: have what `head_covariances` gives, of modules that are too wide for that.
    """

    confidence: dict[str, Tensor]
    distances: Discrepancies
    overlaps: Coefficients
    samples: Samples
    layers: tuple[LayerCovariance, ...]
    heads: tuple[Covariances, ...]


def pass_over(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    tokenizer: Any,
    samples: Samples,
    similar: bool,
    progress: Progress,
) -> Pass:
    """Run a model over all batches once.

    Args:
        model: of a known family.
        batches: keyword arguments for it.
        tokenizer: of the model, or None; it says which tokens end a sequence.
        samples: draws tokens for kernels.
        similar: whether to gather covariances too.
        progress: as for the measures.

    Raises:
        HeadError: no token is real.
        CalibrationError: the model does not take such batches.
    """
    sites = find_attention(model, FAMILIES)
    layers, heads = [], []
    for kinds in TOGETHER if similar else ():
        chosen = [site for site in sites if site.kind in kinds]
        if chosen and _width(model, chosen) <= WIDEST:
            layers.append(LayerCovariance("head", kinds=kinds))
        elif chosen:
            heads.append(Covariances(kinds=kinds))
    distances, overlaps = Discrepancies(), Coefficients()
    observers: list[Observer] = [samples, distances, overlaps, *layers, *heads]
    with closing(observed(model, batches, observers)) as watched:
        sure = confidence(model, with_progress(watched, progress, "heads"), exclude=_ends(tokenizer, model))
    return Pass(sure, distances, overlaps, samples, tuple(layers), tuple(heads))


def _width(model: Any, sites: Collection[AttentionSite]) -> int:
    """Width of all layers side by side; a single module may serve several (ALBERT)."""
    uses = getattr(model.config, "num_hidden_layers", 1) if len(sites) == 1 else 1
    return uses * sum(site.width for site in sites)


def _ends(tokenizer: Any, model: Any) -> set[int] | None:
    """Tokens that end a sequence: the config's, and the tokenizer's where there is one; BERT's config names none."""
    if tokenizer is None:
        return None
    named = getattr(model.config, "eos_token_id", None)
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id, tokenizer.sep_token_id]
    return {token for token in ends if token is not None}
