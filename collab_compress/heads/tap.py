"""Record head outputs, values and attention probabilities of every attention module while a model runs."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.attention.install import HeadCall, add_head_hook_, for_each_head, remove_head_hook_
from collab_compress.calibration.gather import Masked, RealTokens, fitted, forward_arguments, masks_of, real_tokens
from collab_compress.errors import HeadError

Part = Literal["outputs", "values", "probs", "queries", "keys"]
PARTS: tuple[Part, ...] = get_args(Part)
DEFAULT: tuple[Part, ...] = ("outputs",)


@dataclass(frozen=True)
class Reading:
    """Tensors recorded in one call of an attention module; parts that were not requested are None.

    Args:
        site: the module. One that serves several layers (ALBERT) gives a reading for each.
        outputs: head outputs before anything acts on them, (B, T, H, s); where heads differ in width, filled up
            with zeros.
        values: (B, S, H, s).
        probs: attention probabilities before dropout, (B, H, T, S).
        queries: (B, T, H, d), or (B, T, H, R) in a converted module.
        keys: (B, S, H, d).
        real: which queries and keys are no padding.
    """

    site: AttentionSite
    outputs: Tensor | None
    values: Tensor | None
    probs: Tensor | None
    queries: Tensor | None
    keys: Tensor | None
    real: RealTokens


class Tap:
    """Read the heads of a model during its forward passes, with their gradients.

    Each forward pass of `model` starts anew; `take` hands over what the last one showed and forgets it, so that
    nothing outlives a training step. Passes through a part of the model only are not read, nor are the repeated ones
    of gradient checkpointing. A tap holds the readings of one pass at a time: run the model in one thread while it is
    tapped. Works under `torch.compile`, under `DistributedDataParallel` and in a `Trainer`.

    Args:
        model: stock or edited; modules are read through its attention function (`eager` or `sdpa`).
        parts: what is wanted. Probabilities make the module attend step by step, as `eager` does.
        kinds: which kinds of attention.
        training: read only what is trained on: passes in training mode, with gradients.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: keys of a converted module are wanted, whose heads share them or have some of different widths.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Part | Collection[Part] = DEFAULT,
        kinds: Collection[Kind] = KINDS,
        training: bool = False,
    ) -> None:
        self.parts: frozenset[Part] = frozenset((parts,) if isinstance(parts, str) else parts)
        unknown = self.parts - set(PARTS)
        if unknown:
            raise HeadError(f"a tap cannot read {', '.join(sorted(unknown))}; it reads {', '.join(PARTS)}")
        self.training = training
        model = transformers_model(model)
        self.sites = find_attention(model, FAMILIES, kinds=kinds)
        for site in self.sites:
            if "keys" in self.parts and hasattr(site.module, "score_form"):
                raise HeadError(f"{site.name} is converted: its heads have no keys of one width each to be read")
        self._readings: list[Reading] = []
        self._real: dict[Masked, RealTokens] | None = None  # None between forward passes
        self._differentiable = False
        self._names = forward_arguments(model)
        self._hooks = [(site.module, _Reader(self, site)) for site in self.sites]
        for module, hook in self._hooks:
            add_head_hook_(module, hook, first=True)
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def take(self) -> list[Reading]:
        """Hand over the readings of the last forward pass, in the order in which modules were called."""
        readings, self._readings = self._readings, []
        return readings

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for module, hook in self._hooks:
            remove_head_hook_(module, hook)
        for handle in self._handles:
            handle.remove()
        self._readings, self._hooks, self._handles = [], [], []

    def __enter__(self) -> "Tap":
        """Return the tap itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the model."""
        self.remove()

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.training and not (model.training and torch.is_grad_enabled()):
            return  # an evaluation in between leaves the readings of the training step alone
        self._readings = []
        self._real = real_tokens(model, self._names, args, kwargs)
        self._differentiable = torch.is_grad_enabled()

    def _end(self, *_: object) -> None:
        self._real = None

    def read(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> None:
        """Note one call of an attention module.

        Raises:
            HeadError: reentrant gradient checkpointing runs the module without gradients, or padding cannot be told
                from the masks of a pass that continues a cache.
        """
        if self._real is None:
            return
        if self._differentiable and not torch.is_grad_enabled():
            raise HeadError(
                f"{site.name} runs without gradients inside a pass with gradients, as in reentrant gradient "
                "checkpointing, which would lose the gradient of what is read here; pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        queries = None
        if "queries" in self.parts:
            queries = call.query.transpose(1, 2)  # (B, T, H, d)
            if hasattr(call.module, "score_form"):
                queries = call.module.score_form.head_queries(call.module, call.query)
        self._readings.append(
            Reading(
                site,
                outputs if "outputs" in self.parts else None,
                for_each_head(call.value, site.heads).transpose(1, 2) if "values" in self.parts else None,
                call.probs if "probs" in self.parts else None,
                queries,
                for_each_head(call.key, site.heads).transpose(1, 2) if "keys" in self.parts else None,
                self._fitting(site, call),
            )
        )

    def _fitting(self, site: AttentionSite, call: HeadCall) -> RealTokens:
        """Masks of one call; with a cache there are more keys than queries, and the mask is of all of them."""
        query, key = masks_of(site, self._real or {})
        queries, keys = call.query.shape[2], call.key.shape[2]
        if not site.reads_tokens or site.kind == "encoder":
            query, key = fitted(query, queries), fitted(key, keys)
        query = query if query is None or site.kind == "cross" else query[:, -queries:]
        for mask, tokens in ((query, queries), (key, keys)):
            if mask is not None and mask.shape[1] != tokens:
                raise HeadError(
                    f"{site.name} attends from {queries} to {keys} tokens, and the masks are of {mask.shape[1]}; "
                    "while reading heads call the model with use_cache=False"
                )
        return RealTokens(query, key)


class _Reader:
    """The hook that a tap puts into one module."""

    def __init__(self, tap: Tap, site: AttentionSite) -> None:
        self.tap, self.site = tap, site
        self.needs_probs = "probs" in tap.parts

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        self.tap.read(self.site, outputs, call)
        return outputs
