"""Explain why a model cannot be converted: the module, the reason, and what can be converted."""

from collections.abc import Mapping
from typing import Any, NoReturn

import transformers
from packaging.version import Version
from torch import nn

from collab_compress.architectures.families import NORMALISED, SINCE, AttentionFamily
from collab_compress.errors import UnsupportedModelError

_NORMS = ("q_norm", "query_norm", "q_layernorm", "query_layernorm")
_ROTARY_CLASS, _ROTARY_CHILD = "rotaryembedding", "rotary_emb"
SEE = "docs/families.md lists what can be converted of each family, and since which version of Transformers"


def refuse_interposed(model: nn.Module, among: Mapping[str, AttentionFamily]) -> None:
    """Refuse a model that does something between projection and dot product which its family does not describe.

    The collaborative form factors Wq·Wkᵀ, so nothing may stand between the two, but for a rotary embedding where the
    family says how it turns channels.

    Args:
        model: any model.
        among: paths of the modules that count, with the family of each.

    Raises:
        UnsupportedModelError: naming the first such module and the reason.
    """
    turned = {name: family for name, family in among.items() if family.rotary}
    for name, module in model.named_modules():
        if name not in among:
            continue
        child = name.rpartition(".")[2].lower()
        rotary = child == _ROTARY_CHILD or _ROTARY_CLASS in type(module).__name__.lower()
        reason = NORMALISED if child in _NORMS else ""
        if rotary and name not in turned:
            reason = "a rotary position embedding turns queries and keys after their projection"
        if reason:
            refuse_scores(name, module, reason)
    if turned and not any(_ROTARY_CLASS in type(model.get_submodule(name)).__name__.lower() for name in turned):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding, which the {next(iter(turned.values())).name} "
            "description promises; models of this family with other positions cannot be converted"
        )


def refuse_older(model_type: str) -> None:
    """Raise UnsupportedModelError where the installed Transformers is older than what the family needs."""
    needed = SINCE.get(model_type)
    if needed is not None and Version(transformers.__version__) < Version(needed):
        raise UnsupportedModelError(
            f"models of type {model_type!r} can be converted with Transformers {needed} and newer, this is "
            f"{transformers.__version__}; pip install 'transformers>={needed}'"
        )


def refuse_scores(name: str, module: nn.Module, reason: str) -> NoReturn:
    """Raise UnsupportedModelError: queries and keys of this module stay as they are, and what can be narrowed."""
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}): queries and keys cannot be converted, because {reason}; leave out dk, "
        "and narrow values (dv) and feed-forward blocks (dff)"
    )


def refuse_hooks(path: str, layer: nn.Module, stays: bool = False) -> None:
    """Refuse a projection with hooks or a forward pass of its own, which would be lost with it or see other values.

    Weight reparametrizations by hooks (`torch.nn.utils.prune`, `weight_norm`) are refused with them. What Accelerate
    puts on a module only moves tensors, and is no obstacle.

    Args:
        path: of the layer, for the message.
        layer: the projection.
        stays: whether the layer stays in the model and its outputs mean the same, so that hooks on them may stay too.

    Raises:
        UnsupportedModelError: there is one.
    """
    hooks: dict[str, Any] = {
        "a forward pre-hook": layer._forward_pre_hooks,
        "a forward hook": {} if stays else layer._forward_hooks,
        "a backward hook": {} if stays else {**layer._backward_hooks, **layer._backward_pre_hooks},
        "a forward pass set on the instance": "forward" in vars(layer) and not hasattr(layer, "_hf_hook"),
    }
    found = next((name for name, present in hooks.items() if present), None)
    if found is not None:
        raise UnsupportedModelError(
            f"{path} ({type(layer).__name__}) has {found}, which would not survive; remove it (torch.nn.utils.prune."
            "remove and torch.nn.utils.remove_weight_norm make such weights plain), then register it anew"
        )


def refuse_unknown(model: nn.Module, part: str = "", part_type: str = "") -> NoReturn:
    """Refuse a model of a family that has no description, or that holds a model of such a family.

    Args:
        model: the model.
        part: path of the first attention module of such a model inside; empty where `model` is one itself.
        part_type: model type of the model inside.

    Raises:
        UnsupportedModelError: always, naming the model type and its first attention module.
    """
    if part:
        raise UnsupportedModelError(
            f"{part} ({type(model.get_submodule(part)).__name__}): model type {part_type!r} has no description; "
            f"leave it out with a pattern of module paths (modules='…'); {SEE}"
        )
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    first = next(
        (
            f"; its first attention module is {name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if "attention" in type(module).__name__.lower()
        ),
        "",
    )
    raise UnsupportedModelError(f"{type(model).__name__}: model type {model_type!r} has no description{first}; {SEE}")
