"""Measures of heads that experiments record of their trained models, as in the papers' tables."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis import (
    JointCovariance,
    alpha_matrices,
    bhattacharyya,
    cka,
    discrepancy,
    dominant_heads,
    head_covariances,
    mean_over_pairs,
    mixing_matrices,
    pruning_curve,
    svcca,
)
from collab_compress.analysis.diversity import Measure as DiscrepancyMeasure
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import forward_arguments
from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe
from collab_compress.experiments.record import lacking, read_record, write_record
from collab_compress.experiments.workload import Workload
from collab_compress.heads import alphas_of, confidence, head_importance

ROWS = 256
"""Rows that heads are looked at on, drawn once and for all."""

SCORED = 128
"""Of these, rows that a model is scored on without some of its heads; the others choose the heads."""

SHARES = tuple(step / 8 for step in range(9))
"""Of the heads, points of the pruning curve."""

DIGITS = {"mixing": 4, "alphas": 4}
"""Significant digits of large matrices; other numbers have six."""

BATCH = 64

Value = TypeVar("Value")


class Subject:
    """A stage's model, and the rows that it is measured on: of the validation data, or of the test data without any.

    Args:
        workload: the task, and the recipe.
        model: what is measured.
        tokenizer: of the model.
    """

    def __init__(self, workload: Workload, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.workload, self.model, self.tokenizer = workload, model, tokenizer
        scored = workload.scored()
        self.split = next((name for name in scored if name.startswith("validation")), scored[0])
        texts = DatasetDict({self.split: workload.texts[self.split]})
        rows: Dataset = workload.encode(texts, tokenizer)[self.split]
        known = {*forward_arguments(model), "labels"}
        self._rows = rows.select_columns([name for name in rows.column_names if name in known])
        self._order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        self._collate = workload.collator(model, tokenizer)

    def places(self, first: int = 0, end: int = ROWS) -> list[int]:
        """Return which rows of the split are looked at, the same ones for all models; long ones come first."""
        return sorted(self._order[first:end], key=lambda place: -len(self._rows[place]["input_ids"]))

    def batches(self, places: list[int]) -> list[Batch]:
        """Return batches of rows of the split, with labels."""
        found = []
        for start in range(0, len(places), BATCH):
            batch = dict(self._collate([self._rows[place] for place in places[start : start + BATCH]]))
            if "decoder_input_ids" in batch:
                # where something is predicted; a target that is padded ends with a token after which nothing comes
                batch["decoder_attention_mask"] = (batch["labels"] != -100).long()
            found.append(batch)
        return found

    @cached_property
    def batches_of_all(self) -> list[Batch]:
        """Batches of all rows that heads are looked at on."""
        return self.batches(self.places())

    @cached_property
    def scoring(self) -> list[int]:
        """Rows that score a model without some of its heads: up to half of those that are looked at."""
        return self.places(0, min(SCORED, len(self._order[:ROWS]) // 2))

    @cached_property
    def choosing(self) -> list[int]:
        """Rows that choose the heads; none of them is in `scoring`."""
        return self.places(len(self.scoring))

    @cached_property
    def covariances(self) -> dict[str, JointCovariance]:
        """Return the responses of heads by layer, for layers with several heads."""
        found = head_covariances(self.model, self.batches_of_all)
        return {name: each for name, each in found.items() if len(each.widths) > 1}

    def by_kind(self, values: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Group the values of modules by kind of attention, in the order of layers."""
        found: dict[str, list[Value]] = {}
        for site in find_attention(self.model, FAMILIES):
            own = [
                value for name, value in values.items() if name.partition("[")[0] == site.name
            ]  # ALBERT's are many
            if own:
                found.setdefault(site.kind, []).extend(own)
        return found

    @property
    def _translates(self) -> bool:
        return self.workload.task.kind == "translation"

    def scorer(self, places: list[int]) -> Callable[[PreTrainedModel], float]:
        """Return a function that scores a model by the task's metric on some rows; translation is greedy."""
        batches = self.batches(places)
        texts = self.workload.texts[self.split]
        references = [texts[place]["target"] for place in places] if self._translates else []
        return lambda model: self._score(model, batches, references)

    def _score(self, model: PreTrainedModel, batches: list[Batch], references: list[str]) -> float:
        metric = self.workload.metric
        with evaluation_mode(model):
            if self._translates:
                written = [line for batch in batches for line in self._translated(model, batch)]
                found = metric.compute(predictions=written, references=references)
            else:
                shrink = self.workload.options(self.tokenizer).get("preprocess_logits_for_metrics")
                outputs, labels = [], []
                for batch in batches:
                    logits, own = run_batch(model, batch).logits.cpu(), batch["labels"]
                    outputs.append(logits if shrink is None else shrink(logits, own))
                    labels.append(own)
                # labels of running text are not looked at once its logits are
                wanted = torch.cat(labels).numpy() if shrink is None else None
                found = self.workload.compute_metrics(EvalPrediction(torch.cat(outputs).float().numpy(), wanted))
        return float(metric.scale * sum(found[name] for name in metric.scores) / len(metric.scores))

    def _translated(self, model: Any, batch: Batch) -> list[str]:
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        length = self.workload.recipe.translation.max_length
        found = model.generate(**inputs, num_beams=1, do_sample=False, max_length=length)
        lines: list[str] = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        return lines


def measure_svcca(subject: Subject) -> Any:
    """Similarity of heads by SVCCA, mean over pairs, of each layer; and the last layers' curves of coefficients.

    "Inter-Head Diversity", Tables 3 and 5 and Figures 3 and 4.
    """
    found = subject.by_kind({name: svcca(each) for name, each in subject.covariances.items()})
    return found and {
        "layers": {kind: [each.mean for each in layers] for kind, layers in found.items()},
        "curve": {kind: layers[-1].curve for kind, layers in found.items()},
    }


def measure_cka(subject: Subject) -> Any:
    """Similarity of heads by CKA, mean over pairs, of each layer: "Inter-Head Diversity", Tables 3 and 5."""
    found = {name: mean_over_pairs(cka(each)) for name, each in subject.covariances.items()}
    return found and {"layers": subject.by_kind(found)}


def measure_confidence(subject: Subject) -> Any:
    """Confidence of each head of each layer: "Multi-Head Rotation", Figure 5."""
    ends = subject.model.config.eos_token_id, subject.tokenizer.eos_token_id, subject.tokenizer.sep_token_id
    exclude = {each for end in ends for each in (end if isinstance(end, list) else [end]) if each is not None}
    return subject.by_kind(confidence(subject.model, subject.batches_of_all, exclude=exclude))


def measure_discrepancy(subject: Subject) -> Any:
    """Total discrepancy of the heads of each layer: "Multi-Head Rotation", Figures 6 and 7."""
    found = discrepancy(subject.model, subject.batches_of_all)
    measures: tuple[DiscrepancyMeasure, ...] = ("cosine", "difference", "l2")
    norms = {name: {measure: each.norm(measure) for measure in measures} for name, each in found.items()}
    return subject.by_kind(norms)


def measure_overlap(subject: Subject) -> Any:
    """Bhattacharyya coefficient of two heads' attention, mean over pairs: "Diversified Attention", equation 3."""
    found = bhattacharyya(subject.model, subject.batches_of_all)
    return subject.by_kind({name: mean_over_pairs(each) for name, each in found.items() if len(each) > 1})


def measure_dominance(subject: Subject) -> Any:
    """The task's score without the dominant head of a layer, mean over layers: "Scheduled DropHead", Table 4."""
    better = subject.workload.metric.greater_is_better
    chosen = dominant_heads(subject.model, subject.scorer(subject.choosing), greater_is_better=better).dominant
    found = dominant_heads(subject.model, subject.scorer(subject.scoring), greater_is_better=better, heads=chosen)
    changes = found.mean_change(chosen)
    return {"score": found.baseline} | {kind: found.baseline + change for kind, change in changes.items()}


def measure_pruning(subject: Subject) -> Any:
    """The task's score without the least important heads, more and more: "Scheduled DropHead", Figure 3."""
    importance = head_importance(subject.model, subject.batches(subject.choosing))
    found = pruning_curve(subject.model, importance, subject.scorer(subject.scoring), shares=SHARES)
    return {"shares": list(SHARES), "scores": [point.score for point in found]}


def measure_mixing(subject: Subject) -> Any:
    """Mixing matrices of the layers whose heads share projections: "Collaborate Instead of Concatenate", Figure 2."""
    mixed = {site.name for site in find_attention(subject.model, FAMILIES) if hasattr(site.module, "mixing")}
    if not mixed:
        return None
    found = mixing_matrices(subject.model)
    return subject.by_kind({name: each for name, each in found.items() if name in mixed})


def measure_alphas(subject: Subject) -> Any:
    """Alphas of the layers whose heads are mixed: "Multi-Head Rotation", Figures 3 and 4."""
    return subject.by_kind(alpha_matrices(subject.model)) if alphas_of(subject.model) else None


Measure: TypeAlias = Callable[[Subject], Any]

MEASURES: dict[str, Measure] = {
    "svcca": measure_svcca,
    "cka": measure_cka,
    "confidence": measure_confidence,
    "discrepancy": measure_discrepancy,
    "overlap": measure_overlap,
    "dominance": measure_dominance,
    "pruning": measure_pruning,
    "mixing": measure_mixing,
    "alphas": measure_alphas,
}
"""Name of a measure → what it finds, as numbers, tensors, lists and mappings; nothing where a model has none."""


def check_measures(recipe: Recipe) -> None:
    """Refuse measures that are not there.

    Raises:
        RecipeError: naming those that are there.
    """
    for name in recipe.measures:
        if name not in MEASURES:
            raise RecipeError(f"unknown measure {name!r}; expected some of {', '.join(MEASURES)}")


def add_measures(workload: Workload, directory: str | Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Measure what the record of a stage lacks, and write it there after each measure.

    Under `measures` stands what was found; under `measured` which measures were taken, those that do not apply to the
    model too, on which split, how many rows of it, and on how many of these the model was scored.

    Args:
        workload: the task, and the recipe, which names the measures.
        directory: of the stage's model.
        tokenizer: of the model.
        folder: of the stage.
    """
    path = folder / "result.json"
    names = lacking(read_record(path), workload.recipe.measures)
    if not names:
        return
    model: Any = workload.load_model(directory).to(process_state().device)
    subject = Subject(workload, model, tokenizer)
    how = {"split": subject.split, "rows": len(subject.places()), "scored": len(subject.scoring)}
    for name in names:
        found = MEASURES[name](subject)
        record = read_record(path)
        record["measured"] = {**record.get("measured", {}), name: how}
        if found:
            numbers = _rounded(found, DIGITS.get(name, 6))
            record["measures"] = {**record.get("measures", {}), name: numbers}
        write_record(path, record)


def _rounded(value: Any, digits: int) -> Any:
    """Turn tensors into lists, and cut numbers to significant digits."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _rounded(each, digits) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}")
