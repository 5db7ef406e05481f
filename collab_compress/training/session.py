"""One training run with everything that acts on heads: a plain object for any loop."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.errors import HeadError
from collab_compress.heads import DropHead, Rotator, alphas_of
from collab_compress.heads.sharding import reshard_
from collab_compress.training.alphas import AlphasTraining
from collab_compress.training.options import HeadTraining
from collab_compress.training.penalties import LOSSES, HeadLosses
from collab_compress.training.schedules import SCHEDULES

logger = logging.getLogger(__name__)
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

    Args:
        model: the bare model, not its distributed wrapper; with `training.alphas` it has alphas (`mix_heads_`).
        training: what acts on its heads.
        optimizer: the one that trains it; alphas and rotation cannot do without.
        warmup: share of the steps in which the learning rate rises, for the schedule of that name.

    Raises:
        HeadError: alphas that the model or the optimizer does not have; no optimizer where one is needed; what
            `Rotator` or `Tap` refuse.
        UnsupportedModelError: the model's family is not known.
    """

    def __init__(
        self, model: PreTrainedModel, training: HeadTraining, optimizer: Any = None, warmup: float = 0.0
    ) -> None:
        self.training, self.optimizer, self.warmup = training, optimizer, warmup
        self._alphas: AlphasTraining | None = None
        self._rotator: Rotator | None = None
        self._weights: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._losses: HeadLosses | None = None
        self._dropheads: list[DropHead] = []
        self._warned: set[str] = set()
        self._closed = False
        reshard_(model)  # an optimizer knows the parameters of FSDP2 that are in place between passes
        try:
            if training.rotation is not None:
                if optimizer is None:
                    raise HeadError("rotation moves the optimizer's state with the heads; pass optimizer=")
                self._rotator = Rotator(model, training.rotation)
                self._rotator.check(optimizer)
            if training.alphas is not None:
                self._alphas = AlphasTraining(list(alphas_of(model).values()), training.alphas, optimizer)
            if training.penalties:
                kinds = {each.loss: each.kinds or LOSSES[each.loss].kinds for each in training.penalties}
                self._losses = HeadLosses(model, kinds)
            for options in training.drophead:
                self._dropheads.append(DropHead(model, 0.0, options.kinds))
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
        for drophead, options in zip(self._dropheads, self.training.drophead, strict=True):
            start = options.p if options.start is None else options.start
            drophead.p = SCHEDULES[options.schedule](progress, self.warmup, start, options.p)
        for penalty in self.training.penalties:
            weight = LOSSES[penalty.loss].weight if penalty.weight is None else penalty.weight
            self._weights[penalty.loss] = SCHEDULES[penalty.schedule](progress, self.warmup, weight, weight)
        if self._alphas is not None:
            self._alphas.step(progress)

    def epoch(self, epoch: int, batches: Iterable[Mapping[str, Tensor]] | None = None) -> None:
        """Begin an epoch: rotate heads if it is time.

        Args:
            epoch: number of the epoch, from 0.
            batches: validation data, on which rotation measures importance.
        """
        if self._rotator is not None:
            self._rotator.epoch(epoch, self.optimizer, batches)

    def penalty(self, loss: Tensor | None = None) -> Tensor:
        """Give the weighted sum of all penalties of the last forward pass, to be added to the training loss.

        Args:
            loss: the training loss, to warn where a penalty is too faint to act.
        """
        values = self._losses.values() if self._losses is not None else {}
        if self._losses is not None and not values:
            self._warn("nothing", "no head was read in this step, so there is no penalty; is the model in train()?")
        weights = dict(self._weights)
        growth = self._alphas.growth() if self._alphas is not None else None
        if growth is not None and self.training.alphas is not None:
            values["nuclear-growth"], weights["nuclear-growth"] = growth, self.training.alphas.growth_weight
        for name, value in values.items():
            self._note(name, value)
            if loss is not None:
                self._note(f"{name}/share", (weights[name] * value / loss.to(value.device)).abs())
        total = torch.zeros(())
        for name, value in values.items():
            total = total.to(value.device) + weights[name] * value
        return total

    def logs(self) -> dict[str, float]:
        """Give the mean of each penalty, not weighted, and its share of the loss, since the last call."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        for name, share in means.items():
            if name.endswith("/share") and name.removesuffix("/share") in self._steady and 0 < share < FAINT:
                self._warn(
                    name, f"penalty {name.removesuffix('/share')} is {share:.1e} of the loss: raise its weight"
                )
        self._sums, self._counts = {}, {}
        return means | {f"drophead/{place}": drop.p for place, drop in enumerate(self._dropheads)}

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs to go on identically, in JSON types."""
        state: dict[str, Any] = {}
        if self._rotator is not None:
            state["rotation"] = self._rotator.state_dict()
        if self._alphas is not None:
            state["norms"] = self._alphas.norms
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; weights are the checkpoint's."""
        if self._rotator is not None and "rotation" in state:
            self._rotator.load_state_dict(state["rotation"])
        if self._alphas is not None:
            self._alphas.norms = state.get("norms")

    def close(self) -> None:
        """Leave the model as it was, but for its weights."""
        parts: list[DropHead | HeadLosses | AlphasTraining | None] = [*self._dropheads, self._losses, self._alphas]
        for part in parts:
            if part is not None:
                part.remove()
        self._dropheads, self._losses, self._alphas, self._closed = [], None, None, True

    def __enter__(self) -> "HeadSession":
        """Return the session itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the model as it was, but for its weights."""
        self.close()

    @property
    def _steady(self) -> set[str]:
        """Penalties that are meant to act all the time."""
        return {each.loss for each in self.training.penalties if each.schedule == "constant"}

    def _warn(self, once: str, message: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning("%s", message)

    def _note(self, name: str, value: Tensor) -> None:
        total = self._sums.get(name)
        self._sums[name] = value.detach() if total is None else total + value.detach()
        self._counts[name] = self._counts.get(name, 0) + 1
