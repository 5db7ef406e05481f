"""Find the attention modules of a live model, and check that they are what their family says."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any, Literal, get_args

from torch import nn

from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.fused import FusedSlice, fused_slice
from collab_compress.architectures.model import transformers_model
from collab_compress.architectures.refusal import refuse_interposed, refuse_unknown
from collab_compress.errors import UnsupportedModelError

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a live model, dense or edited. A module that serves several layers is one site.

    Args:
        name: path of the module in the model.
        module: the attention module.
        family: which attributes hold what.
        kind: self-attention that sees all positions ("encoder") or only earlier ones ("decoder"), or "cross".
        layer: place among the sites of its kind, from 0.
        heads: number of heads H.
        head_width: width d of one head's keys.
        scaling: what the scores are multiplied by.
    """

    name: str
    module: nn.Module
    family: AttentionFamily
    kind: Kind
    layer: int
    heads: int
    head_width: int
    scaling: float
    parent: nn.Module

    @property
    def width(self) -> int:
        """H·d: the largest rank a conversion can use, and the one at which it is exact."""
        return self.heads * self.head_width

    def part(self, path: str) -> Any:
        """Read an attribute by a path of the family's: `query`, `key`, `value` and `output` are such."""
        if path.startswith(".."):
            return _attribute(self.name, self.parent, self.family, path[2:])
        return _attribute(self.name, self.module, self.family, path)

    def path(self, path: str) -> str:
        """Path in the model of an attribute that the family gives relative to the module."""
        return f"{self.name.rpartition('.')[0]}.{path[2:]}" if path.startswith("..") else f"{self.name}.{path}"


def find_attention(
    model: nn.Module,
    families: dict[str, AttentionFamily],
    modules: str = "*",
    kinds: Collection[Kind] = KINDS,
) -> list[AttentionSite]:
    """List the attention modules of `model`, in the model's order, each once.

    Args:
        model: a Transformers model, stock or edited; as for `transformers_model`.
        families: `config.model_type` → family.
        modules: glob on module paths; only matching modules are listed.
        kinds: only modules of these kinds are listed.

    Raises:
        UnsupportedModelError: unknown family; something between projection and dot product (rotary embedding,
            query/key normalisation); no module matches; a module lacks an attribute its family promises.
    """
    model = transformers_model(model)
    refuse_interposed(model, families)
    config: Any = getattr(model, "config", None)
    family = families.get(getattr(config, "model_type", ""))
    if family is None:
        refuse_unknown(model, families)
        raise AssertionError("unreachable")  # pragma: no cover
    layers = dict.fromkeys(KINDS, 0)
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ in family.attention_classes:
            kind = _kind(name, module, family)
            parent = model.get_submodule(name.rpartition(".")[0])
            found.append(_site(name, module, parent, family, kind, layers[kind]))
            layers[kind] += 1
    chosen = [site for site in found if fnmatch(site.name, modules) and site.kind in kinds]
    if not chosen:
        have = ", ".join(f"{site.name} ({site.kind})" for site in found[:3]) + (", …" if len(found) > 3 else "")
        wanted = repr(modules) + ("" if set(kinds) == set(KINDS) else f" with kind {' or '.join(kinds)}")
        raise UnsupportedModelError(
            f"no {' or '.join(family.attention_classes)} of {type(model).__name__} matches {wanted}; "
            + (f"the attention modules are {have}" if found else "the model contains none")
        )
    return chosen


def _kind(name: str, module: nn.Module, family: AttentionFamily) -> Kind:
    if family.cross and family.cross in name.split("."):
        return "cross"
    return "decoder" if getattr(module, "is_decoder", False) or getattr(module, "is_causal", False) else "encoder"


def _site(
    name: str, module: nn.Module, parent: nn.Module, family: AttentionFamily, kind: Kind, layer: int
) -> AttentionSite:
    heads, head_width = (read(name, module, family, path, int) for path in (family.heads, family.head_width))
    scaling = float(read(name, module, family, family.scaling, (int, float)))
    return AttentionSite(name, module, family, kind, layer, heads, head_width, scaling, parent)


def read(name: str, module: nn.Module, family: AttentionFamily, path: str, kind: Any) -> Any:
    """Read `module.path` and check its type; the message names the attribute that is missing and where."""
    value = _attribute(name, module, family, path)
    own_forward = isinstance(value, nn.Linear) and type(value).forward is not nn.Linear.forward
    if not isinstance(value, kind | FusedSlice if kind is nn.Linear else kind) or own_forward:
        expected = f"a plain {kind.__name__}" if isinstance(kind, type) else "a number"
        raise UnsupportedModelError(
            f"{name}.{path}: got {type(value).__name__}, expected {expected}; "
            "adapters must be merged and quantization undone before converting"
        )
    return value


def _attribute(name: str, module: nn.Module, family: AttentionFamily, path: str) -> Any:
    """Read `module.path`, or the part of a fused layer that the path stands for."""
    try:
        return attrgetter(path)(module)
    except AttributeError:
        found = fused_slice(module, family, path)
        if found is not None:
            return found
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) has no attribute {path!r}, which the {family.name} description "
        "promises; this version of Transformers may have renamed it"
    )
