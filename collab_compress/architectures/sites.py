"""Find the attention modules of a live model, and check that they are what their family says."""

from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.refusal import refuse_interposed, refuse_unknown
from collab_compress.errors import UnsupportedModelError


@dataclass(frozen=True)
class AttentionSite:
    """One dense attention module of a live model. A module shared by several layers (ALBERT) is one site.

    Args:
        name: path of the module in the model.
        module: the attention module.
        family: which attributes hold what.
        heads: number of heads H.
        head_width: width d of one head's keys.
        query: projection of queries, weight (H·d, D), storage layout of `nn.Linear`.
        key: projection of keys, weight (H·d, D).
        scaling: what the scores are multiplied by.
    """

    name: str
    module: nn.Module
    family: AttentionFamily
    heads: int
    head_width: int
    query: nn.Linear
    key: nn.Linear
    scaling: float

    @property
    def width(self) -> int:
        """H·d: the largest rank a conversion can use, and the one at which it is exact."""
        return self.heads * self.head_width

    def query_heads(self) -> Tensor:
        """Wq of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.query.weight, self.heads)

    def key_heads(self) -> Tensor:
        """Wk of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.key.weight, self.heads)

    def query_bias(self) -> Tensor | None:
        """Query bias of each head, (H, d), or None where the projection has none."""
        bias = self.query.bias
        return None if bias is None else bias.detach().reshape(self.heads, self.head_width)


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """Turn an `nn.Linear` weight (H·d, D) into per-head matrices (H, D, d)."""
    return weight.detach().view(heads, -1, weight.shape[1]).transpose(1, 2)


def find_attention(model: nn.Module, families: dict[str, AttentionFamily], modules: str = "*") -> list[AttentionSite]:
    """List every attention module of `model` that can be converted, in the model's order, each once.

    Args:
        model: a Transformers model.
        families: `config.model_type` → family.
        modules: glob on module paths; only matching modules are listed.

    Raises:
        UnsupportedModelError: unknown family; something between projection and dot product (rotary embedding,
            query/key normalisation); no module matches; a module lacks an attribute its family promises.
    """
    refuse_interposed(model, families)
    config: Any = getattr(model, "config", None)
    family = families.get(getattr(config, "model_type", ""))
    if family is None:
        refuse_unknown(model, families)
        raise AssertionError("unreachable")  # pragma: no cover
    found = [
        (name, module) for name, module in model.named_modules() if type(module).__name__ == family.attention_class
    ]
    chosen = [(name, module) for name, module in found if fnmatch(name, modules)]
    if not chosen:
        have = ", ".join(name for name, _ in found[:3]) + (", …" if len(found) > 3 else "")
        raise UnsupportedModelError(
            f"no {family.attention_class} of {type(model).__name__} matches {modules!r}; "
            + (f"the attention modules are {have}" if found else "the model contains none")
        )
    return [_site(name, module, family) for name, module in chosen]


def _site(name: str, module: nn.Module, family: AttentionFamily) -> AttentionSite:
    heads, head_width = (_read(name, module, family, path, int) for path in (family.heads, family.head_width))
    query, key = (_read(name, module, family, path, nn.Linear) for path in (family.query, family.key))
    scaling = float(_read(name, module, family, family.scaling, (int, float)))
    for path, projection in ((family.query, query), (family.key, key)):
        if projection.out_features != heads * head_width:
            raise UnsupportedModelError(
                f"{name}.{path}: got {projection.out_features} output channels; expected {heads} heads × "
                f"{head_width} = {heads * head_width}; the {family.name} description does not fit this model"
            )
    if not (query.weight.is_floating_point() and key.weight.is_floating_point()):
        raise UnsupportedModelError(f"{name}: weights are {query.weight.dtype}; convert before quantizing")
    return AttentionSite(name, module, family, heads, head_width, query, key, scaling)


def _read(name: str, module: nn.Module, family: AttentionFamily, path: str, kind: Any) -> Any:
    """Read `module.path` and check its type; the message names the attribute that is missing and where."""
    try:
        value = attrgetter(path)(module)
    except AttributeError:
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) has no attribute {path!r}, which the {family.name} description "
            "promises; this version of Transformers may have renamed it"
        ) from None
    own_forward = isinstance(value, nn.Linear) and type(value).forward is not nn.Linear.forward
    if not isinstance(value, kind) or own_forward:
        expected = f"a plain {kind.__name__}" if isinstance(kind, type) else "a number"
        raise UnsupportedModelError(
            f"{name}.{path}: got {type(value).__name__}, expected {expected}; "
            "adapters must be merged and quantization undone before converting"
        )
    return value
