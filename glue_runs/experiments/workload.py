"""What each kind of task adds to a recipe: model class, encoding, collator and score."""

import logging
import math
from abc import ABC, abstractmethod
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from collab_compress_cli import pretrained
from collab_compress_cli.distributed import process_state
from collab_compress_cli.pretrained import has_tokenizer, load_config
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from collab_compress.checkpoint.files import write_atomically
from collab_compress.errors import CheckpointError, RecipeError
from collab_compress.training import HeadSeq2SeqTrainer, HeadTrainer

from ..metrics import Metric, load_metric, token_losses
from ..tasks import (
    TASKS,
    Task,
    encode_classification,
    encode_language_model,
    encode_masked_language_model,
    encode_translation,
    load_task,
)
from .examples import ENDING, Arrays
from .processes import on_every_process
from .recipe import Recipe, Tuning

logger = logging.getLogger("collab_compress.glue_runs")  # held with the warnings of the library
MASK_SEED = 0
"""Seed of the masked tokens that are scored, whatever the recipe's seed is."""

HELD_OUT_SEED = 0
"""Seed of the training data that are held out, whatever the recipe's seed is."""


class Workload(ABC):
    """The task of a recipe, with its texts."""

    model_class: ClassVar[Any]
    trainer_class: ClassVar[type[Trainer]] = HeadTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer as it is saved with models; set once the model to start from is known."""
    data: DatasetDict
    """The encoded splits, by `encode_splits`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.task: Task = TASKS[recipe.task]
        progress = recipe.progress and process_state().is_main_process
        self.encoding: dict[str, Any] = {"progress": progress}
        self.texts: DatasetDict = load_task(
            recipe.task,
            recipe.data_dir,
            source=recipe.translation.source,
            target=recipe.translation.target,
            files=recipe.files,
            train=recipe.trains,
            **self.encoding,
        )
        if recipe.held_out is not None:
            self.texts = _hold_out(self.texts, recipe.held_out)
        target = recipe.translation.target or (self.task.languages or ("", ""))[1]
        self.target = target.partition("_")[0]  # without its country
        by_characters = {"tokenize": "zh"} if self.target == "zh" else {}  # there are no spaces between words
        self.metric: Metric = load_metric(self.task.metric, **by_characters)

    def encode_splits(self) -> None:
        """Encode all splits into `data`; all processes call it together."""
        self.data = on_every_process(self.encode)(self.texts)

    def new_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return a copy of the tokenizer: padding and truncation change it, and that would be saved."""
        return deepcopy(self.tokenizer)

    def load_model(
        self, directory: str | Path, trained: bool = True, *, new_head: bool = False, **head: Any
    ) -> PreTrainedModel:
        """Load a model with a head for the task, by the config's fields `head`; `new_head` draws a new one."""
        transformers.set_seed(self.recipe.seed)
        chosen = self.recipe.attn_implementation
        attention = {} if chosen is None else {"attn_implementation": chosen}
        try:
            model, info = pretrained.load_weights(
                self.model_class, directory, new_head=new_head, dtype=torch.float32, **attention, **head
            )
        except CheckpointError as error:
            raise RecipeError(f"{directory} cannot be loaded for {self.task.name}: {error}") from error
        if trained and info["missing_keys"]:
            raise RecipeError(
                f"{directory} was not trained for {self.task.name}: it lacks weights, such as "
                f"{min(info['missing_keys'])}; give tuning"
            )
        of_head = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
        if new_head and not of_head <= set(info["missing_keys"]):
            logger.warning("the head of %s is of another task; a new one is drawn for %s", directory, self.task.name)
            fresh = self.model_class.from_config(model.config, dtype=torch.float32).eval()
            for name in {name.partition(".")[0] for name in of_head}:
                setattr(model, name, getattr(fresh, name))
        return model

    @abstractmethod
    def encode(self, texts: DatasetDict) -> DatasetDict:
        """Return token ids and labels."""

    @abstractmethod
    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return the data collator."""

    def scored(self) -> list[str]:
        """Return the names of the splits with labels, except the training data."""
        return [name for name, rows in self.texts.items() if name != "train" and _is_labelled(rows)]

    def options(self, tokenizer: PreTrainedTokenizerBase, tuning: Tuning) -> dict[str, Any]:
        """Return further options of the trainer of a fine-tuning, such as `compute_metrics`."""
        return {"compute_metrics": self.compute_metrics}

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the scores of the predictions for a split."""
        raise NotImplementedError

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Return the scores of a trainer's model on a split, and write the outcomes of its examples."""
        prediction = trainer.predict(rows, metric_key_prefix="")
        self._write_outcomes(trainer, prediction, folder / f"{split}{ENDING}")
        return {name: prediction.metrics[f"_{name}"] for name in self.metric.scores}

    def _write_outcomes(self, trainer: Trainer, prediction: EvalPrediction, path: Path) -> None:
        if trainer.is_world_process_zero():
            file = BytesIO()
            np.savez_compressed(file, **self.outcomes(prediction))  # type: ignore[arg-type]
            write_atomically(path, file.getvalue())

    def outcomes(self, prediction: EvalPrediction) -> Arrays:
        """Return the outcomes of the examples of a split, as `experiments/examples.py` describes them."""
        raise NotImplementedError


def _hold_out(texts: DatasetDict, share: float) -> DatasetDict:
    """Return splits in which a share of the training data is the validation data."""
    present = [name for name in texts if name.startswith("validation")]
    if present or "train" not in texts:
        reason = f"there is {present[0]} data" if present else "no training data are read"
        raise RecipeError(f"held_out is {share}, but {reason}; leave it out")
    if math.ceil(share * len(texts["train"])) == len(texts["train"]):
        raise RecipeError(f"held_out is {share}, which leaves no training data; lower it")
    parts = texts["train"].train_test_split(share, seed=HELD_OUT_SEED)
    return DatasetDict({**texts, "train": parts["train"], "validation": parts["test"]})


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; without its files Transformers would make one without vocabulary."""
    if not has_tokenizer(Path(source)):
        raise RecipeError(f"{source} has no tokenizer; save it there too, by tokenizer.save_pretrained")
    return pretrained.load_tokenizer(source)


def _is_labelled(rows: Dataset) -> bool:
    return "label" not in rows.column_names or (bool(len(rows)) and min(rows["label"]) >= 0)


class Classification(Workload):
    """Classification and regression, scored by the task's own metrics."""

    model_class = transformers.AutoModelForSequenceClassification

    def load_model(self, directory: str | Path, trained: bool = True, **head: Any) -> PreTrainedModel:
        """Load a model with an output for each class, or one for a score; a new head if it has other classes."""
        labels = [label for _, label in sorted(load_config(directory).id2label.items())]
        if trained:
            self.task.check_classes(labels, str(directory))
        head = {"num_labels": 1, "problem_type": "regression"}
        if self.task.kind == "classification":
            names = dict(enumerate(self.task.labels))
            head = {"problem_type": "single_label_classification", "id2label": names}
            head["label2id"] = {name: number for number, name in names.items()}
        return super().load_model(directory, trained, new_head=not self.task.has_classes(labels), **head)

    def encode(self, texts: DatasetDict) -> DatasetDict:
        """Return texts, or pairs of them, with their labels."""
        return encode_classification(texts, self.new_tokenizer(), max_length=self.recipe.max_length, **self.encoding)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return a collator that pads to the longest text of a batch."""
        return transformers.DataCollatorWithPadding(tokenizer)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the metrics of the likeliest classes, or of the regression; NaN if a logit is not finite."""
        if not np.isfinite(_logits(prediction)).all():  # argmax would choose the first class
            return dict.fromkeys(self.metric.scores, math.nan)
        predicted = self._predict(prediction)
        return self.metric.compute(predictions=predicted, references=prediction.label_ids)

    def _predict(self, prediction: EvalPrediction) -> np.ndarray:
        logits = _logits(prediction)
        return np.squeeze(logits, -1) if self.task.kind == "regression" else logits.argmax(-1)

    def outcomes(self, prediction: EvalPrediction) -> Arrays:
        """Return predictions and labels."""
        kind = np.float32 if self.task.kind == "regression" else np.int16
        return {"predictions": self._predict(prediction).astype(kind), "labels": prediction.label_ids.astype(kind)}


def _logits(prediction: EvalPrediction) -> np.ndarray:
    outputs = prediction.predictions
    logits: np.ndarray = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


class TokenModel(Workload):
    """Scored by perplexity over all labels of a split, if by nothing else."""

    shift: ClassVar[bool]
    """Whether a position predicts the label of the next one."""

    def options(self, tokenizer: PreTrainedTokenizerBase, tuning: Tuning) -> dict[str, Any]:
        """Reduce the logits of each row to its loss and number of labels before they are gathered."""
        return {**super().options(tokenizer, tuning), "preprocess_logits_for_metrics": self.sum_losses}

    def sum_losses(self, logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the summed loss and the number of labels of each row; (rows, 2)."""
        return token_losses(logits[0] if isinstance(logits, tuple) else logits, labels, shift=self.shift)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the perplexity."""
        losses, counts = prediction.predictions.T
        return load_metric("perplexity").compute(predictions=losses, references=counts.astype(int))

    def outcomes(self, prediction: EvalPrediction) -> Arrays:
        """Return losses and numbers of tokens."""
        losses, counts = prediction.predictions.T
        return {"losses": losses.astype(np.float32), "tokens": counts.astype(np.int32)}


class LanguageModel(TokenModel):
    """Scored over all tokens of a split, ends of lines included."""

    shift = True
    model_class = transformers.AutoModelForCausalLM

    def load_model(self, directory: str | Path, trained: bool = True, **head: Any) -> PreTrainedModel:
        """Load a causal model; an encoder is refused, whose logits depend on later tokens."""
        model = super().load_model(directory, trained)
        tokens = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]], device=model.device)
        with torch.no_grad():
            before = model(tokens).logits[:, :-1].float()
        if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-4):
            raise RecipeError(
                f"{directory} attends to the tokens it should predict; give a decoder, such as BERT with "
                "is_decoder: true"
            )
        return model

    def encode(self, texts: DatasetDict) -> DatasetDict:
        """Return running text cut into blocks."""
        return encode_language_model(texts, self.new_tokenizer(), length=self.recipe.max_length, **self.encoding)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return a collator that pads tokens and labels to the longest of a batch."""
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # labels are padded with −100, so it is never predicted as such
        return transformers.DataCollatorForSeq2Seq(tokenizer)


class MaskedLanguageModel(TokenModel):
    """Scored over 15 % of a split's tokens, the same in every run; training data get new masks in each epoch."""

    shift = False
    model_class = transformers.AutoModelForMaskedLM

    def encode(self, texts: DatasetDict) -> DatasetDict:
        """Return running text cut into blocks, with masks where it is scored."""
        options = {"length": self.recipe.max_length, **self.encoding}
        encoded = {}
        for split, rows in texts.items():
            seed = None if split == "train" else MASK_SEED
            encoded[split] = encode_masked_language_model(rows, self.new_tokenizer(), seed=seed, **options)
        return DatasetDict(encoded)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return a collator that masks rows without labels, and pads to the longest of a batch."""
        pad = transformers.DataCollatorForSeq2Seq(tokenizer)
        mask = transformers.DataCollatorForLanguageModeling(tokenizer)
        return partial(_pad_or_mask, pad, mask)


def _pad_or_mask(pad: Any, mask: Any, rows: list[dict[str, Any]]) -> Any:
    return pad(rows) if "labels" in rows[0] else mask(rows)


class Translation(TokenModel):
    """Scored by sacreBLEU against the references as written, and by their perplexity."""

    shift = False
    model_class = transformers.AutoModelForSeq2SeqLM
    trainer_class = HeadSeq2SeqTrainer
    arguments_class = transformers.Seq2SeqTrainingArguments

    def load_model(self, directory: str | Path, trained: bool = True, **head: Any) -> PreTrainedModel:
        """Load a model that generates with the recipe's beams, length penalty and length."""
        model = super().load_model(directory, trained)
        search = self.recipe.translation
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and search.max_length > positions:
            raise RecipeError(f"translation.max_length is {search.max_length}; the model has {positions} positions")
        model.generation_config.update(
            num_beams=search.beams, length_penalty=search.length_penalty, max_length=search.max_length
        )
        return model

    def encode(self, texts: DatasetDict) -> DatasetDict:
        """Return sentences, with their translations as labels."""
        length = self.recipe.max_length
        return encode_translation(
            texts, self.new_tokenizer(), max_source_length=length, max_target_length=length, **self.encoding
        )

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return a collator that pads, and shifts labels for the decoder."""
        return transformers.DataCollatorForSeq2Seq(tokenizer, model)

    def options(self, tokenizer: PreTrainedTokenizerBase, tuning: Tuning) -> dict[str, Any]:
        """Compute BLEU during training only if `predict_with_generate` asks for it: generation is slow."""
        splits = [name for name in self.texts if name.startswith("validation")]
        if not splits or not tuning.arguments.get("predict_with_generate"):
            return {}
        split = splits[0]  # the trainer's eval_dataset

        def bleu(prediction: EvalPrediction) -> dict[str, float]:
            written = self._read(prediction.predictions, tokenizer, split)
            return {"bleu": self.metric.compute(predictions=written, references=self.texts[split]["target"])["bleu"]}

        return {"compute_metrics": bleu}

    def _read(self, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, split: str) -> list[str]:
        """Return the translations of a split, without rows repeated to fill the last batches."""
        tokens = tokens[: len(self.texts[split])]
        tokens = np.where(tokens < 0, tokenizer.pad_token_id, tokens)
        written: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return written

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Translate and score a split; write `folder/SPLIT.txt`, its references, and the outcomes of sentences."""
        references = self.texts[split]["target"]
        trainer.args.predict_with_generate = True
        trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
        written = self._read(trainer.predict(rows).predictions, trainer.processing_class, split)
        if trainer.is_world_process_zero():
            for ending, lines in ((".txt", written), (".ref.txt", references)):
                write_atomically(folder / f"{split}{ending}", "".join(f"{line}\n" for line in lines))
        bleu = self.metric.compute(predictions=written, references=references)
        scores = {name: bleu[name] for name in ("bleu", "brevity_penalty", "length_ratio")}
        if self.target == "de":
            scores |= load_metric("bleu-compounds-split").compute(predictions=written, references=references)
        trainer.args.predict_with_generate = False
        trainer.preprocess_logits_for_metrics = self.sum_losses
        losses = EvalPrediction(trainer.predict(rows).predictions[: len(rows)], None)
        self._write_outcomes(trainer, losses, folder / f"{split}{ENDING}")
        return {**scores, "perplexity": self.compute_metrics(losses)["perplexity"]}


WORKLOADS: dict[str, type[Workload]] = {
    "classification": Classification,
    "regression": Classification,
    "translation": Translation,
    "language modelling": LanguageModel,
    "masked language modelling": MaskedLanguageModel,
}
"""Kind of task → workload."""
