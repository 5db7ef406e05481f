"""Join a Transformers `Trainer`: one line in an existing script."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from collab_compress.calibration import running
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of, mix_heads_
from collab_compress.heads.pairing import PAIRINGS
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
    a stock trainer adds up over passes and processes). Logs hold each penalty, and `loss` is the sum. Checkpoints
    hold what a resumed run needs. Alphas are put into the model at once, for the optimizer to find them.

    Args:
        trainer: its optimizer not yet made, where alphas are to be added.
        training: what acts on heads.

    Raises:
        HeadError: the trainer was joined before; alphas or rotation lack what they need; the trainer replicates its
            model within one process.
    """
    if isinstance(trainer, _HeadTrainer):
        raise HeadError("the trainer was joined before; make a new one")
    if trainer.args.n_gpu > 1:
        raise HeadError(
            "DataParallel copies the model in each step; start one process for each GPU instead (torchrun)"
        )
    if _measures(training) and trainer.eval_dataset is None:
        raise HeadError(
            "rotation measures the importance of heads on validation data; pass eval_dataset to the trainer"
        )
    if training.alphas is not None and not alphas_of(trainer.model):
        if trainer.model_init is not None:
            raise HeadError("train() makes the model anew; call mix_heads_(model) in model_init")
        mix_heads_(trainer.model)
    base = type(trainer)
    trainer.__class__ = type(base.__name__, (_HeadTrainer, base), {"__module__": base.__module__})
    trainer.add_callback(HeadCallback(trainer, training))


class HeadCallback(TrainerCallback):  # type: ignore[misc]
    """Opens a `HeadSession` when training begins, moves it on with each step and epoch, and closes it."""

    def __init__(self, trainer: Trainer, training: HeadTraining) -> None:
        self.trainer, self.training = trainer, training
        self.session: HeadSession | None = None
        self.epoch = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the session, and bring it to where a checkpoint left it."""
        self._close()  # an interrupted run does not come to its end
        steps = max(state.max_steps, 1)
        warmup = args.get_warmup_steps(steps) / steps
        self.session = HeadSession(self.trainer.model, self.training, self.trainer.optimizer, warmup)
        self.epoch = int((state.epoch or 0) + 1e-6)
        if STATE in state.stateful_callbacks:
            self.session.load_state_dict(state.stateful_callbacks[STATE])

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin an epoch."""
        if self.session is not None:
            with torch.random.fork_rng(devices=[]):  # data loaders draw a seed, which a resumed run would not
                self.session.epoch(self.epoch, self._validation() if _measures(self.training) else None)
        self.epoch += 1  # `state.epoch` is a share of the steps where the data has no length

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
        self._close()

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def _validation(self) -> Iterable[Mapping[str, Tensor]]:
        names = self.trainer.eval_dataset
        if not isinstance(names, dict):
            loader: Iterable[Mapping[str, Tensor]] = self.trainer.get_eval_dataloader()
            return loader
        return chain.from_iterable(self.trainer.get_eval_dataloader(name) for name in names)


class _HeadTrainer:
    """What a joined trainer does differently; stands before the trainer's own class."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any) -> Any:
        """Compute the loss as the trainer does, and add the penalties while the model trains."""
        trainer: Any = super()
        session = _session(self)
        if not model.training or session is None:
            return trainer.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        items = kwargs.get("num_items_in_batch")
        if items is not None and _unsure(self):
            with torch.random.fork_rng(), running(model):
                probed = [_probe(trainer, model, inputs, scale * items) for scale in (1, 2)]
            _decide_(self, probed)
        result = trainer.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        loss = result[0] if return_outputs else result
        passes = _passes(self, items)
        loss = loss + session.penalty(loss.detach() * passes).to(loss.device) / passes
        return (loss, result[1]) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the penalties beside the loss."""
        session = _session(self)
        if session is not None and "loss" in logs:
            logs |= session.logs()
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)


def _measures(training: HeadTraining) -> bool:
    return training.rotation is not None and PAIRINGS[training.rotation.strategy].measures


def _session(trainer: Any) -> HeadSession | None:
    callbacks = trainer.callback_handler.callbacks
    return next((callback.session for callback in callbacks if isinstance(callback, HeadCallback)), None)


def _unsure(trainer: Any) -> bool:
    """Whether the trainer takes the loss to be normalised over a step because of a signature only.

    It goes by `forward` accepting `num_items_in_batch`; but many heads (regression, BERT's classifiers, Marian)
    accept and ignore it, so that their means would be added up over passes and processes instead of averaged.
    """
    own = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    told = getattr(trainer, "loss_is_scaled_for_ga", None) is not None or hasattr(trainer, "_normalised")
    processes = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    adds_up = trainer.current_gradient_accumulation_steps * processes > 1
    return adds_up and trainer.model_accepts_loss_kwargs and not own and not told


def _probe(trainer: Any, model: Any, inputs: dict[str, Any], items: Tensor | int) -> float:
    return float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=items))


def _decide_(trainer: Any, losses: list[float]) -> None:
    """Tell the trainer, once it can be told, that the loss does not depend on the number of items.

    Processes decide together: they would wait for each other if they counted items differently.

    Args:
        losses: of this process's batch, by its number of items and by twice as many.
    """
    every = trainer.accelerator.gather(torch.tensor([losses], device=trainer.args.device))  # (processes, 2)
    telling = every[every.isfinite().all(1) & (every[:, 0] != 0)]
    if len(telling):
        trainer._normalised = bool((telling[:, 0] != telling[:, 1]).any())
        if not trainer._normalised:
            logger.info("the model ignores num_items_in_batch: its loss is averaged over passes and processes")
            trainer.model_accepts_loss_kwargs = False


def _passes(trainer: Any, items: Tensor | int | None) -> int:
    """Say by what the penalty must be divided: the passes of a step where the loss is already scaled for them."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        own = trainer.compute_loss_func is not None
        scaled = own or (trainer.model_accepts_loss_kwargs and items is not None)
    return int(trainer.current_gradient_accumulation_steps) if scaled else 1
