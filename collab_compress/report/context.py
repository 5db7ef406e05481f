"""What a report is made of: models, data and options, and the measures that several sections use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from posixpath import commonpath
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis import Discrepancy, confidence, mean_over_pairs, with_progress
from collab_compress.analysis.covariance import Covariances, Samples
from collab_compress.analysis.diversity import summed_coefficients, summed_distances
from collab_compress.analysis.patterns import pattern_means
from collab_compress.analysis.stream import Means, Observer, Progress, observed
from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention import is_converted
from collab_compress.calibration import Batch
from collab_compress.calibration.batches import sequence_count, slice_batch
from collab_compress.calibration.gather import attention_masks
from collab_compress.conversion.feed_forward import FeedForward, find_feed_forward
from collab_compress.errors import HeadError
from collab_compress.heads.importance import end_tokens
from collab_compress.options import ReportOptions
from collab_compress.report.section import Heatmap, heatmap

WIDEST = 10_000  # L·H·d up to which layers are compared: memory and time grow with its square
SAME_TOKENS: tuple[tuple[Kind, ...], ...] = (("encoder",), ("decoder", "cross"))  # types that read the same tokens


class HeadMeasures:
    """The measures of one of a context's models in one pass over all batches; keys are those of `head_covariances`.

    With `similar`, covariances too: of all modules that read the same tokens together, or of each alone where they
    are too wide together.
    """

    def __init__(self, context: ReportContext, model: PreTrainedModel, name: str, similar: bool) -> None:
        self.name = name
        self.samples = Samples(context.options.kernel_tokens, context.options.seed)  # same tokens in both models
        self.covariances: list[Covariances] = []
        for kinds in SAME_TOKENS if similar else ():
            sites = [site for site in find_attention(model) if site.kind in kinds]
            # a single module may serve all layers (ALBERT)
            uses = getattr(model.config, "num_hidden_layers", 1) if len(sites) == 1 else 1
            if sites:
                together = uses * sum(site.width for site in sites) <= WIDEST
                self.covariances.append(Covariances(kinds=kinds, together=together))
        distances, overlaps = Means("outputs", summed_distances), Means("probs", summed_coefficients)
        patterns = pattern_means()
        observers: list[Observer] = [self.samples, distances, overlaps, *patterns.values(), *self.covariances]
        with closing(observed(model, context.batches, observers)) as watched:
            batches = with_progress(watched, context.progress(f"heads of {name}"), "heads")
            self.confidence = confidence(model, batches, exclude=end_tokens(model, context.tokenizer))
        self.patterns = patterns
        self.discrepancy = {name: Discrepancy.of(means) for name, means in distances.result().items()}
        self.overlap = overlaps.result()

    @property
    def distances(self) -> dict[str, Tensor]:
        """Mean distance of each head from the others of its module, (H,); NaN for a single head."""
        return {name: module.l2.sum(1) / (len(module.l2) - 1) for name, module in self.discrepancy.items()}

    @property
    def mean_overlaps(self) -> list[float | None]:
        """Overlap of each module, mean over pairs; None for a single head."""
        return [mean_over_pairs(matrix) if len(matrix) > 1 else None for matrix in self.overlap.values()]


@dataclass(frozen=True)
class TaskScore:
    """A score of a model on a task.

    Args:
        name: of the score, as `accuracy on 408 rows of mrpc`.
        score: function from a model to its score.
        choose: the same on other data, which chooses heads.
        batches: labelled batches that choose heads, for the gradient of the loss.
        greater_is_better: whether a greater score is better.

    Example:
        >>> def score(model):
        ...     return float(model(**batch).last_hidden_state.mean())
        >>> context = ReportContext(model, [batch], score=TaskScore("mean output", score, score, [batch]))
    """

    name: str
    score: Callable[[PreTrainedModel], float]
    choose: Callable[[PreTrainedModel], float]
    batches: Sequence[Batch]
    greater_is_better: bool = True


@dataclass(frozen=True)
class ReportContext:
    """The models and data of a report, and its options.

    Args:
        model: stock or edited, of a known family; does not change.
        batches: keyword arguments for the model, in random order; read several times.
        name: of the model.
        data: description of the batches.
        baseline: a model to compare with, which reads the same batches, or None.
        baseline_name: of the baseline.
        tokenizer: of the model; required for attention maps.
        sentence: text, or pair of texts, for attention maps; (text, target) for an encoder–decoder.
        score: a task to score heads on, in place of the drift of the outputs.
        options: how much to measure.
        on_progress: called with the measure, the number of finished items and their total (or None).

    Raises:
        HeadError: there are no batches, or the models read different vocabularies.
        UnsupportedModelError: a model's family is not known.

    Example:
        >>> context = ReportContext(model, [batch], name="tiny BERT")
        >>> context.sequences, context.tokens, context.kinds
        (2, 10, ('encoder',))
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
    options: ReportOptions = field(default_factory=ReportOptions)
    on_progress: Callable[[str, int, int | None], None] | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise HeadError("no batches to measure the model on; pass some")
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
        return find_attention(self.model)

    @cached_property
    def places(self) -> dict[str, tuple[Kind, int]]:
        """Path of an attention module in either model → its type, and its index among those of this type."""
        others = [] if self.baseline is None else find_attention(self.baseline)
        return {site.name: (site.kind, site.layer) for site in [*others, *self.sites]}

    @cached_property
    def blocks(self) -> list[FeedForward]:
        """Feed-forward blocks of the model.

        Raises:
            UnsupportedModelError: it has none whose neurons can be removed.
        """
        return find_feed_forward(self.model, self.batches[0])

    @cached_property
    def heads(self) -> HeadMeasures:
        """The measures of the model's heads."""
        return HeadMeasures(self, self.model, self.name, similar=True)

    @cached_property
    def baseline_heads(self) -> HeadMeasures | None:
        """The measures of the baseline's heads, without covariances; None without a baseline."""
        if self.baseline is None:
            return None
        return HeadMeasures(self, self.baseline, self.baseline_name, similar=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Attention types that the model has."""
        present = {site.kind for site in self.sites}
        return tuple(kind for kind in KINDS if kind in present)

    @property
    def converted(self) -> bool:
        """Whether scores or values of any attention module are converted."""
        return any(is_converted(site.module) for site in self.sites)

    @property
    def sequences(self) -> int:
        """Number of sequences in the batches."""
        return sum(map(sequence_count, self.batches))

    @property
    def tokens(self) -> int:
        """Number of query tokens in the batches without padding, for the first attention type; 0 if not known."""
        count = 0
        for batch in self.batches:
            mask = attention_masks(self.model, (), (), batch)[self.kinds[0]].query
            ids = batch.get("input_ids")
            if mask is not None:
                count += int(mask.sum())
            elif isinstance(ids, Tensor):
                count += ids.numel()
        return count

    def first(self, sequences: int) -> list[Batch]:
        """Return the first batches, with at most this many sequences in all."""
        batches, missing = [], sequences
        for batch in self.batches:
            if missing < 1:
                break
            batches.append(slice_batch(batch, slice(missing)))
            missing -= sequence_count(batch)
        return batches

    def progress(self, label: str) -> Progress:
        """Return the `progress` argument of a measure; an unknown total is the number of batches."""
        report = self.on_progress
        return False if report is None else lambda done, total: report(label, done, total or len(self.batches))

    def label(self, module: str) -> str:
        """Return the short name of a module or use (`path[2]`): its layer, and its type if there are several.

        A feed-forward block has that of the attention module with the most of its path in common.
        """
        path, _, use = module.removesuffix("]").partition("[")
        if path not in self.places:
            path = max(
                self.places, key=lambda other: len(commonpath([other.replace(".", "/"), path.replace(".", "/")]))
            )
        kind, place = self.places[path]
        layer = use or str(place)
        return layer if len(self.kinds) == 1 else f"{kind} {layer}"

    def head_maps(self, matrices: Mapping[str, Tensor]) -> list[Heatmap]:
        """Return a heatmap of each module's matrix, with a head in each row and numbered columns."""
        return [heatmap(f"layer {self.label(name)}", matrix) for name, matrix in matrices.items()]

    def layer_map(self, title: str, vectors: Mapping[str, Tensor]) -> Heatmap:
        """Return a heatmap of each module's vector (H,), a row each."""
        return heatmap(title, list(vectors.values()), list(map(self.label, vectors)))
