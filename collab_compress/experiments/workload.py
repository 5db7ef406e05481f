"""What each kind of task adds to a recipe: model class, encoding, collator and score."""

import math
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    set_seed,
)

from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import has_tokenizer, write_atomically
from collab_compress.checkpoint.pretrained import load_config
from collab_compress.distributed import process_state
from collab_compress.errors import CheckpointError, RecipeError
from collab_compress.experiments.recipe import Recipe, Tuning
from collab_compress.metrics import Metric, load_metric, token_losses
from collab_compress.tasks import (
    TASKS,
    Task,
    encode_classification,
    encode_language_model,
    encode_masked_language_model,
    encode_translation,
    load_task,
)
from collab_compress.training import HeadSeq2SeqTrainer, HeadTrainer


class Workload(ABC):
    """A recipe's task, loaded.

    Args:
        recipe: of the experiment.

    Raises:
        DataError: the data are not there, or malformed.
    """

    model_class: ClassVar[Any]
    trainer_class: ClassVar[type[Trainer]] = HeadTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        languages = recipe.translation
        self.progress = recipe.progress and process_state().is_main_process
        self.texts: DatasetDict = load_task(
            recipe.task, recipe.data_dir, source=languages.source, target=languages.target, files=recipe.files,
            train=recipe.trains, progress=self.progress, num_proc=recipe.num_proc,
        )  # fmt: skip
        self.work: dict[str, Any] = {"progress": self.progress, "num_proc": recipe.num_proc}
        self.metric: Metric = load_metric(self.task.metric, **self.metric_options())

    @property
    def task(self) -> Task:
        """The task."""
        return TASKS[self.recipe.task]

    def load_model(self, directory: str | Path, trained: bool = True) -> PreTrainedModel:
        """Load a model with a head for the task.

        Args:
            directory: of the model.
            trained: whether the head must be there; otherwise it is drawn with the seed.

        Raises:
            RecipeError: weights are missing, or the model does not fit the task or the recipe.
        """
        set_seed(self.recipe.seed)
        chosen = self.recipe.attn_implementation
        attention = {} if chosen is None else {"attn_implementation": chosen}
        try:
            model, found = pretrained.load_model(
                self.model_class, directory, dtype=torch.float32, **attention, **self.head()
            )
        except CheckpointError as error:
            raise RecipeError(f"{directory} cannot be loaded for {self.task.name}: {error}") from error
        if trained and found["missing_keys"]:
            raise RecipeError(
                f"{directory} was not trained for {self.task.name}: it lacks weights, such as "
                f"{min(found['missing_keys'])}; give tuning"
            )
        return model

    def metric_options(self) -> dict[str, Any]:
        """Return the options of the metric."""
        return {}

    def head(self) -> dict[str, Any]:
        """Return the options of the model's head."""
        return {}

    @abstractmethod
    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Turn texts into rows of tokens and labels."""

    @abstractmethod
    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return the data collator."""

    def scored(self) -> list[str]:
        """Name the splits that have labels, but for the training data."""
        return [name for name, rows in self.texts.items() if name != "train" and _labelled(rows)]

    def options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return further options of the trainer, such as `compute_metrics`."""
        return {"compute_metrics": self.compute_metrics}

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score what the model predicted for a split."""
        raise NotImplementedError

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Score a trainer's model on a split.

        Args:
            trainer: its model is scored.
            split: name of the split.
            rows: encoded.
            folder: where predictions worth reading are kept.
        """
        found = trainer.predict(rows, metric_key_prefix="").metrics
        return {name: found[f"_{name}"] for name in self.metric.scores}


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; Transformers makes one without words where a directory has none.

    Raises:
        RecipeError: there is none.
    """
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        raise RecipeError(f"{source} has no tokenizer; save it there too, by tokenizer.save_pretrained")
    try:
        tokenizer: PreTrainedTokenizerBase = pretrained.load_tokenizer(source)
    except CheckpointError as error:
        raise RecipeError(f"the tokenizer of {source} cannot be loaded: {error}") from error
    return tokenizer


def _labelled(rows: Dataset) -> bool:
    return "label" not in rows.column_names or (bool(len(rows)) and min(rows["label"]) >= 0)


class Classification(Workload):
    """Scored by the task's own metrics."""

    model_class = AutoModelForSequenceClassification

    def head(self) -> dict[str, Any]:
        """Return the number of outputs: the classes of the task, or one for a score."""
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
        return encode_classification(texts, tokenizer, max_length=self.recipe.max_length, **self.work)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad texts to the longest of a batch."""
        return DataCollatorWithPadding(tokenizer)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score the likeliest classes, or the regression's outputs; NaN where outputs are not finite."""
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        if not np.isfinite(logits).all():  # the first class would be the likeliest
            return dict.fromkeys(self.metric.scores, math.nan)
        predicted = np.squeeze(logits, -1) if self.task.kind == "regression" else logits.argmax(-1)
        found: dict[str, float] = self.metric.compute(predictions=predicted, references=prediction.label_ids)
        return found


class TokenModel(Workload):
    """Scored by perplexity over all labels of a split."""

    shift: ClassVar[bool]
    """Whether a position predicts the next label, not its own."""

    def options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Reduce the logits of a row to two numbers, so that they need not be kept."""
        return {**super().options(tokenizer), "preprocess_logits_for_metrics": partial(_losses, shift=self.shift)}

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score the sums of the rows' losses."""
        return _of_losses(self.metric, prediction.predictions)


class LanguageModel(TokenModel):
    """Scored over all tokens of a split, ends of lines included."""

    shift = True
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
        return encode_language_model(texts, tokenizer, length=self.recipe.max_length, **self.work)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad tokens and labels to the longest of a batch."""
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token  # labels are padded with −100, so it is never predicted as such
        return DataCollatorForSeq2Seq(tokenizer)


class MaskedLanguageModel(TokenModel):
    """Scored over 15 % of a split's tokens, the same ones in every run; masked anew in every epoch of training."""

    shift = False
    model_class = AutoModelForMaskedLM

    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Cut running text into blocks, and mask those that are scored."""
        found = {}
        for split, rows in texts.items():
            seed = None if split == "train" else MASKS
            found[split] = encode_masked_language_model(
                rows, tokenizer, length=self.recipe.max_length, seed=seed, **self.work
            )
        return DatasetDict(found)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Mask rows that have no labels yet, and pad them to the longest of a batch."""
        mask, pad = DataCollatorForLanguageModeling(tokenizer), DataCollatorForSeq2Seq(tokenizer)
        return partial(_masked, mask, pad)


def _losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor, *, shift: bool) -> Tensor:
    return token_losses(logits[0] if isinstance(logits, tuple) else logits, labels, shift=shift)


def _of_losses(metric: Metric, losses: np.ndarray) -> dict[str, float]:
    """Score what `_losses` left of each row."""
    found: dict[str, float] = metric.compute(predictions=losses[:, 0], references=losses[:, 1].astype(int))
    return found


MASKS = 0  # seed of the masks that are scored, whatever the recipe's seed is


def _masked(mask: Any, pad: Any, rows: list[dict[str, Any]]) -> Any:
    return pad(rows) if "labels" in rows[0] else mask(rows)


REFERENCES = ".ref.txt"  # after the name of a split


def target_language(task: Task, target: str | None) -> str:
    """Name the language that a task translates to, or the one that is asked for, without its country."""
    return (target or (task.languages or ("", ""))[1]).partition("_")[0]


class Translation(Workload):
    """Scored by sacreBLEU against the reference as it is written, not as its tokens spell it; and its perplexity."""

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
        return encode_translation(texts, tokenizer, max_source_length=length, max_target_length=length, **self.work)

    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pad sentences and labels to the longest of a batch, and shift labels for the decoder."""
        return DataCollatorForSeq2Seq(tokenizer, model)

    def metric_options(self) -> dict[str, Any]:
        """Split Chinese into characters, which have no spaces between words."""
        return {"tokenize": "zh"} if self._target == "zh" else {}

    @property
    def _target(self) -> str:
        return target_language(self.task, self.recipe.translation.target)

    def options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Compute no metric in training, for the search takes long, unless `predict_with_generate` asks for it."""
        tuning = self.recipe.tuning or Tuning()
        if not tuning.arguments.get("predict_with_generate"):
            return {}
        split = next(name for name in self.texts if name.startswith("validation"))  # the one that a trainer is given

        def bleu(prediction: EvalPrediction) -> dict[str, float]:
            written = self._read(prediction.predictions, tokenizer, split)
            return {"bleu": self.metric.compute(predictions=written, references=self.texts[split]["target"])["bleu"]}

        return {"compute_metrics": bleu}

    def _read(self, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, split: str) -> list[str]:
        """Return the translations of a split, without rows repeated to fill the last batches."""
        tokens = tokens[: len(self.texts[split])]
        read: list[str] = tokenizer.batch_decode(
            np.where(tokens < 0, tokenizer.pad_token_id, tokens), skip_special_tokens=True
        )
        return read

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Translate a split, keep the translations in `folder/SPLIT.txt`, references beside them, and score them.

        The perplexity is that of the references' tokens, ends of sentences included, each after those before it.
        German has BLEU with compounds split too.
        """
        trainer.args.predict_with_generate = True
        trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
        written = self._read(trainer.predict(rows).predictions, trainer.processing_class, split)
        if trainer.is_world_process_zero():
            for ending, lines in ((".txt", written), (REFERENCES, self.texts[split]["target"])):
                write_atomically(folder / f"{split}{ending}", "".join(f"{line}\n" for line in lines))
        found = self.metric.compute(predictions=written, references=self.texts[split]["target"])
        trainer.args.predict_with_generate = False
        trainer.preprocess_logits_for_metrics = partial(_losses, shift=False)
        known = _of_losses(load_metric("perplexity"), trainer.predict(rows).predictions[: len(rows)])
        scores = {name: found[name] for name in ("bleu", "brevity_penalty", "length_ratio")}
        if self._target == "de":
            split_up = load_metric("bleu-compounds-split")
            scores |= split_up.compute(predictions=written, references=self.texts[split]["target"])
        return {**scores, "perplexity": known["perplexity"]}
