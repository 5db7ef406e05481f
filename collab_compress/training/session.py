"""One training run with all methods that act on heads, for any training loop."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import KINDS, transformers_model
from collab_compress.checkpoint import models_in
from collab_compress.errors import HeadError, check_number
from collab_compress.heads import DropHead, Rotator
from collab_compress.heads.alphas import MixedProjection, find_mixed_projections
from collab_compress.heads.sharding import full_tensor, refuse_split, reshard_
from collab_compress.heads.swap import stepped_by, unwrap_optimizer
from collab_compress.losses import nuclear_growth
from collab_compress.training.head_training import (
    LOSSES,
    SCHEDULES,
    AlphasOptions,
    HeadLosses,
    HeadTraining,
    of_kinds,
)
from collab_compress.transformers_parts import UNLABELLED

logger = logging.getLogger(__name__)
_in_training: WeakSet[PreTrainedModel] = WeakSet()  # models, and those inside them, on which a session is open
TASK = "task_loss"
GROWTH = "nuclear-growth"
MIN_PENALTY_SHARE = 1e-4  # of the loss, below which a penalty hardly acts


class HeadSession:
    """Act on the heads of a model while it trains.

    With gradient accumulation, call `step` once for each optimizer step and `penalty` after each forward pass, and
    divide its result by the number of passes, like the loss.

    `training.loss_normalization` applies to a Trainer only.

    Args:
        model: the bare model, not its distributed wrapper; with `training.alphas` it has alphas (`mix_heads_`).
        training: the methods that act on its heads.
        optimizer: the one that trains it; needed for alphas and rotation.
        warmup: share of the steps in which the learning rate rises, for the schedule `scheduled`.
        tokenizer: the model's; its end-of-sequence tokens do not count for the importance by which heads rotate.

    Raises:
        HeadError: the model or the optimizer lacks the alphas; an optimizer is needed; the warmup is 1 or more, and
            a schedule needs it; another session acts on the model; `Rotator` or `Recorder` refuse; or DeepSpeed is
            used, which is not supported.
        UnsupportedModelError: the model's family is not known.

    Example:
        >>> from collab_compress.training import PenaltyOptions
        >>> training = HeadTraining(penalties=(PenaltyOptions("agreement"),))
        >>> data, optimizer = [batch] * 4, torch.optim.SGD(model.parameters())
        >>> with HeadSession(model.train(), training, optimizer=optimizer) as session:
        ...     session.epoch(0)  # of each epoch, with validation batches if heads rotate by importance
        ...     for done, batch in enumerate(data):
        ...         session.step(done / (len(data) - 1))
        ...         loss = model(**batch)[0].square().mean()
        ...         (loss + session.penalty(loss)).backward()
        ...         optimizer.step()
        ...     sorted(session.logs())
        ['agreement', 'agreement/share', 'task_loss']
    """

    def __init__(
        self,
        model: PreTrainedModel,
        training: HeadTraining,
        optimizer: Optimizer | None = None,
        warmup: float = 0.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        schedules = [*(o.schedule for o in training.drophead), *(o.schedule for o in training.penalties)]
        if "scheduled" in schedules:
            check_number("warmup of the schedule 'scheduled'", warmup, 0, below=1)
        self.training, self.optimizer, self.warmup = training, optimizer, warmup
        self.penalty_called = False
        self._alphas: AlphasTraining | None = None
        self._rotator: Rotator | None = None
        self._losses: HeadLosses | None = None
        self._dropheads: list[DropHead] = []
        self._penalties = {
            of_kinds(options.name, options.acts_on, LOSSES[options.name].kinds): options
            for options in training.penalties
        }
        self._weights: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}  # name → sum since the last logs and number of passes, (2,)
        self._warned: set[str] = set()
        self._device = next(model.parameters()).device
        self._acting = ExitStack()  # removes everything from the model
        self._closed = False
        of_deepspeed = any("deepspeed" in type(part).__module__ for part in (optimizer, unwrap_optimizer(optimizer)))
        if training.acts and (of_deepspeed or any(hasattr(weight, "ds_id") for weight in model.parameters())):
            raise HeadError(
                "DeepSpeed is not supported: ZeRO steps copies of the weights, or splits them across head "
                "boundaries; shard the model with FSDP2 instead (fully_shard), or leave it whole"
            )
        parts = models_in(transformers_model(model)) if training.acts else []
        if any(part in _in_training for part in parts):
            raise HeadError(
                f"another session acts on the heads of this {type(model).__name__}; close() that one first, or wait "
                "until its train() has returned"
            )
        _in_training.update(parts)
        self._acting.callback(_in_training.difference_update, parts)
        reshard_(model)  # an optimizer knows the sharded parameters of FSDP2, not the gathered ones
        try:
            if optimizer is None and (training.rotation is not None or training.alphas is not None):
                raise HeadError("alphas and rotation act on the optimizer's state; pass optimizer=")
            if training.rotation is not None:
                self._rotator = Rotator(model, training.rotation, tokenizer)
                self._rotator.check(optimizer)
            if training.alphas is not None and optimizer is not None:
                mixed = [projection for _, projection in find_mixed_projections(model, training.alphas.kinds)]
                self._alphas = AlphasTraining(mixed, training.alphas, optimizer)
                self._acting.callback(self._alphas.remove)
            if training.penalties:
                losses = {name: (options.name, options.acts_on) for name, options in self._penalties.items()}
                self._losses = self._acting.enter_context(HeadLosses(model, losses))
            for options in training.drophead:
                drophead = DropHead(model, 0.0, options.kinds, options.rescale)
                self._dropheads.append(self._acting.enter_context(drophead))
            self.step(0.0)
        except BaseException:
            self.close()
            raise

    def step(self, progress: float) -> None:
        """Begin an optimizer step: set the values of all schedules.

        Args:
            progress: share of the training that is done, from 0 at the first step to 1 at the last.

        Raises:
            HeadError: progress is not from 0 to 1, or the session is closed.
        """
        self._check_open()
        check_number("progress of the training", progress, 0, 1)
        self.penalty_called = False
        if self._losses is not None:
            self._losses.take()  # of passes without a penalty
        for drophead, options in zip(self._dropheads, self.training.drophead, strict=True):
            drophead.p = options.p * SCHEDULES[options.schedule](progress, self.warmup)
        for name, penalty in self._penalties.items():
            self._weights[name] = penalty.strength * SCHEDULES[penalty.schedule](progress, self.warmup)
        if self._alphas is not None:
            self._alphas.step(progress)
            self._weights[GROWTH] = self._alphas.options.growth_weight

    def epoch(self, epoch: float, batches: Iterable[Mapping[str, Tensor]] | None = None) -> None:
        """Begin an epoch, or a step within one: rotate heads if it is time.

        Where `RotationOptions` has fractions of epochs, call it before each step, as in
        `session.epoch(epoch + number / len(data), validation_batches)`; without a swap it costs nothing.

        Args:
            epoch: from 0; 1.5 is the middle of the second. If rotation is `of_training`, the share of the steps done.
            batches: validation data to measure importance on; read only where heads are swapped now.
        """
        self._check_open()
        if self._rotator is not None:
            self._rotator.epoch(epoch, self.optimizer, batches)

    def penalty(self, loss: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the weighted sum of all penalties, to add to the training loss.

        They are means over the forward passes since the last call, of which a contrastive loss has several.

        Args:
            loss: the training loss, to log it, and to warn if a penalty is too small to act.
            labels: of the batch, −100 where there is none; needed for nuclear growth beside a summed loss.

        Raises:
            HeadError: labels are needed, or the session is closed.
        """
        self._check_open()
        self.penalty_called = True
        values: dict[str, Tensor] = {}
        measured = {name for name, weight in self._weights.items() if weight == 0}  # with 0 · NaN the loss were NaN
        if self._losses is not None:
            values = self._losses.values(measured)
            if not values:
                self._warn(
                    "nothing", "no head was read in this step, so there is no penalty; is the model in train()?"
                )
        growth = None if self._alphas is None else self._alphas.growth()
        if growth is not None:
            values[GROWTH] = growth
        if loss is not None:
            self._add(TASK, loss)
        total = torch.zeros((), device=self._device)
        alphas = self.training.alphas
        for name, value in values.items():
            weighted = self._weights[name] * value
            if name == GROWTH and alphas is not None and alphas.growth_beside == "sum":
                if labels is None:
                    raise HeadError("growth_beside='sum' divides by the number of labels; pass labels= to penalty()")
                weighted = weighted / labels.ne(UNLABELLED).sum().clamp(min=1).to(value.device)
            if name not in measured:
                total = total + weighted.to(self._device)
            self._add(name, value)
            if loss is not None:
                self._add(f"{name}/share", (weighted / loss.to(value.device)).abs())
        return total

    def logs(self) -> dict[str, float]:
        """Return the unweighted mean of each penalty and its share of the loss, over the passes since the last call.

        The loss without penalties is "task_loss". Means are over all processes, each of which must call it.
        """
        names = [TASK] + [name + suffix for name in (*self._penalties, GROWTH) for suffix in ("", "/share")]
        none = torch.zeros(2, device=self._device)
        table = torch.stack([self._sums.get(name, none).to(self._device) for name in names])
        if distributed.is_initialized():
            distributed.all_reduce(table)
        means = {name: total / count for name, (total, count) in zip(names, table.tolist(), strict=True) if count}
        self._sums = {}
        for name, penalty in self._penalties.items():
            share = means.get(f"{name}/share", 0.0)
            if penalty.schedule == "constant" and 0 < share < MIN_PENALTY_SHARE:
                self._warn(name, f"penalty {name} is {share:.1e} of the loss; if it began so low, raise its weight")
        for drophead, options in zip(self._dropheads, self.training.drophead, strict=True):
            means[of_kinds("drophead", options.kinds, KINDS)] = drophead.p
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return, in JSON types, the state that a resumed run needs to continue identically."""
        return {} if self._rotator is None else {"rotation": self._rotator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; weights are those of its checkpoint."""
        if self._rotator is not None and "rotation" in state:
            self._rotator.load_state_dict(state["rotation"])

    def close(self) -> None:
        """Remove everything but the trained weights from the model."""
        self._closed = True
        self._acting.close()

    def __enter__(self) -> "HeadSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_penalties(self) -> bool:
        """Whether the session adds anything to the loss."""
        alphas = self.training.alphas
        return bool(self.training.penalties) or (alphas is not None and alphas.growth_weight > 0)

    def _check_open(self) -> None:
        if self._closed:
            raise HeadError("the session is closed; open a new one")

    def _warn(self, once: str, message: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning("%s", message)

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().float()
        self._sums[name] = torch.stack([value, torch.ones_like(value)]) + self._sums.get(name, 0)


class AlphasTraining:
    """Freeze alphas for the first part of training, and return the nuclear growth loss after it.

    Frozen alphas stay in the optimizer and in the graph, with gradients of zero that are removed before each step:
    distributed training must always see the same parameters.
    """

    def __init__(self, projections: Sequence[MixedProjection], options: AlphasOptions, optimizer: Optimizer) -> None:
        if not projections:
            raise HeadError("the model has no alphas to train; call mix_heads_(model) before making the optimizer")
        for projection in projections:
            refuse_split("alphas", projection.alphas)
        if not all(projection.alphas.requires_grad for projection in projections):
            raise HeadError(
                "alphas do not require gradients (adapters freeze what they do not know); set requires_grad"
            )
        stepped = stepped_by(optimizer)
        if not all(id(projection.alphas) in stepped for projection in projections):
            raise HeadError(
                "the optimizer does not step the alphas; call mix_heads_(model) before making the optimizer"
            )
        self.projections, self.options = projections, options
        self._frozen = False
        inner = unwrap_optimizer(optimizer)
        new = [p.alphas for p in projections if isinstance(p.alphas, DTensor) and p.alphas not in inner.state]
        if new:
            _init_state_(inner, new)
        self._handle = inner.register_step_pre_hook(self._drop_gradients)

    def step(self, progress: float) -> None:
        """Begin an optimizer step."""
        ratio = self.options.frozen_ratio
        self._freeze(progress < ratio or ratio == 1)  # progress ends at 1

    def growth(self) -> Tensor | None:
        """Return the unweighted nuclear growth loss, summed over all matrices; None while alphas are frozen."""
        if self._frozen or self.options.growth_weight == 0:
            return None
        matrices = [full_tensor(projection.alphas) for projection in self.projections]
        most = max(len(matrix) for matrix in matrices)  # padding by zeros keeps the norms of smaller ones
        padded = [pad(matrix, (0, most - len(matrix)) * 2).to(matrices[0].device) for matrix in matrices]
        return nuclear_growth(torch.stack(padded), self.options.growth).sum()

    def remove(self) -> None:
        """Restore the modules."""
        self._freeze(False)
        self._handle.remove()

    def _freeze(self, frozen: bool) -> None:
        self._frozen = frozen
        for projection in self.projections:
            projection.frozen = frozen

    def _drop_gradients(self, *_: object) -> None:
        if self._frozen:
            for projection in self.projections:
                projection.alphas.grad = None


def _init_state_(optimizer: Optimizer, alphas: Sequence[nn.Parameter]) -> None:
    """Initialise zero optimizer state for frozen alphas: PyTorch loads sharded training only with a state for all."""
    groups = optimizer.param_groups
    gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    rates = [group["lr"] for group in groups]
    for parameter, _ in gradients:
        parameter.grad = None
    for matrix in alphas:
        matrix.grad = torch.zeros_like(matrix)
    for group in groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for matrix in alphas:
        for value in optimizer.state[matrix].values():
            if isinstance(value, Tensor):
                value.zero_()  # the count of steps too
