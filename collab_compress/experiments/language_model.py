"""Language modelling: running text, each next token predicted."""

from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from collab_compress.errors import RecipeError
from collab_compress.experiments.workload import Workload
from collab_compress.metrics import token_losses
from collab_compress.tasks import encode_language_model


class LanguageModel(Workload):
    """Scored by perplexity over all tokens of a split, ends of lines included."""

    model_class = AutoModelForCausalLM

    def load_model(self, directory: str | Path, trained: bool = True) -> PreTrainedModel:
        """Load a model that sees no tokens but those before the one it predicts.

        Raises:
            RecipeError: also if it sees others, as an encoder does.
        """
        model = super().load_model(directory, trained)
        tokens = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]], device=model.device)
        with torch.no_grad():
            before = model(tokens).logits[:, :-1].float()
        if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-4):
            raise RecipeError(
                f"{directory} sees the tokens it is to predict; give a decoder, as BERT is with is_decoder: true"
            )
        return model

    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Cut running text into blocks."""
        return encode_language_model(texts, tokenizer, length=self.recipe.max_length, progress=self.progress)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad tokens and labels to the longest of a batch."""
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # labels are padded with −100, so it is never predicted as such
        return DataCollatorForSeq2Seq(tokenizer)

    def options(self) -> dict[str, Any]:
        """Keep two numbers of a row's predictions, not a vocabulary of them for each token."""
        return {**super().options(), "preprocess_logits_for_metrics": _losses}

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score the sums of the rows' losses."""
        losses, tokens = prediction.predictions[:, 0], prediction.predictions[:, 1].astype(int)
        found: dict[str, float] = self.metric.compute(predictions=losses, references=tokens)
        return found


def _losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    return token_losses(logits[0] if isinstance(logits, tuple) else logits, labels)
