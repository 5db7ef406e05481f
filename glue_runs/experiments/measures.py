"""Measures of the heads of trained models, for records and as in the papers' tables."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from collab_compress_cli.distributed import process_state
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel

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
from collab_compress.analysis.similarity import Measure as DiscrepancyMeasure
from collab_compress.architectures import find_attention
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import forward_arguments
from collab_compress.checkpoint.files import mapped
from collab_compress.conversion.expand import read_factors
from collab_compress.heads import alphas_of, confidence, head_importance
from collab_compress.heads.importance import end_tokens
from collab_compress.transformers_parts import UNLABELLED

from .outputs import missing_measures, read_record, write_record
from .recipe import Tuning
from .workload import Workload

MEASURED_ROWS = 256  # drawn with a fixed seed
SCORED_ROWS = 128  # those of them that score a model without some heads; the others choose the heads
PRUNED_SHARES = tuple(step / 8 for step in range(9))
RANDOM_ORDERS = 3  # of heads, in the pruning curve
ROWS_PER_BATCH = 64
DIGITS = {"mixing": 4, "alphas": 4}  # significant ones of large matrices; other numbers have six

Value = TypeVar("Value")


class Subject:
    """The model of a stage, and the rows that it is measured on: of the validation data, or else of the test data."""

    def __init__(self, workload: Workload, model: PreTrainedModel) -> None:
        self.workload, self.model, self.tokenizer = workload, model, workload.new_tokenizer()
        scored = workload.scored()
        self.split = next((name for name in scored if name.startswith("validation")), scored[0])
        has_blocks = workload.task.kind.endswith("language modelling")  # of all texts
        self.texts = workload.texts[self.split] if has_blocks else _draw(workload.texts[self.split])
        rows: Dataset = workload.encode(DatasetDict({self.split: self.texts}))[self.split]
        rows = _draw(rows) if has_blocks else rows
        arguments = {*forward_arguments(model), "labels"}
        self._rows = rows.select_columns([name for name in rows.column_names if name in arguments])
        self._collate = workload.collator(model, self.tokenizer)
        # Up to half of the rows score the model without some heads, which the others choose.
        self.scoring = self.indices(0, min(SCORED_ROWS, len(self._rows) // 2))
        self.choosing = self.indices(len(self.scoring))

    def indices(self, first: int = 0, end: int = MEASURED_ROWS) -> list[int]:
        """Return the indices of measured rows; long rows come first."""
        return sorted(range(len(self._rows))[first:end], key=lambda index: -len(self._rows[index]["input_ids"]))

    def batches(self, indices: list[int]) -> list[Batch]:
        """Return batches of rows, with labels."""
        batches = []
        for start in range(0, len(indices), ROWS_PER_BATCH):
            batch = dict(self._collate([self._rows[index] for index in indices[start : start + ROWS_PER_BATCH]]))
            if "decoder_input_ids" in batch:  # padding predicts nothing, and neither does the token before it
                batch["decoder_attention_mask"] = (batch["labels"] != UNLABELLED).long()
            batches.append(batch)
        return batches

    @cached_property
    def all_batches(self) -> list[Batch]:
        """Batches of all measured rows."""
        return self.batches(self.indices())

    @cached_property
    def covariances(self) -> dict[str, JointCovariance]:
        """Covariances of head outputs by layer, for layers with several heads."""
        covariances = head_covariances(self.model, self.all_batches)
        return {name: covariance for name, covariance in covariances.items() if len(covariance.widths) > 1}

    def by_kind(self, values: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Group the values of modules by kind of attention, in the order of layers."""
        grouped: dict[str, list[Value]] = {}
        for site in find_attention(self.model):
            # a module that ALBERT shares among layers has several values, "NAME[0]" and so on
            if of_site := [value for name, value in values.items() if name.partition("[")[0] == site.name]:
                grouped.setdefault(site.kind, []).extend(of_site)
        return grouped

    def scorer(self, indices: list[int]) -> Callable[[PreTrainedModel], float]:
        """Return a function that scores a model by the task's metric on some rows; translation is greedy."""
        batches = self.batches(indices)
        if self.workload.task.kind != "translation":
            return lambda model: self._score_logits(model, batches)
        references = [self.texts[index]["target"] for index in indices]
        return lambda model: self._score_translations(model, batches, references)

    def _score_translations(self, model: Any, batches: list[Batch], references: list[str]) -> float:
        written = []
        with evaluation_mode(model):
            for batch in batches:
                tokens = model.generate(
                    input_ids=batch["input_ids"].to(model.device),
                    attention_mask=batch["attention_mask"].to(model.device),
                    num_beams=1,
                    do_sample=False,
                    max_length=self.workload.recipe.translation.max_length,
                )
                written += self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        metric = self.workload.metric
        return metric.benchmark_score(metric.compute(predictions=written, references=references))

    def _score_logits(self, model: PreTrainedModel, batches: list[Batch]) -> float:
        reduce = self.workload.options(self.tokenizer, Tuning()).get("preprocess_logits_for_metrics")
        outputs = []
        with evaluation_mode(model):
            for batch in batches:
                logits = run_batch(model, batch).logits.cpu()
                outputs.append(logits if reduce is None else reduce(logits, batch["labels"]))
        # losses of running text hold their labels, which differ in length from batch to batch
        labels = torch.cat([batch["labels"] for batch in batches]).numpy() if reduce is None else None
        prediction = EvalPrediction(torch.cat(outputs).float().numpy(), labels)
        return self.workload.metric.benchmark_score(self.workload.compute_metrics(prediction))


def _draw(rows: Dataset) -> Dataset:
    """Return up to `MEASURED_ROWS` random rows, the same for all models."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=generator, device="cpu")[:MEASURED_ROWS]
    return rows.select(order.tolist())


def measure_svcca(subject: Subject) -> Any:
    """Similarity of heads by SVCCA, and the last layers' curves: "Inter-Head Diversity", Table 3, Figures 3 and 4."""
    results = subject.by_kind({name: svcca(covariance) for name, covariance in subject.covariances.items()})
    return results and {
        "layers": {kind: [result.mean for result in layers] for kind, layers in results.items()},
        "curve": {kind: layers[-1].curve for kind, layers in results.items()},
    }


def measure_cka(subject: Subject) -> Any:
    """Similarity of heads by CKA, mean over pairs, of each layer: "Inter-Head Diversity", Tables 3 and 5."""
    means = {name: mean_over_pairs(cka(covariance)) for name, covariance in subject.covariances.items()}
    return means and {"layers": subject.by_kind(means)}


def measure_confidence(subject: Subject) -> Any:
    """Confidence of each head of each layer: "Multi-Head Rotation", Figure 5."""
    ends = end_tokens(subject.model, subject.tokenizer)
    return subject.by_kind(confidence(subject.model, subject.all_batches, exclude=ends))


def measure_discrepancy(subject: Subject) -> Any:
    """Total discrepancy of the heads of each layer: "Multi-Head Rotation", Figures 6 and 7."""
    measures: tuple[DiscrepancyMeasure, ...] = ("cosine", "difference", "l2")
    layers = discrepancy(subject.model, subject.all_batches)
    return subject.by_kind({name: {of: layer.norm(of) for of in measures} for name, layer in layers.items()})


def measure_overlap(subject: Subject) -> Any:
    """Bhattacharyya coefficient of two heads' attention, mean over pairs: "Diversified Attention", equation 3."""
    overlaps = bhattacharyya(subject.model, subject.all_batches)
    return subject.by_kind({name: mean_over_pairs(pairs) for name, pairs in overlaps.items() if len(pairs) > 1})


def measure_dominance(subject: Subject) -> Any:
    """The task's score without the dominant head of a layer, mean over layers: "Scheduled DropHead", Table 4."""
    better = subject.workload.metric.greater_is_better
    chosen = dominant_heads(subject.model, subject.scorer(subject.choosing), greater_is_better=better).dominant
    scores = dominant_heads(subject.model, subject.scorer(subject.scoring), greater_is_better=better, heads=chosen)
    changes = scores.mean_change(chosen)
    return {"score": scores.baseline} | {kind: scores.baseline + change for kind, change in changes.items()}


def measure_pruning(subject: Subject) -> Any:
    """The score without more and more heads, least important first or random: "Scheduled DropHead", Figure 3."""
    importance = head_importance(subject.model, subject.batches(subject.choosing))
    scorer = subject.scorer(subject.scoring)
    points = pruning_curve(subject.model, importance, scorer, shares=PRUNED_SHARES, random_orders=RANDOM_ORDERS)
    return {
        "shares": list(PRUNED_SHARES),
        "scores": [point.score for point in points],
        "random": [point.random_score for point in points],
    }


def measure_mixing(subject: Subject) -> Any:
    """Mixing matrices of the layers whose heads share projections: "Collaborate Instead of Concatenate", Figure 2."""
    shared = read_factors(subject.model)
    matrices = mixing_matrices(subject.model) if shared else {}
    return subject.by_kind({name: matrix for name, matrix in matrices.items() if name in shared})


def measure_alphas(subject: Subject) -> Any:
    """Alphas of the layers whose heads are mixed: "Multi-Head Rotation", Figures 3 and 4."""
    return subject.by_kind(alpha_matrices(subject.model)) if alphas_of(subject.model) else None


MEASURES: dict[str, Callable[[Subject], Any]] = {
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
"""Name → measure; it returns numbers, tensors, lists and mappings, or nothing where the model has no such thing."""


def add_measures(workload: Workload, directory: str | Path, folder: Path) -> None:
    """Take the measures that a record lacks into its `measures`, and note in `measured` on what they were taken."""
    path = folder / "result.json"
    names = missing_measures(read_record(path), workload.recipe.measures)
    if not names:
        return
    model: Any = workload.load_model(directory).to(process_state().device)
    subject = Subject(workload, model)
    how = {"split": subject.split, "rows": len(subject.indices()), "scored": len(subject.scoring)}
    for name in names:
        result = MEASURES[name](subject)
        record = read_record(path)
        record["measured"] = {**record.get("measured", {}), name: how}
        if result:
            numbers = mapped(partial(_round, digits=DIGITS.get(name, 6)), result)
            record["measures"] = {**record.get("measures", {}), name: numbers}
        write_record(path, record)


def _round(value: Any, digits: int) -> Any:
    """Return a number, or a tensor as lists of numbers, with so many significant digits."""
    if isinstance(value, Tensor):
        return mapped(partial(_round, digits=digits), value.tolist())
    return float(f"{value:.{digits}g}")
