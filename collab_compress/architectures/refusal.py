"""Explain why a model cannot be converted: the module, the reason, and what can be converted."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import nn

from collab_compress.architectures.families import AttentionFamily
from collab_compress.errors import UnsupportedModelError

# (mark in a class name, mark in a child's name, reason)
_ROTARY = (
    "rotaryembedding",
    "rotary_emb",
    "a rotary position embedding turns queries and keys after their projection",
)
_INTERPOSED = (
    _ROTARY,
    ("", "q_norm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "query_norm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "q_layernorm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "query_layernorm", "queries and keys are normalised after their projection (QK-norm)"),
)


def convertible(families: dict[str, AttentionFamily]) -> str:
    """Name the families that can be converted, for messages."""
    return ", ".join(sorted({family.name for family in families.values()}))


def refuse_interposed(
    model: nn.Module,
    families: dict[str, AttentionFamily],
    among: Collection[str] | Mapping[str, AttentionFamily] = (),
) -> None:
    """Refuse a model that does something between projection and dot product which its family does not describe.

    The collaborative form factors Wq·Wkᵀ, so nothing may stand between the two, but for a rotary embedding where the
    family says how it turns channels.

    Args:
        model: any model.
        families: what can be converted.
        among: paths of the modules that count, with the family of each where it has one; all of them if there are
            none.

    Raises:
        UnsupportedModelError: naming the first such module and the reason.
    """
    described = among if isinstance(among, Mapping) else {}
    turned = {name: family for name, family in described.items() if family.rotary}
    for name, module in model.named_modules():
        if among and name not in among:
            continue
        child = name.rpartition(".")[2].lower()
        for row in _INTERPOSED:
            class_mark, child_mark, reason = row
            if row is _ROTARY and name in turned:
                continue
            if child == child_mark or (class_mark and class_mark in type(module).__name__.lower()):
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}): {reason}, so Wq·Wkᵀ is not what the scores use; "
                    f"families that can be converted: {convertible(families)}"
                )
    if turned and not any(_ROTARY[0] in type(model.get_submodule(name)).__name__.lower() for name in turned):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding, which the {next(iter(turned.values())).name} "
            "description promises; models of this family with other positions cannot be converted"
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


def refuse_unknown(
    model: nn.Module, families: dict[str, AttentionFamily], part: str = "", part_type: str = ""
) -> NoReturn:
    """Refuse a model of a family that has no description, or that holds a model of such a family.

    Args:
        model: the model.
        families: what can be converted.
        part: path of the first attention module of such a model inside; empty where `model` is one itself.
        part_type: model type of the model inside.

    Raises:
        UnsupportedModelError: always, naming the model type and its first attention module.
    """
    if part:
        raise UnsupportedModelError(
            f"{part} ({type(model.get_submodule(part)).__name__}): model type {part_type!r} has no description; "
            "leave it out with a pattern of module paths (modules='…'); families that can be converted: "
            f"{convertible(families)}"
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
    raise UnsupportedModelError(
        f"{type(model).__name__}: model type {model_type!r} has no description{first}; "
        f"families that can be converted: {convertible(families)}"
    )
