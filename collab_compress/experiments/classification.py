"""Classification and regression: one or two texts, one label."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from collab_compress.checkpoint.load import load_config
from collab_compress.errors import CheckpointError, RecipeError
from collab_compress.experiments.workload import Workload
from collab_compress.tasks import encode_classification


class Classification(Workload):
    """Scored by the task's own metrics."""

    model_class = AutoModelForSequenceClassification

    def head(self) -> dict[str, Any]:
        """Give as many outputs as the task has classes, or one for a score."""
        if self.task.kind == "regression":
            return {"num_labels": 1, "problem_type": "regression"}
        return {
            "problem_type": "single_label_classification",
            "id2label": dict(enumerate(self.task.labels)),
            "label2id": {label: number for number, label in enumerate(self.task.labels)},
        }

    def load_model(self, directory: str | Path, trained: bool = True) -> PreTrainedModel:
        """Load a model whose classes are in the task's order.

        Raises:
            RecipeError: also if they are in another.
        """
        if trained and self.task.kind == "classification":
            try:
                names = load_config(directory).label2id
            except CheckpointError as error:
                raise RecipeError(f"{directory} cannot be loaded for {self.task.name}: {error}") from error
            order = [label.lower() for label in sorted(names, key=names.__getitem__)]
            wanted = [label.lower() for label in self.task.labels]
            if order != wanted and sorted(order) == sorted(wanted):
                raise RecipeError(
                    f"{directory} has its classes in the order {', '.join(order)}; {self.task.name} has "
                    f"{', '.join(wanted)}"
                )
        return super().load_model(directory, trained)

    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Encode texts, or pairs of them, with their labels."""
        return encode_classification(texts, tokenizer, max_length=self.recipe.max_length, progress=self.progress)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad texts to the longest of a batch."""
        return DataCollatorWithPadding(tokenizer)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score the likeliest classes, or the regression's outputs."""
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted = np.squeeze(logits, -1) if self.task.kind == "regression" else logits.argmax(-1)
        found: dict[str, float] = self.metric.compute(predictions=predicted, references=prediction.label_ids)
        return found
