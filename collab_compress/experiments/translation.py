"""Translation: a sentence in, its translation out, found by beam search."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    Trainer,
)

from collab_compress.checkpoint.directory import write_whole
from collab_compress.errors import RecipeError
from collab_compress.experiments.workload import Workload
from collab_compress.tasks import encode_translation
from collab_compress.training import HeadSeq2SeqTrainer


class Translation(Workload):
    """Scored by sacreBLEU against the reference as it is written, not as its tokens spell it."""

    model_class = AutoModelForSeq2SeqLM
    trainer_class = HeadSeq2SeqTrainer
    arguments_class = Seq2SeqTrainingArguments

    def load_model(self, directory: str | Path, trained: bool = True) -> PreTrainedModel:
        """Load a model that searches as the recipe says."""
        model = super().load_model(directory, trained)
        search = self.recipe.translation
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and search.max_length > most:
            raise RecipeError(f"translation.max_length is {search.max_length}; the model has positions for {most}")
        model.generation_config.update(
            num_beams=search.beams, length_penalty=search.length_penalty, max_length=search.max_length
        )
        return model

    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Encode sentences, with their translations as labels."""
        length = self.recipe.max_length
        return encode_translation(
            texts, tokenizer, max_source_length=length, max_target_length=length, progress=self.progress
        )

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad sentences and labels to the longest of a batch, and shift labels for the decoder."""
        return DataCollatorForSeq2Seq(tokenizer, model)

    def metric_options(self) -> dict[str, Any]:
        """Split Chinese into characters, which have no spaces between words."""
        target = self.recipe.translation.target or (self.task.languages or ("", ""))[1]
        return {"tokenize": "zh"} if target.partition("_")[0] == "zh" else {}

    def options(self) -> dict[str, Any]:
        """Compute no metric in training: the search takes long, and the references are not in the rows."""
        return {}

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Translate a split, keep the translations in `folder/SPLIT.txt`, and score them."""
        trainer.args.predict_with_generate = True
        tokens = trainer.predict(rows).predictions[: len(rows)]  # rows repeated to fill the last batches come last
        tokenizer = trainer.processing_class
        written = tokenizer.batch_decode(
            np.where(tokens < 0, tokenizer.pad_token_id, tokens), skip_special_tokens=True
        )
        if trainer.is_world_process_zero():
            write_whole(folder / f"{split}.txt", "".join(f"{line}\n" for line in written))
        found = self.metric.compute(predictions=written, references=self.texts[split]["target"])
        return {name: found[name] for name in ("bleu", "brevity_penalty", "length_ratio")}
