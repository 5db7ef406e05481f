"""Say why a model cannot be converted: at which module, for which reason, and what can."""

from torch import nn

from collab_compress.architectures.families import AttentionFamily
from collab_compress.errors import UnsupportedModelError

# (mark in a class name, mark in a child's name, reason)
_ROTARY = (
    "rotaryembedding", "rotary_emb", "a rotary position embedding turns queries and keys after their projection"
)  # fmt: skip
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


def refuse_interposed(model: nn.Module, families: dict[str, AttentionFamily]) -> None:
    """Refuse a model that does something between projection and dot product which its family does not describe.

    The collaborative form factors Wq·Wkᵀ, so nothing may stand between the two, but for a rotary embedding where the
    family says how it turns channels.

    Raises:
        UnsupportedModelError: naming the first such module and the reason.
    """
    family = families.get(getattr(getattr(model, "config", None), "model_type", ""))
    rotary = any(_ROTARY[0] in type(module).__name__.lower() for module in model.modules())
    if family is not None and family.rotary and not rotary:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding, which the {family.name} description promises; models "
            "of this family with other positions cannot be converted"
        )
    interposed = [row for row in _INTERPOSED if row is not _ROTARY or family is None or not family.rotary]
    for name, module in model.named_modules():
        child = name.rpartition(".")[2].lower()
        for class_mark, child_mark, reason in interposed:
            if child == child_mark or (class_mark and class_mark in type(module).__name__.lower()):
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}): {reason}, so Wq·Wkᵀ is not what the scores use; "
                    f"families that can be converted: {convertible(families)}"
                )


def refuse_unknown(model: nn.Module, families: dict[str, AttentionFamily]) -> None:
    """Refuse a model of a family that has no description.

    Raises:
        UnsupportedModelError: always, naming the model type and its first attention module.
    """
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
