"""Hooks on attention heads while a model runs: read them (`Recorder`), mask them (`HeadMask`)."""

import copyreg
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from collab_compress.architectures import (
    KINDS,
    AttentionSite,
    Kind,
    find_attention,
    refuse_kept_attention,
    transformers_model,
)
from collab_compress.attention.run import HeadCall, add_head_hook_, for_each_head, maps_of, remove_head_hook_
from collab_compress.calibration.gather import (
    AttentionMasks,
    MaskKind,
    attention_masks,
    forward_arguments,
    masks_of,
    resize_mask,
)
from collab_compress.errors import HeadError
from collab_compress.heads.pruning import check_heads

Part = Literal["outputs", "values", "probs", "queries", "keys"]
PARTS: tuple[Part, ...] = get_args(Part)


class HeadHooks:
    """Base of what hooks on the heads of attention modules, until `remove` or the end of a `with` block.

    A copy or a pickle of the model has none of the hooks.
    """

    needs_probs = False
    training = False  # whether they act in training mode only
    _hooks: Sequence["SiteHook"] = ()  # none in a copy

    def __init__(self, sites: Sequence[AttentionSite], *, first: bool = False) -> None:
        self.sites = sites
        self.rank, self.processes = 0, 1
        if distributed.is_initialized():
            self.rank, self.processes = distributed.get_rank(), distributed.get_world_size()
        try:
            for site in sites:
                refuse_kept_attention(site)
            self._hooks = [SiteHook(self, site) for site in sites]
            for hook in self._hooks:
                add_head_hook_(hook.site.module, hook, first=first)
        except BaseException:
            self.remove()
            raise

    def _draw(self, outputs: Tensor) -> Tensor:
        """Return uniform draws (B, H) of torch's global generator for head outputs (B, T, H, dv)."""
        # Trainers seed all processes alike: each draws for all of them and uses its own part.
        sequences, heads = outputs.shape[0], outputs.shape[2]
        return torch.rand(self.processes, sequences, heads, device=outputs.device)[self.rank]

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Return the head outputs (B, T, H, dv) with which a module continues."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            remove_head_hook_(hook.site.module, hook)
        self._hooks = ()

    def _check_present(self) -> None:
        if not self._hooks:
            raise HeadError(f"this {type(self).__name__} has been removed from the model; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as one that was removed."""
        return copyreg.__newobj__, (type(self),)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class SiteHook:
    """The hook on one module; it keeps the original's site when a replica runs (`nn.DataParallel`)."""

    hooks: HeadHooks
    site: AttentionSite

    @property
    def needs_probs(self) -> bool:
        """Whether attention probabilities must be computed."""
        # By the module's mode, in which gradient checkpointing repeats a pass too.
        return self.hooks.needs_probs and (self.site.module.training or not self.hooks.training)

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        """Return the head outputs (B, T, H, dv) with which the module continues."""
        return self.hooks.act(self.site, outputs, call)


@dataclass(frozen=True)
class HeadRecord:
    """Tensors recorded in one call of an attention module; parts that were not requested are None.

    Args:
        site: the module. One that serves several layers (ALBERT) has a record for each call.
        masks: padding masks of queries and keys.
        outputs: head outputs before other hooks change them, (B, T, H, s).
        values: (B, S, H, s).
        probs: attention probabilities before dropout, (B, H, T, S).
        queries: (B, T, H, d), or (B, T, H, R) in a converted module.
        keys: (B, S, H, d).

    Example:
        >>> with Recorder(model, ("queries", "values")) as recorder:
        ...     outputs = model(**batch)
        ...     record = recorder.take()[0]
        >>> record.queries.shape, record.site.layer, record.probs
        (torch.Size([2, 6, 3, 8]), 0, None)
        >>> record.mask_of("queries").sum(1)
        tensor([6, 4])
    """

    site: AttentionSite
    masks: AttentionMasks
    outputs: Tensor | None = None
    values: Tensor | None = None
    probs: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None

    def mask_of(self, part: Part) -> Tensor | None:
        """Return the padding mask of the positions of a part: (B, S) for values and keys, else (B, T)."""
        return self.masks.key if part in ("values", "keys") else self.masks.query


def _read(part: Part, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor | None:
    """Return one part of a call; outputs are (B, T, H, s)."""
    if part == "outputs":
        return outputs
    if part == "probs":
        return call.probs
    if part == "queries":
        is_converted = maps_of(call.module)[0] is not None
        queries: Tensor = call.module.qk("head_queries", call.query) if is_converted else call.query.transpose(1, 2)
        return queries
    return for_each_head(call.value if part == "values" else call.key, site.heads).transpose(1, 2)


class Recorder(HeadHooks):
    """Record the heads of a model during its forward passes, with their gradients.

    `take` returns the records of the last forward pass of `model` and forgets them, whether the model is called or
    its `forward`, as Sentence Transformers and PEFT do. Calls of a part of the model are not recorded, nor the
    repeated forward passes of gradient checkpointing. Run a recorded model in one thread. Works under
    `torch.compile`, under `DistributedDataParallel` and in a `Trainer`.

    Args:
        model: stock or edited; attention runs as `eager` or `sdpa`.
        parts: what to record. With "probs" attention is computed step by step, as `eager` does.
        kinds: kinds of attention to record.
        training: record only passes in training mode with gradients.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: "keys" of a converted module, whose heads share keys or differ in width.

    Example:
        >>> with Recorder(model, "probs") as recorder:
        ...     outputs = model(**batch)
        ...     records = recorder.take()
        >>> [record.site.name for record in records]
        ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
        >>> records[0].probs.shape  # (B, H, T, S)
        torch.Size([2, 3, 6, 6])
    """

    keeps_passes = False  # whether records of earlier passes are kept until `take`
    _forward: "RecordedForward | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Part | Collection[Part] = "outputs",
        kinds: Collection[Kind] = KINDS,
        training: bool = False,
    ) -> None:
        self.parts: set[Part] = {parts} if isinstance(parts, str) else set(parts)
        if unknown := self.parts - set(PARTS):
            raise HeadError(f"a recorder cannot read {', '.join(sorted(unknown))}; it reads {', '.join(PARTS)}")
        self.training = training
        self.needs_probs = "probs" in self.parts
        model = transformers_model(model)
        sites = find_attention(model, kinds=kinds)
        for site in sites:
            if "keys" in self.parts and maps_of(site.module)[0]:
                raise HeadError(f"{site.name} is converted: its heads have no keys of equal width to read")
        self._records: list[HeadRecord] = []
        self._passes = 0  # since the last `take`
        self._masks: dict[MaskKind, AttentionMasks] | None = None  # None between forward passes
        self._differentiable = False
        self._argument_names = forward_arguments(model)
        super().__init__(sites, first=True)
        self._forward = RecordedForward(self, model)

    def take(self) -> list[HeadRecord]:
        """Return the records of the last forward pass, in the order of the modules' calls, and forget them."""
        records, self._records, self._passes = self._records, [], 0
        return records

    def remove(self) -> None:
        """Remove the hooks from the model."""
        super().remove()
        if self._forward is not None:
            self._forward.remove()
        self._records, self._forward = [], None

    def begin(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass of the model."""
        if self.training and not (model.training and torch.is_grad_enabled()):
            return  # an evaluation in between keeps the records of the training step
        if not self.keeps_passes:
            self._records, self._passes = [], 0
        self._passes += 1
        self._masks = attention_masks(model, self._argument_names, args, kwargs)
        self._differentiable = torch.is_grad_enabled()

    def end(self) -> None:
        """End a forward pass of the model."""
        self._masks = None

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Record one call of an attention module."""
        if self._masks is None:
            return outputs
        if self._differentiable and not torch.is_grad_enabled():
            raise HeadError(
                f"{site.name} runs without gradients inside a pass with gradients, as in reentrant gradient "
                "checkpointing, which would lose the gradients of these tensors; pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        tensors = {part: _read(part, site, outputs, call) for part in self.parts}
        self._records.append(HeadRecord(site, _call_masks(site, call, self._masks), **tensors))
        return outputs


class RecordedForward:
    """The forward pass of a model with a recorder around it, in place of the model's `forward`.

    Hooks of `nn.Module` would miss callers of `forward`. A copy or a pickle of the model has its own forward pass.
    """

    def __init__(self, recorder: Recorder, model: PreTrainedModel) -> None:
        self.recorder: Recorder | None = recorder
        self.model = model
        self.__wrapped__ = model.forward  # by this name `inspect.signature` finds the arguments
        self.was_set = "forward" in vars(model)  # on the instance, as by Accelerate
        vars(model)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        if self.recorder is None:
            return self.__wrapped__(*args, **kwargs)
        self.recorder.begin(self.model, args, kwargs)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            if self.recorder is not None:
                self.recorder.end()

    def remove(self) -> None:
        """Restore the forward pass of the model, once no other stands around this one."""
        self.recorder = None
        while isinstance(present := vars(self.model).get("forward"), RecordedForward) and present.recorder is None:
            if present.was_set:
                vars(self.model)["forward"] = present.__wrapped__
            else:
                del self.model.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the forward pass without the recorder."""
        return _itself, (self.__wrapped__,)


def _itself(forward: Any) -> Any:
    return forward


def _call_masks(site: AttentionSite, call: HeadCall, masks: Mapping[MaskKind, AttentionMasks]) -> AttentionMasks:
    """Return the masks of one call; with a cache there are more keys than queries, and the mask covers all keys."""
    query, key = masks_of(site, masks)
    query_count, key_count = call.query.shape[2], call.key.shape[2]
    if not site.reads_tokens or site.kind == "encoder":
        query, key = resize_mask(query, query_count), resize_mask(key, key_count)
    if query is not None and site.kind != "cross":
        query = query[:, -query_count:]
    for mask, count in ((query, query_count), (key, key_count)):
        if mask is not None and mask.shape[1] != count:
            raise HeadError(
                f"{site.name} attends from {query_count} to {key_count} tokens, but its mask covers "
                f"{mask.shape[1]}; while a recorder reads the model, call the model with use_cache=False"
            )
    return AttentionMasks(query, key)


class HeadMask(HeadHooks):
    """Multiply the head outputs of attention modules by masks.

        output of head h = ξ_h · softmax(scores_h) · values_h

    0 silences a head, 1 leaves it unchanged; any number is allowed, and the result is differentiable in the mask. A
    module that serves several layers (ALBERT) has one mask for all of them. Masks apply before heads are mixed or
    projected, and after a `Recorder`. Works in training and evaluation, on edited modules, and under `torch.compile`.
    While it is on, `head_mask=` in a call of the model is an error: Transformers 5 would ignore it.

    Args:
        model: stock or edited; attention runs as `eager` or `sdpa`.
        masks: as in `set`; none at first if not given.
        kinds: kinds of attention that can be masked.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: as in `set`.

    Example:
        >>> dense = model(**batch).last_hidden_state
        >>> with HeadMask(model, {"encoder.layer.0.attention.self": torch.tensor([1.0, 0.0, 1.0])}):
        ...     silenced = model(**batch).last_hidden_state
        >>> torch.allclose(dense, silenced), torch.equal(dense, model(**batch).last_hidden_state)
        (False, True)
    """

    def __init__(
        self, model: PreTrainedModel, masks: Mapping[str, Tensor] | None = None, kinds: Collection[Kind] = KINDS
    ) -> None:
        sites = find_attention(model, kinds=kinds)
        self.sites, self.heads = sites, {site.name: site.heads for site in sites}
        self._masks = self._check({} if masks is None else masks)
        self._handle = transformers_model(model).register_forward_pre_hook(self._refuse_head_mask, with_kwargs=True)
        super().__init__(sites)  # which removes everything if it fails

    def remove(self) -> None:
        """Remove the masks from the model."""
        super().remove()
        self._handle.remove()

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Replace all masks; modules that are not named become unmasked.

        Args:
            masks: path of the attention module → (H,), one number a head, or (B, H), one a head and sample. Moved to
                the device and dtype of the head outputs.

        Raises:
            HeadError: a module is not known or its mask has the wrong shape, and the masks stay as they were; or the
                masks have been removed.
        """
        self._check_present()
        self._masks = self._check(masks)

    def _check(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_heads(self.sites, dict.fromkeys(masks, ()))
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dim() not in (1, 2) or mask.shape[-1] != self.heads[name]:
                got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise HeadError(
                    f"mask of {name}: got {got}; expected a tensor ({self.heads[name]},), one number a head, or "
                    f"(batch, {self.heads[name]})"
                )
        return dict(masks)

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Mask the heads of outputs (B, T, H, dv)."""
        mask = self._masks.get(site.name)
        if mask is None:
            return outputs
        if mask.dim() == 2 and len(mask) != len(outputs):
            raise HeadError(
                f"mask of {site.name}: got {len(mask)} rows for {len(outputs)} samples; pass one row a sample "
                "(for generation with beams, one a beam), or one mask (heads,) for all"
            )
        return outputs * mask.to(outputs)[..., None, :, None]  # (B, T, H, dv) · (1 or B, 1, H, 1)

    def _refuse_head_mask(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._hooks and kwargs.get("head_mask") is not None:
            raise HeadError(
                f"{type(model).__name__} got head_mask=, which Transformers no longer applies; pass masks of heads "
                "to HeadMask, as {'path of an attention module': tensor (heads,)}"
            )


def masks_without(model: PreTrainedModel, heads: Mapping[str, Collection[int]]) -> dict[str, Tensor]:
    """Return masks that silence heads: with them a model computes what it computes once the heads are removed.

    Args:
        model: stock or edited.
        heads: path of the attention module → heads to silence, from 0.

    Returns:
        Path → (H,), 0 at those heads and 1 elsewhere; for `HeadMask`.

    Raises:
        HeadError: a module or a head is not known.

    Example:
        >>> masks = masks_without(model, {"encoder.layer.0.attention.self": [1]})
        >>> masks["encoder.layer.0.attention.self"]
        tensor([1., 0., 1.])
    """
    masks = {}
    for site, removed in check_heads(find_attention(model), heads):
        masks[site.name] = torch.ones(site.heads, device="cpu")
        masks[site.name][removed] = 0.0
    return masks
