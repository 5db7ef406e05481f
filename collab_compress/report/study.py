"""What a report looks at: how much (options), the passes over a model, and the study that sections read from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis import confidence, with_progress
from collab_compress.analysis.diversity import Coefficients, Discrepancies
from collab_compress.analysis.responses import Covariances, LayerCovariance, Samples
from collab_compress.analysis.stream import Observer, Progress, observed
from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention import is_converted
from collab_compress.calibration import Batch
from collab_compress.calibration.gather import real_tokens
from collab_compress.errors import HeadError
from collab_compress.options import Look

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


OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class TaskScore:
    """How well the model does on a task.

    Args:
        name: what the score is, as `accuracy on 408 rows of mrpc`.
        score: scores a model.
        choose: scores a model on other rows, which choose heads.
        batches: of the rows that choose heads, with labels, for the gradient of the loss.
        greater_is_better: whether a greater score is a better one.
    """

    name: str
    score: Callable[[PreTrainedModel], float]
    choose: Callable[[PreTrainedModel], float]
    batches: Sequence[Batch]
    greater_is_better: bool = True


@dataclass(frozen=True)
class Study:
    """What is looked at, and how much of it.

    Args:
        model: stock or edited, of a known family; left as it is.
        batches: keyword arguments for the model, in random order; read several times.
        name: of the model.
        data: what the batches are, in words.
        baseline: a model to compare with, which reads the same batches, or None.
        baseline_name: of that.
        tokenizer: of the model; needed for attention maps.
        sentence: text whose attention is shown, or (text, target) for an encoder–decoder; none is shown without.
        score: a task to score heads on; without it they are scored by the drift of the outputs.
        look: how much is looked at.
        on_progress: called with what is measured, how much of it is done and how much there is (or None).

    Raises:
        HeadError: there are no batches, or the models read different vocabularies.
        UnsupportedModelError: a model's family is not known.
    """

    model: PreTrainedModel
    batches: Sequence[Batch]
    name: str = "model"
    data: str = "the given batches"
    baseline: PreTrainedModel | None = None
    baseline_name: str = "baseline"
    tokenizer: Any = None
    sentence: str | tuple[str, str] | None = None
    score: TaskScore | None = None
    look: Look = field(default_factory=Look)
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise HeadError("no batches to look at the model with; pass some")
        _ = self.places  # refuses models of unknown families
        if self.baseline is None:
            return
        sizes = [getattr(model.config, "vocab_size", None) for model in (self.model, self.baseline)]
        if sizes[0] != sizes[1]:
            raise HeadError(
                f"{self.name} knows {sizes[0]} tokens and {self.baseline_name} {sizes[1]}; models that are compared "
                "read the same batches, so they must share a tokenizer"
            )

    @cached_property
    def sites(self) -> list[AttentionSite]:
        """Attention modules of the model."""
        return find_attention(self.model, FAMILIES)

    @cached_property
    def places(self) -> dict[str, tuple[Kind, int]]:
        """Path of an attention module, in either model → its kind, and its place among those of that kind."""
        others = [] if self.baseline is None else find_attention(self.baseline, FAMILIES)
        return {site.name: (site.kind, site.layer) for site in [*others, *self.sites]}

    @cached_property
    def seen(self) -> Pass:
        """What the heads of the model show in one pass over all batches."""
        return self._seen(self.model, self.name, similar=True)

    @cached_property
    def baseline_seen(self) -> Pass | None:
        """What the heads of the other model show, if there is one, but no covariances."""
        return None if self.baseline is None else self._seen(self.baseline, self.baseline_name, similar=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of attention that the model has."""
        present = {site.kind for site in self.sites}
        return tuple(kind for kind in KINDS if kind in present)

    @property
    def converted(self) -> bool:
        """Whether a map of an attention module of the model, scores or values, is in another form than the dense."""
        return any(is_converted(site.module) for site in self.sites)

    @property
    def sequences(self) -> int:
        """How many sequences the batches hold."""
        return sum(_rows(batch) for batch in self.batches)

    @property
    def tokens(self) -> int:
        """How many tokens that are no padding the batches hold: of the first kind of attention, as queries."""
        return sum(self._tokens(batch) for batch in self.batches)

    def some(self, sequences: int) -> list[Batch]:
        """Give the first batches, of so many sequences at most."""
        chosen, left = [], sequences
        for batch in self.batches:
            if left < 1:
                break
            chosen.append({name: value[:left] for name, value in batch.items()})
            left -= _rows(batch)
        return chosen

    def progress(self, label: str) -> Progress:
        """Give what a measure reports its progress to; where it cannot tell, there are as many as batches."""
        told = self.on_progress
        return False if told is None else lambda done, total: told(label, done, total or len(self.batches))

    def label(self, module: str) -> str:
        """Name a module, or a use of one (`path[2]`), in short: its layer, with its kind where there are several."""
        path, _, use = module.removesuffix("]").partition("[")
        kind, place = self.places[path]
        layer = use or str(place)
        return layer if len(self.kinds) == 1 else f"{kind} {layer}"

    def labels(self, modules: Mapping[str, Any]) -> list[str]:
        """Name modules in short."""
        return [self.label(module) for module in modules]

    def _seen(self, model: PreTrainedModel, name: str, similar: bool) -> Pass:
        samples = Samples(self.look.kernel_tokens, self.look.seed)  # of the same tokens in both models
        told = self.progress(f"heads of {name}")
        return pass_over(model, self.batches, self.tokenizer, samples, similar, told)

    def _tokens(self, batch: Batch) -> int:
        mask = real_tokens(self.model, (), (), batch)[self.kinds[0]].query
        if mask is not None:
            return int(mask.sum())
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else 0


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))
