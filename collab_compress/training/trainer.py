"""Transformers' trainers, with everything that acts on heads."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

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

from collab_compress.calibration import evaluation_mode
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of, mix_heads_
from collab_compress.training.head_training import HeadTraining
from collab_compress.training.session import HeadSession

logger = logging.getLogger(__name__)


class HeadTrainerMixin:
    """Mixin that makes a trainer act on the heads of its model; it comes before the trainer's own class.

        class HeadSFTTrainer(HeadTrainerMixin, SFTTrainer): ...

    Penalties are added to the loss that the trainer computes, so labels, label smoothing and a custom loss function
    keep their meaning. They are means over a batch, and over the passes and processes of a step. The loss itself adds
    up as `HeadTraining.loss_normalization` says:

    - `stock`: as in the plain trainer. Where the model takes `num_items_in_batch`, losses are added up over passes
      and processes, for they should be shares of one mean. Many models take it and ignore it (regression, BERT's
      classifiers, Marian): their gradient grows with the number of passes and processes, and a penalty weighs less
      beside it.
    - `mean`: the mean over passes and processes of each batch's own mean. Where tokens count, those of a short batch
      weigh more. A custom loss function gets None for `num_items_in_batch`.
    - `auto` (default): `mean` for a model that ignores `num_items_in_batch`, else `stock`. Which it is shows in the
      first step that has several passes or processes: the loss of its first batch is computed for two numbers of
      items. Without anything that acts on heads, `stock`.

    Logs hold each penalty, and `loss` is the sum. Checkpoints hold what a resumed run needs. Alphas are put into the
    model when it is handed over, for the optimizer to find them.

    Args:
        head_training: what acts on heads; nothing if not given.
        given: as the trainer's own class takes them.

    Raises:
        HeadError: alphas or rotation lack what they need; the trainer replicates its model within one process, or
            shares it out in a way that cannot work.
    """

    def __init__(self, *args: Any, head_training: HeadTraining | None = None, **given: Any) -> None:
        self.head_training = HeadTraining() if head_training is None else head_training
        self._takes_mean: bool | None = {"stock": False, "mean": True}.get(self.head_training.loss_normalization)
        if self.head_training == HeadTraining():
            self._takes_mean = False
        super().__init__(*args, **given)
        self._callback = _HeadCallback(self)
        trainer: Any = self
        _check(trainer, self.head_training)
        _mix_(trainer.model, self.head_training)
        trainer.add_callback(HeadState)
        trainer.add_callback(self._callback)

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        """Make the model as the trainer does, with alphas if they are to be trained."""
        trainer: Any = super()
        model: PreTrainedModel = trainer.call_model_init(trial)
        _mix_(model, self.head_training)
        return model

    def train(self, *args: Any, **given: Any) -> Any:
        """Train as the trainer does; whatever happens, nothing acts on the model's heads afterwards."""
        trainer: Any = super()
        try:
            return trainer.train(*args, **given)
        finally:
            self.close()

    def close(self) -> None:
        """Remove everything but the trained weights from the model; does nothing if called again."""
        self._callback.close()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **given: Any) -> Tensor:
        """Run a training pass as the trainer does, with the loss normalized as `loss_normalization` says."""
        trainer: Any = super()
        if self._takes_mean is None:
            self._takes_mean = self._ignores_items(model, inputs, num_items_in_batch)
        items = None if self._takes_mean else num_items_in_batch
        loss: Tensor = trainer.training_step(model, inputs, items, **given)
        return loss

    def _ignores_items(self, model: Any, inputs: Any, items: Any) -> bool | None:
        """Return whether the loss is the same for any `num_items_in_batch`; None while that makes no difference."""
        trainer: Any = self
        parts = trainer.current_gradient_accumulation_steps * trainer.args.world_size
        if parts == 1 or items is None:
            return None
        if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
            return True  # the trainer takes the mean by itself
        plain: Any = super()
        count = torch.as_tensor(items)
        with evaluation_mode(model), torch.random.fork_rng():
            one, other = (
                plain.compute_loss(model, dict(trainer._prepare_inputs(inputs)), num_items_in_batch=number)
                for number in (count, 2 * count)
            )
        return bool(torch.equal(one, other)) if bool(one.isfinite() & (one != 0)) else None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **given: Any
    ) -> Any:
        """Compute the loss as the trainer does, and add the penalties while the model trains."""
        trainer: Any = super()
        result = trainer.compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **given
        )
        session = self._callback.session
        if not model.training or session is None:
            return result
        loss = result[0] if return_outputs else result
        passes = _passes(self, num_items_in_batch)
        if self._takes_mean and getattr(self, "loss_is_scaled_for_ga", None) is None:
            loss = loss / passes
        if session.penalises:
            loss = loss + session.penalty(loss.detach() * passes).to(loss.device) / passes
        return (loss, result[1]) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **given: Any) -> None:
        """Log the penalties beside the loss."""
        session = self._callback.session
        if session is not None and "loss" in logs:
            logs |= session.logs()
        trainer: Any = super()
        trainer.log(logs, *args, **given)


class HeadTrainer(HeadTrainerMixin, Trainer):  # type: ignore[misc]
    """A Transformers `Trainer` that acts on heads.

        training = HeadTraining(drophead=(DropHeadOptions(p=0.2),))
        trainer = HeadTrainer(model, args, train_dataset=..., head_training=training)
        trainer.train()

    Without anything in `head_training` it trains as a `Trainer` does, bit for bit. See `HeadTrainerMixin`.
    """


class HeadSeq2SeqTrainer(HeadTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
    """A Transformers `Seq2SeqTrainer` that acts on heads, as `HeadTrainer` does."""


class HeadState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Callback that stores the state of head methods in a checkpoint's `trainer_state.json`."""

    session: HeadSession | None = None

    def state(self) -> dict[str, Any]:
        """Return the state in JSON types, as Transformers expects it of callbacks."""
        return {"args": {}, "attributes": {"saved": {} if self.session is None else self.session.state_dict()}}


STATE = HeadState.__name__  # Transformers looks for it by the name of the class


class _HeadCallback(TrainerCallback):  # type: ignore[misc]
    """Opens a `HeadSession` when training begins, moves it on with each step and epoch, and closes it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.session: HeadSession | None = None
        self.epoch = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Open the session, and bring it to where a checkpoint left it."""
        trainer, steps = self.trainer, max(state.max_steps, 1)
        warmup = args.get_warmup_steps(steps) / steps
        self.session = HeadSession(trainer.model, trainer.head_training, trainer.optimizer, warmup)
        self.epoch = int((state.epoch or 0) + 1e-6)
        if STATE in state.stateful_callbacks:
            self.session.load_state_dict(state.stateful_callbacks[STATE]["attributes"]["saved"])
        elif trainer.head_training != HeadTraining():
            logger.warning("the checkpoint was saved without a state of heads; they begin as in a new run")
        if self._within_epochs and not has_length(given.get("train_dataloader")):
            raise HeadError(
                "rotation within epochs needs to know how long one is, and the training data have no length; give "
                "them one (__len__), or let epochs, rest and swap_back_after be whole numbers"
            )
        self._holder().session = self.session
        state.stateful_callbacks[STATE] = self._holder().state()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an epoch."""
        if self.session is not None:
            self._rotate(self.session, self.epoch)
        self.epoch += 1  # `state.epoch` is a share of the steps where the data has no length

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an optimizer step."""
        if self.session is not None:
            if self._within_epochs:
                self._rotate(self.session, state.epoch or 0)
            self.session.step(state.global_step / max(state.max_steps - 1, 1))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Raise if `compute_loss` left the penalties out."""
        if self.session is not None and self.session.penalises and not self.session.penalised:
            name = type(self.trainer).__name__
            raise HeadError(
                f"{name}.compute_loss adds no penalties; put HeadTrainerMixin before the class that has it, or "
                "let it call super().compute_loss"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Export the state for checkpoints that are saved after training."""
        state.stateful_callbacks[STATE] = self._holder().state()

    def close(self) -> None:
        """Close the session, if one is open."""
        if self.session is not None:
            self.session.close()
            self.session = self._holder().session = None

    def _holder(self) -> "HeadState":
        """Return the callback that saves the state; restoring callbacks from a checkpoint creates a new one."""
        callbacks = self.trainer.callback_handler.callbacks
        return next(callback for callback in callbacks if isinstance(callback, HeadState))

    @property
    def _within_epochs(self) -> bool:
        rotation = self.trainer.head_training.rotation
        return rotation is not None and rotation.within_epochs

    def _rotate(self, session: HeadSession, epoch: float) -> None:
        with torch.random.fork_rng(devices=[]):  # data loaders draw a seed, which a resumed run would not
            session.epoch(epoch, self._validation())

    def _validation(self) -> Iterable[Mapping[str, Tensor]] | None:
        if not _measures(self.trainer.head_training):
            return None
        given = self.trainer.eval_dataset
        names = [(name,) for name in given] if isinstance(given, dict) else [()]
        return chain.from_iterable(self.trainer.get_eval_dataloader(*name) for name in names)  # made when read


def _check(trainer: Any, training: HeadTraining) -> None:
    """Refuse what cannot work."""
    if training == HeadTraining(loss_normalization=training.loss_normalization):
        return
    if trainer.args.n_gpu > 1:
        raise HeadError(
            "DataParallel copies the model in each step; start one process for each GPU instead (torchrun)"
        )
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        name = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP1"
        raise HeadError(
            f"{name} keeps weights in pieces that do not follow heads; shard the model with FSDP2 instead "
            "(fsdp_config={'fsdp_version': 2}), or leave it whole"
        )
    if _measures(training) and trainer.eval_dataset is None:
        raise HeadError(
            "rotation measures the importance of heads on validation data; pass eval_dataset to the trainer"
        )


def _mix_(model: PreTrainedModel, training: HeadTraining) -> None:
    if training.alphas is not None and not alphas_of(model):
        mix_heads_(model, training.alphas.kinds)


def _measures(training: HeadTraining) -> bool:
    return training.rotation is not None and training.rotation.measures


def _passes(trainer: Any, items: Tensor | int | None) -> int:
    """Return the accumulation divisor: the passes of a step, or 1 if the trainer divides the loss itself."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        own = trainer.compute_loss_func is not None
        scaled = own or (trainer.model_accepts_loss_kwargs and items is not None)
    return int(trainer.current_gradient_accumulation_steps) if scaled else 1
