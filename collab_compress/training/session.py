"""One training run with everything that acts on heads: a plain object for any loop."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS
from collab_compress.errors import HeadError
from collab_compress.heads import DropHead, Rotator
from collab_compress.heads.alphas import mixed_projections
from collab_compress.heads.sharding import reshard_
from collab_compress.training.growth import AlphasTraining
from collab_compress.training.head_training import SCHEDULES, HeadTraining, of_kinds
from collab_compress.training.penalties import LOSSES, HeadLosses

logger = logging.getLogger(__name__)
TASK = "task_loss"
GROWTH = "nuclear-growth"
FAINT = 1e-4  # a penalty below this share of the loss hardly acts


class HeadSession:
    """Act on the heads of a model while it trains.

        model.train()
        with HeadSession(model, training, optimizer=optimizer, warmup=0.1) as session:
            for epoch in range(epochs):
                session.epoch(epoch, validation_batches)
                for batch in data:
                    session.step(done / (steps - 1))
                    loss = model(**batch).loss
                    (loss + session.penalty(loss)).backward()
                    ...

    With gradient accumulation `step` is called once for each optimizer step, `penalty` after each forward pass, and
    what it gives is divided by the number of passes, as the loss is. Of several passes before `penalty` the last one
    counts.

    `training.loss_normalization` is a Trainer's; in a loop of one's own the loop decides.

    Args:
        model: the bare model, not its distributed wrapper; with `training.alphas` it has alphas (`mix_heads_`).
        training: what acts on its heads.
        optimizer: the one that trains it; alphas and rotation cannot do without.
        warmup: share of the steps in which the learning rate rises, for the schedule of that name.

    Raises:
        HeadError: alphas that the model or the optimizer does not have; no optimizer where one is needed; what
            `Rotator` or `Tap` refuse; DeepSpeed, with which none of this was tried.
        UnsupportedModelError: the model's family is not known.
    """

    def __init__(
        self, model: PreTrainedModel, training: HeadTraining, optimizer: Any = None, warmup: float = 0.0
    ) -> None:
        self.training, self.optimizer, self.warmup = training, optimizer, warmup
        self._alphas: AlphasTraining | None = None
        self._rotator: Rotator | None = None
        self._penalties = {
            of_kinds(each.name, each.acts_on, LOSSES[each.name].kinds): each for each in training.penalties
        }
        self._weights: dict[str, float] = {}
        self._sums: dict[str, tuple[Tensor, int]] = {}  # since the last logs, and of how many passes
        self._losses: HeadLosses | None = None
        self._dropheads: list[DropHead] = []
        self._warned: set[str] = set()
        self._device = next(model.parameters()).device
        self.penalised = False
        self._closed = False
        if training != HeadTraining(loss_normalization=training.loss_normalization):
            _refuse_deepspeed(model, optimizer)
        reshard_(model)  # an optimizer knows the parameters of FSDP2 that are in place between passes
        try:
            if training.rotation is not None:
                if optimizer is None:
                    raise HeadError("rotation moves the optimizer's state with the heads; pass optimizer=")
                self._rotator = Rotator(model, training.rotation)
                self._rotator.check(optimizer)
            if training.alphas is not None:
                mixed = [projection for _, projection in mixed_projections(model, training.alphas.kinds)]
                self._alphas = AlphasTraining(mixed, training.alphas, optimizer)
            if training.penalties:
                losses = {name: (each.name, each.acts_on) for name, each in self._penalties.items()}
                self._losses = HeadLosses(model, losses)
            for options in training.drophead:
                self._dropheads.append(DropHead(model, 0.0, options.kinds, options.rescale))
            self.step(0.0)
        except BaseException:
            self.close()
            raise

    def step(self, progress: float) -> None:
        """Begin an optimizer step: set what follows a schedule.

        Args:
            progress: share of the training that lies behind, from 0 at the first step to 1 at the last.
        """
        if self._closed:
            raise HeadError("the session is closed; open a new one")
        self.penalised = False
        for drophead, options in zip(self._dropheads, self.training.drophead, strict=True):
            start = options.p if options.start is None else options.start
            drophead.p = SCHEDULES[options.schedule](progress, self.warmup, start, options.p)
        for name, penalty in self._penalties.items():
            weight = LOSSES[penalty.name].weight if penalty.weight is None else penalty.weight
            self._weights[name] = SCHEDULES[penalty.schedule](progress, self.warmup, weight, weight)
        if self._alphas is not None:
            self._alphas.step(progress)

    def epoch(self, epoch: float, batches: Iterable[Mapping[str, Tensor]] | None = None) -> None:
        """Begin an epoch, or a step within one: rotate heads if it is time.

        Where `RotationOptions` has fractions of epochs, call it before each step, as in
        `session.epoch(epoch + number / len(data), validation_batches)`; in between it costs nothing.

        Args:
            epoch: from 0; 1.5 is the middle of the second.
            batches: validation data, on which rotation measures importance; read only where heads are swapped now.
        """
        if self._rotator is not None:
            self._rotator.epoch(epoch, self.optimizer, batches)

    def penalty(self, loss: Tensor | None = None) -> Tensor:
        """Return the weighted sum of all penalties of the last forward pass, to be added to the training loss.

        Args:
            loss: the training loss, to log it, and to warn where a penalty is too faint to act.
        """
        self.penalised = True
        values = self._losses.values() if self._losses is not None else {}
        if self._losses is not None and not values:
            self._warn("nothing", "no head was read in this step, so there is no penalty; is the model in train()?")
        weights = dict(self._weights)
        growth = self._alphas.growth() if self._alphas is not None else None
        if growth is not None and self.training.alphas is not None:
            values[GROWTH], weights[GROWTH] = growth, self.training.alphas.growth_weight
        if loss is not None:
            self._note(TASK, loss)
        total = torch.zeros((), device=self._device)
        for name, value in values.items():
            weighted = weights[name] * value
            total = total + weighted.to(self._device)
            self._note(name, value)
            if loss is not None:
                self._note(f"{name}/share", (weighted / loss.to(value.device)).abs())
        return total

    def logs(self) -> dict[str, float]:
        """Return the unweighted mean of each penalty and its share of the loss, over the passes since the last call.

        The loss without penalties is beside them, as "task_loss".

        The mean is over processes too, so that all of them must call it.
        """
        names = [TASK] + [name + what for name in (*self._penalties, GROWTH) for what in ("", "/share")]
        pairs = [self._sums.get(name, (torch.zeros(()), 0)) for name in names]
        totals = torch.stack([total.float().to(self._device) for total, _ in pairs])
        table = torch.stack([totals, torch.tensor([float(count) for _, count in pairs], device=self._device)], 1)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(table)
        means = {name: total / count for name, (total, count) in zip(names, table.tolist(), strict=True) if count}
        self._sums = {}
        for name, share in means.items():
            penalty = name.removesuffix("/share")
            if name != penalty and penalty in self._steady and 0 < share < FAINT:
                self._warn(name, f"penalty {penalty} is {share:.1e} of the loss: raise its weight")
        for drophead, options in zip(self._dropheads, self.training.drophead, strict=True):
            means[of_kinds("drophead", options.kinds, KINDS)] = drophead.p
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue identically, in JSON types."""
        state: dict[str, Any] = {}
        if self._rotator is not None:
            state["rotation"] = self._rotator.state_dict()
        if self._alphas is not None:
            norms = self._alphas.norms
            state["norms"] = None if norms is None else norms.tolist()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; weights are the checkpoint's."""
        if self._rotator is not None and "rotation" in state:
            self._rotator.load_state_dict(state["rotation"])
        if self._alphas is not None:
            norms = state.get("norms")
            self._alphas.norms = None if norms is None else torch.tensor(norms, dtype=torch.float64)

    def close(self) -> None:
        """Remove everything but the trained weights from the model."""
        parts: list[DropHead | HeadLosses | AlphasTraining | None] = [*self._dropheads, self._losses, self._alphas]
        for part in parts:
            if part is not None:
                part.remove()
        self._dropheads, self._losses, self._alphas, self._closed = [], None, None, True

    def __enter__(self) -> "HeadSession":
        """Return the session itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything but the trained weights from the model."""
        self.close()

    @property
    def penalises(self) -> bool:
        """Whether anything is to be added to the loss."""
        alphas = self.training.alphas
        return bool(self.training.penalties) or (alphas is not None and alphas.growth_weight > 0)

    @property
    def _steady(self) -> set[str]:
        """Penalties that are meant to act all the time."""
        return {name for name, each in self._penalties.items() if each.schedule == "constant"}

    def _warn(self, once: str, message: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning("%s", message)

    def _note(self, name: str, value: Tensor) -> None:
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value.detach(), count + 1


def _refuse_deepspeed(model: PreTrainedModel, optimizer: Any) -> None:
    """Refuse what DeepSpeed holds, where that can be seen: the optimizer, or weights that are away between passes."""
    made_by = (type(each).__module__ for each in (optimizer, getattr(optimizer, "optimizer", None)))
    if any("deepspeed" in module for module in made_by) or any(hasattr(p, "ds_id") for p in model.parameters()):
        raise HeadError(
            "DeepSpeed was not tried: ZeRO steps copies of the weights, or keeps them in pieces that do not follow "
            "heads; shard the model with FSDP2 instead (fully_shard), or leave it whole"
        )
