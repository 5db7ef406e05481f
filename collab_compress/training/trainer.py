"""Join a Transformers `Trainer`: one line in an existing script."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from collab_compress.calibration import running
from collab_compress.heads import alphas_of, mix_heads_
from collab_compress.training.options import HeadTraining
from collab_compress.training.session import HeadSession

logger = logging.getLogger(__name__)
STATE = "collab_compress_heads"  # in the checkpoint's trainer_state.json


def join_trainer_(trainer: Trainer, training: HeadTraining) -> None:
    """Let a trainer act on the heads of its model while it trains, in place.

        trainer = Trainer(model, args, train_dataset=...)
        join_trainer_(trainer, HeadTraining(drophead=(DropHeadOptions(p=0.2),)))
        trainer.train()

    Works with any subclass of `Trainer`. Penalties are added to the loss that the trainer computes, so labels, label
    smoothing and a loss function of one's own keep their meaning; they are means over a batch, and gradient
    accumulation averages them over its passes (and the loss of models that ignore `num_items_in_batch`, whose means
    a stock trainer adds up). Logs hold each penalty. Checkpoints hold what a resumed run needs.
    Alphas are put into the model at once, for the optimizer to find them.

    Args:
        trainer: its optimizer not yet made.
        training: what acts on heads.
    """
    if training.alphas is not None and not alphas_of(trainer.model):
        mix_heads_(trainer.model)
    base = type(trainer)
    trainer.__class__ = type(base.__name__, (_HeadTrainer, base), {"__module__": base.__module__})
    trainer.add_callback(HeadCallback(trainer, training))


class HeadCallback(TrainerCallback):  # type: ignore[misc]
    """Opens a `HeadSession` when training begins, moves it on with each step and epoch, and closes it."""

    def __init__(self, trainer: Trainer, training: HeadTraining) -> None:
        self.trainer, self.training = trainer, training
        self.session: HeadSession | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the session, and bring it to where a checkpoint left it."""
        steps = max(state.max_steps, 1)
        optimizer = self.trainer.optimizer
        warmup = args.get_warmup_steps(steps) / steps
        self.session = HeadSession(self.trainer.model, self.training, optimizer, warmup)
        if STATE in state.stateful_callbacks:
            self.session.load_state_dict(state.stateful_callbacks[STATE])

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an epoch."""
        if self.session is not None and self.training.rotation is not None:
            batches = None if self.trainer.eval_dataset is None else self.trainer.get_eval_dataloader()
            with torch.random.fork_rng(devices=[]):  # data loaders draw a seed, which a resumed run would not
                self.session.epoch(int(state.epoch or 0), batches)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an optimizer step."""
        if self.session is not None:
            self.session.step(state.global_step / max(state.max_steps - 1, 1))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Have the state at hand when a checkpoint is written, which happens after this."""
        if self.session is not None:
            state.stateful_callbacks[STATE] = self.session.state_dict()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the session."""
        if self.session is not None:
            self.session.close()
            self.session = None


class _HeadTrainer:
    """What a joined trainer does differently; stands before the trainer's own class."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """Compute the loss as the trainer does, and add the penalties while the model trains."""
        trainer: Any = super()
        session = _session(self)
        if model.training and session is not None and num_items_in_batch is not None:
            _check_normalisation_(self, inputs, num_items_in_batch)
        loss, outputs = trainer.compute_loss(model, inputs, True, num_items_in_batch)
        if model.training and session is not None:
            passes = _passes(self, num_items_in_batch)
            loss = loss + session.penalty(loss.detach() * passes).to(loss.device) / passes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the penalties beside the loss."""
        session = _session(self)
        if session is not None and "loss" in logs:
            logs |= session.logs()
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)


def _session(trainer: Any) -> HeadSession | None:
    callbacks = trainer.callback_handler.callbacks
    return next((callback.session for callback in callbacks if isinstance(callback, HeadCallback)), None)


def _check_normalisation_(trainer: Any, inputs: Mapping[str, Any], items: Tensor | int) -> None:
    """Find out once whether the model's loss is normalised over the passes of a step, as trainers take for granted.

    The trainer goes by the signature of `forward`, but many heads (regression, BERT's classifiers, Marian) accept
    `num_items_in_batch` and ignore it: their means would be added up over the passes instead of averaged.
    """
    if trainer.current_gradient_accumulation_steps == 1 or not trainer.model_accepts_loss_kwargs:
        return
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None or hasattr(trainer, "_normalised"):
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    with torch.random.fork_rng(), running(model):
        losses = [float(model(**inputs, num_items_in_batch=scale * items)["loss"]) for scale in (1, 2)]
    trainer._normalised = losses[0] != losses[1]
    if not trainer._normalised:
        logger.info("%s ignores num_items_in_batch: its loss is averaged over passes", type(model).__name__)
        trainer.model_accepts_loss_kwargs = False


def _passes(trainer: Any, items: Tensor | int | None) -> int:
    """Say by what the penalty must be divided: the passes of a step where the loss is already scaled for them."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        own = trainer.compute_loss_func is not None
        scaled = own or (trainer.model_accepts_loss_kwargs and items is not None)
    return int(trainer.current_gradient_accumulation_steps) if scaled else 1
