"""Say why a model cannot be converted: at which module, for which reason, and what can."""

from collections.abc import Collection
from typing import NoReturn

from torch import nn

from collab_compress.architectures.families import AttentionFamily
from collab_compress.errors import UnsupportedModelError

_INTERPOSED = (
    # (mark in a class name, mark in a child's name, reason)
    (
        "rotaryembedding",
        "rotary_emb",
        "a rotary position embedding turns queries and keys after their projection",
    ),
    ("", "q_norm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "query_norm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "q_layernorm", "queries and keys are normalised after their projection (QK-norm)"),
    ("", "query_layernorm", "queries and keys are normalised after their projection (QK-norm)"),
)


def convertible(families: dict[str, AttentionFamily]) -> str:
    """Name the families that can be converted, for messages."""
    return ", ".join(sorted({family.name for family in families.values()}))


def refuse_interposed(model: nn.Module, families: dict[str, AttentionFamily], among: Collection[str] = ()) -> None:
    """Refuse a model that does something between projection and dot product.

    The collaborative form factors Wq·Wkᵀ, so nothing may stand between the two.

    Args:
        model: any model.
        families: what can be converted.
        among: paths of the modules that count; all of them if there are none.

    Raises:
        UnsupportedModelError: naming the first such module and the reason.
    """
    for name, module in model.named_modules():
        if among and name not in among:
            continue
        child = name.rpartition(".")[2].lower()
        for class_mark, child_mark, reason in _INTERPOSED:
            if child == child_mark or (class_mark and class_mark in type(module).__name__.lower()):
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}): {reason}, so Wq·Wkᵀ is not what the scores use; "
                    f"families that can be converted: {convertible(families)}"
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
