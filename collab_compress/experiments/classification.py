"""Classification and regression: one or two texts, one label."""

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

from collab_compress.experiments.workload import Workload
from collab_compress.tasks import encode_classification


class Classification(Workload):
    """Scored by the task's own metrics."""

    model_class = AutoModelForSequenceClassification

    def head(self) -> dict[str, Any]:
        """Give as many outputs as the task has classes, or one for a score."""
        problem = "regression" if self.task.kind == "regression" else "single_label_classification"
        return {"num_labels": self.task.num_labels, "problem_type": problem}

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
