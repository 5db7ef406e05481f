"""Transformers' trainers, with everything that acts on heads."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length
from transformers.utils import CONFIG_NAME

from collab_compress.architectures import transformers_model
from collab_compress.checkpoint import EditConfig, edits_of, is_edits
from collab_compress.errors import CheckpointError, HeadError
from collab_compress.heads import alphas_of, mix_heads_
from collab_compress.training.head_training import HeadTraining
from collab_compress.training.session import HeadSession

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the mixin comes before the trainer's class, whose methods it extends


class HeadTrainerMixin(_Trainer):  # type: ignore[misc]
    """Mixin that makes a trainer act on the heads of its model; it comes before the trainer's class.

    Penalties are added to the loss that the trainer computes, so labels, label smoothing and custom loss functions
    work as before. They are means over a batch, and over the passes and processes of a step;
    `HeadTraining.loss_normalization` sets how the loss itself adds up.

    Logs hold each penalty, and `loss` is the sum. Checkpoints hold what a resumed run needs. Alphas are added to the
    model in the constructor, so that the optimizer gets them.

    Args:
        head_training: the methods that act on heads; none if not given.
        kwargs: as the trainer's class takes them.

    Raises:
        HeadError: alphas or rotation lack what they need; the trainer replicates its model within one process, or
            shards it in a way that cannot work.
        CheckpointError: `train` is to resume from a checkpoint of a model with other edits.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> class QuietTrainer(HeadTrainerMixin, Trainer):
        ...     def log(self, logs, *args, **kwargs):
        ...         pass
        >>> with TemporaryDirectory() as folder:
        ...     trainer = QuietTrainer(model, TrainingArguments(folder, report_to="none"))
        >>> trainer.head_training.acts
        False
    """

    def __init__(self, *args: Any, head_training: HeadTraining | None = None, **kwargs: Any) -> None:
        self.head_training = HeadTraining() if head_training is None else head_training
        self.head_session: HeadSession | None = None  # while it trains
        super().__init__(*args, **kwargs)
        acts = self.head_training.acts
        if acts and self.args.n_gpu > 1:
            raise HeadError(
                "DataParallel copies the model in each step; start one process for each GPU instead (torchrun)"
            )
        fsdp1 = self.is_fsdp_enabled and not self.accelerator.is_fsdp2
        if acts and (self.is_deepspeed_enabled or fsdp1):
            raise HeadError(
                f"{'FSDP1' if fsdp1 else 'DeepSpeed'} splits weights across head boundaries; shard the model with "
                "FSDP2 instead (fsdp_config={'fsdp_version': 2}), or leave it whole"
            )
        rotation = self.head_training.rotation
        if rotation is not None and rotation.measures and self.eval_dataset is None:
            raise HeadError(
                "rotation measures the importance of heads on validation data; pass eval_dataset to the trainer"
            )
        self._mix(self.model)
        self.add_callback(type(STATE, (HeadState,), {"trainer": self}))

    def _mix(self, model: PreTrainedModel) -> None:
        alphas = self.head_training.alphas
        if alphas is not None and not alphas_of(model):
            mix_heads_(model, alphas.kinds)

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        """Make the model as the trainer does, with alphas if they are to be trained."""
        model: PreTrainedModel = super().call_model_init(trial)
        self._mix(model)
        return model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does; afterwards, also after an error, nothing acts on the model's heads."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.close()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load weights as the trainer does, from a checkpoint of a model with the same edits."""
        _refuse_other_edits(resume_from_checkpoint, transformers_model(self.model))
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def close(self) -> None:
        """Remove everything but the trained weights from the model."""
        if self.head_session is not None:
            self.head_session.close()
            self.head_session = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        """Run a training pass as the trainer does, with the loss normalized as `loss_normalization` says."""
        items = None if self.head_training.loss_normalization == "mean" else num_items_in_batch
        loss: Tensor = super().training_step(model, inputs, items, **kwargs)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the loss as the trainer does, and add the penalties while the model trains."""
        labels = inputs.get("labels")  # which label smoothing removes
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )
        session = self.head_session
        if not model.training or session is None:
            return result
        loss = result[0] if return_outputs else result
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        unknown = scaled is None
        if unknown:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = self.compute_loss_func is not None or counted
        # The accumulation divisor: the passes of a step, or 1 if the trainer divides the loss itself.
        passes = int(self.current_gradient_accumulation_steps) if scaled else 1
        if self.head_training.loss_normalization == "mean" and unknown:
            loss = loss / passes
        if session.has_penalties:
            loss = loss + session.penalty(loss.detach() * passes, labels).to(loss.device) / passes
        return (loss, result[1]) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the penalties beside the loss."""
        if self.head_session is not None and "loss" in logs:
            logs = {**logs, **self.head_session.logs()}
        super().log(logs, *args, **kwargs)


def _refuse_other_edits(checkpoint: str, model: PreTrainedModel) -> None:
    """Refuse to resume from a checkpoint of a model with other edits, whose weights would be lost in silence."""
    path = Path(checkpoint) / CONFIG_NAME
    if not path.is_file():  # sharded, or of an adapter alone
        return
    stored = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    saved = EditConfig(**stored).edits if is_edits(stored) else []
    changes: list[dict[tuple[str, str], list[Any]]] = [{}, {}]  # (kind, path) → what was done to that module
    for side, edits in zip(changes, (saved, edits_of(model)), strict=True):
        for edit in edits:
            for name, change in edit.modules.items():
                side.setdefault((edit.kind, name), []).append(change)
    of_checkpoint, of_model = changes
    differing = [key for key in {**of_checkpoint, **of_model} if of_checkpoint.get(key) != of_model.get(key)]
    if differing:
        counts = (Counter(kind for kind, _ in side) for side in changes)
        present, wanted = (
            ", ".join(f"{kind} of {count} modules" for kind, count in side.items()) or "none" for side in counts
        )
        raise CheckpointError(
            f"{checkpoint} holds another model than the {type(model).__name__} to train: edits of the checkpoint are "
            f"{present}, of the model {wanted}, the first that differs is {' of '.join(differing[0])}; load the "
            "model from the checkpoint by from_pretrained, or edit it in the same way, before making the trainer"
        )


class HeadTrainer(HeadTrainerMixin, Trainer):  # type: ignore[misc]
    """A Transformers `Trainer` that acts on heads.

    Without anything in `head_training` it trains as a `Trainer` does, bit for bit. See `HeadTrainerMixin`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from collab_compress.training import DropHeadOptions
        >>> training = HeadTraining(drophead=(DropHeadOptions(p=0.2),))
        >>> with TemporaryDirectory() as folder:
        ...     trainer = HeadTrainer(model, TrainingArguments(folder, report_to="none"), head_training=training)
        >>> trainer.head_training.acts
        True
    """


class HeadSeq2SeqTrainer(HeadTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
    """A Transformers `Seq2SeqTrainer` that acts on heads, as `HeadTrainer` does.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from transformers import Seq2SeqTrainingArguments
        >>> with TemporaryDirectory() as folder:
        ...     arguments = Seq2SeqTrainingArguments(folder, report_to="none", predict_with_generate=True)
        ...     trainer = HeadSeq2SeqTrainer(model, arguments)
        >>> trainer.head_training.acts
        False
    """


class HeadState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Opens the trainer's session, calls it for each step and epoch, and stores its state in `trainer_state.json`.

    Each trainer has a subclass that knows it: from a checkpoint Transformers restores callbacks by their class alone.
    """

    trainer: HeadTrainerMixin
    epoch = -1  # the latest that has begun; `state.epoch` is a share of the steps where the data has no length

    def state(self) -> dict[str, Any]:
        """Return the state in JSON types, as Transformers expects it of callbacks."""
        session = self.trainer.head_session
        return {"args": {}, "attributes": {"saved": {} if session is None else session.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the session, and restore its state from a checkpoint."""
        trainer, steps = self.trainer, max(state.max_steps, 1)
        trainer.close()  # of a batch that was too large, where the trainer then tries a smaller one
        warmup = args.get_warmup_steps(steps) / steps
        session = trainer.head_session = HeadSession(
            trainer.model, trainer.head_training, trainer.optimizer, warmup, trainer.processing_class
        )
        self.epoch = int((state.epoch or 0) + 1e-6) - 1
        if STATE in state.stateful_callbacks:
            session.load_state_dict(state.stateful_callbacks[STATE]["attributes"]["saved"])
        elif trainer.head_training.acts:
            logger.warning("the checkpoint has no state of head methods; they start as in a new run")
        rotation = trainer.head_training.rotation
        counts_epochs = rotation is not None and rotation.within_epochs and not rotation.of_training
        if counts_epochs and not has_length(kwargs.get("train_dataloader")):
            raise HeadError(
                "rotation within epochs needs the length of an epoch, and the training data have none; give them "
                "__len__, set epochs, rest and swap_back_after to whole numbers, or use of_training"
            )
        state.stateful_callbacks[STATE] = self.state()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count epochs."""
        self.epoch += 1

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an optimizer step, and rotate heads if it is time."""
        session, rotation = self.trainer.head_session, self.trainer.head_training.rotation
        assert session is not None
        if rotation is not None:
            epoch: float = self.epoch
            if rotation.within_epochs:
                epoch = state.global_step / state.max_steps if rotation.of_training else state.epoch or 0
            with torch.random.fork_rng(devices=[]):  # data loaders draw a seed, which a resumed run would not
                session.epoch(epoch, self._validation_batches())
        session.step(state.global_step / max(state.max_steps - 1, 1))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise if `compute_loss` left the penalties out."""
        session = self.trainer.head_session
        if session is not None and session.has_penalties and not session.penalty_called:
            raise HeadError(
                f"{type(self.trainer).__name__}.compute_loss adds no penalties; put HeadTrainerMixin before the "
                "class that has it, or let it call super().compute_loss"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Export the state for checkpoints that are saved after training."""
        state.stateful_callbacks[STATE] = self.state()

    def _validation_batches(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the batches of all validation data sets, whose loaders are made when they are read."""
        data = self.trainer.eval_dataset
        for name in data if isinstance(data, dict) else [None]:
            yield from self.trainer.get_eval_dataloader(name)


STATE = HeadState.__name__  # Transformers looks for it by the name of the class
