"""Find the attention modules of a live model, and read their projections, separate or fused."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures.families import AttentionFamily
from collab_compress.architectures.refusal import refuse_interposed, refuse_older, refuse_scores, refuse_unknown
from collab_compress.errors import UnsupportedModelError
from collab_compress.options import KINDS, Kind
from collab_compress.transformers_parts import VERSIONS


@dataclass(frozen=True, eq=False)
class FusedSlice:
    """One of the projections in a fused layer, seen as the `nn.Linear` it would be by itself.

    Args:
        whole: the layer, with weight (3·H·d, D), or (D, 3·H·d) in a transposed layer, and bias (3·H·d,) or None.
        first: where the projection's first head begins.
        step: how far one head's channels begin after those of the one before.
        heads: number of heads H.
        head_width: width d of one head.
    """

    whole: nn.Linear | Conv1D
    first: int
    step: int
    heads: int
    head_width: int

    @property
    def in_features(self) -> int:
        """Input width D."""
        return int(self.whole.weight.shape[1 - self.dim])

    @property
    def out_features(self) -> int:
        """Output width H·d."""
        return self.heads * self.head_width

    @property
    def dim(self) -> int:
        """Dimension of the whole weight along which channels lie: 1 in a transposed layer."""
        return int(isinstance(self.whole, Conv1D))

    @property
    def weight(self) -> Tensor:
        """The weight in the layout of `nn.Linear`, (H·d, D); a view where heads lie side by side."""
        whole: Tensor = self.whole.weight
        return self._taken(whole.T if self.dim else whole)

    @property
    def bias(self) -> Tensor | None:
        """The bias, (H·d,), or None; a view where heads lie side by side."""
        return None if self.whole.bias is None else self._taken(self.whole.bias)

    def rows(self, head: int) -> range:
        """Which channels of the layer one head has."""
        start = self.first + head * self.step
        return range(start, start + self.head_width)

    def _taken(self, rows: Tensor) -> Tensor:
        if self.step == self.head_width:
            return rows[self.first : self.first + self.out_features]
        return torch.cat([rows[own.start : own.stop] for own in map(self.rows, range(self.heads))])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weight and bias, where it has one."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def register_forward_pre_hook(self, hook: Any) -> RemovableHandle:
        """Register `hook` on the input of the layer."""
        return self.whole.register_forward_pre_hook(hook)


def fused_slice(module: Any, family: AttentionFamily, path: str) -> FusedSlice | None:
    """Return the part of a stock module's fused layer that a path of the family names, or None."""
    parts = (family.query, family.key, family.value)
    whole: Any = getattr(module, family.fused, None) if family.fused and path in parts else None
    if type(whole) not in (nn.Linear, Conv1D):
        return None
    heads, width = (attrgetter(each)(module) for each in (family.heads, family.head_width))
    groups = attrgetter(family.key_value_heads)(module) if family.key_value_heads else heads
    if whole.weight.shape[int(isinstance(whole, Conv1D))] != (heads + 2 * groups) * width:
        return None
    place = parts.index(path)
    if family.interleaved:
        return FusedSlice(whole, place * width, 3 * width, heads, width)
    before = (0, heads, heads + groups)[place]
    return FusedSlice(whole, before * width, width, groups if place else heads, width)


PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what can be computed with


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
        parent: the module that holds it.
        key_value_heads: number of heads of keys and values, of which each serves as many heads of queries.
        reads_tokens: whether the model that it belongs to has a vocabulary, as a tower of images has not.
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
    key_value_heads: int
    reads_tokens: bool

    @property
    def width(self) -> int:
        """H·d: how wide queries of all heads are, and what the output projection reads."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """How wide keys are, and values: H·d, or less where queries are grouped."""
        return self.key_value_heads * self.head_width

    @property
    def rotated(self) -> int:
        """How many channels of a head a rotary embedding turns, its first."""
        family = self.family
        if not family.rotary or (family.rotary_where and not self.part(family.rotary_where)):
            return 0
        if family.rotary_width == "partial_rotary_factor":
            share = self.part("config.rope_parameters").get("partial_rotary_factor", 1.0)
            return int(self.head_width * share)
        return int(self.part(family.rotary_width)) if family.rotary_width else self.head_width

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

    Each is described by the family of the model inside `model` that it belongs to: a model of two towers, or an
    encoder and a decoder put together, has several.

    Args:
        model: a Transformers model, stock or edited; as for `transformers_model`.
        families: `config.model_type` → family.
        modules: glob on module paths; only matching modules are listed.
        kinds: only modules of these kinds are listed.

    Raises:
        UnsupportedModelError: unknown family; no module matches; a module lacks an attribute its family promises.
    """
    model = transformers_model(model)
    owned = _described(model, families)
    if not owned:
        refuse_unknown(model)
    layers = dict.fromkeys(KINDS, 0)
    owners = _owners(model)
    found = []
    for name, module in model.named_modules():
        family = owned.get(name)
        if family is not None and type(module).__name__ in family.attention_classes:
            kind = _kind(name, module, family)
            parent = model.get_submodule(name.rpartition(".")[0])
            reads_tokens = hasattr(getattr(owners[name], "config", None), "vocab_size")
            found.append(_site(name, module, parent, family, kind, layers[kind], reads_tokens))
            layers[kind] += 1
    chosen = [site for site in found if fnmatch(site.name, modules) and site.kind in kinds]
    if not chosen:
        have = ", ".join(f"{site.name} ({site.kind})" for site in found[:3]) + (", …" if len(found) > 3 else "")
        classes = dict.fromkeys(name for family in owned.values() for name in family.attention_classes)
        wanted = repr(modules) + ("" if set(kinds) == set(KINDS) else f" with kind {' or '.join(kinds)}")
        raise UnsupportedModelError(
            f"no {' or '.join(classes)} of {type(model).__name__} matches {wanted}; "
            + (f"the attention modules are {have}" if found else "the model contains none")
        )
    return chosen


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost model that holds each module of `model`, by the path of the module."""
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = not name or isinstance(module, PreTrainedModel)
        owners[name] = module if own else owners[name.rpartition(".")[0]]
    return owners


def _model_type(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _described(model: nn.Module, families: dict[str, AttentionFamily]) -> dict[str, AttentionFamily]:
    """Return the family of each module by its path; modules of unknown families are left out.

    Raises:
        UnsupportedModelError: the family needs a newer version of Transformers.
    """
    types = {name: _model_type(owner) for name, owner in _owners(model).items()}
    for model_type in dict.fromkeys(types.values()):
        refuse_older(model_type)
    return {name: families[model_type] for name, model_type in types.items() if model_type in families}


def _refuse_undescribed_parts(model: nn.Module, families: dict[str, AttentionFamily], modules: str) -> None:
    """Refuse attention that `modules` asks for in a model inside `model` that has no description.

    Raises:
        UnsupportedModelError: naming the first such module.
    """
    model = transformers_model(model)
    owned = _described(model, families)
    others = [name for name, _ in model.named_modules() if name not in owned]
    for name in others:
        module = model.get_submodule(name)
        if name and "attention" in type(module).__name__.lower() and fnmatch(name, modules):
            refuse_unknown(model, name, _model_type(_owners(model)[name]))


def _kind(name: str, module: nn.Module, family: AttentionFamily) -> Kind:
    if family.cross and family.cross in name.split("."):
        return "cross"
    causal = family.causal or getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return "decoder" if causal else "encoder"


def _site(
    name: str,
    module: nn.Module,
    parent: nn.Module,
    family: AttentionFamily,
    kind: Kind,
    layer: int,
    reads_tokens: bool,
) -> AttentionSite:
    # A converted module may hold H there, for its own attribute says how many pieces it views.
    counted = "stock_heads" if "stock_heads" in module.__dict__ else family.heads
    heads, head_width = (read(name, module, family, path, int) for path in (counted, family.head_width))
    path = "scaling" if hasattr(module, "scaling") else family.scaling
    scaling = float(read(name, module, family, path, (int, float))) if path else head_width**-0.5
    groups = read(name, module, family, family.key_value_heads, int) if family.key_value_heads else heads
    if groups < 1 or heads % groups:
        raise UnsupportedModelError(
            f"{name}: got {groups} heads of keys and values for {heads} of queries; expected a divisor of {heads}"
        )
    return AttentionSite(name, module, family, kind, layer, heads, head_width, scaling, parent, groups, reads_tokens)


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
        whole = getattr(module, family.fused, None) if family.fused else None
        if found is not None:
            return found
        if whole is not None and type(whole) not in (nn.Linear, Conv1D):
            return whole  # whoever reads it says what it is
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) has no attribute {path!r}, which the {family.name} description "
        f"promises; Transformers {transformers.__version__} may have renamed it: transformers{VERSIONS} was tried"
    )


@dataclass(frozen=True, eq=False)
class DenseSite(AttentionSite):
    """An attention module whose queries and keys are dense.

    Args:
        query: projection of queries, weight (H·d, D), storage layout of `nn.Linear`; the part that is it where the
            model keeps several in one layer.
        key: projection of keys, weight (Hkv·d, D).
    """

    query: nn.Linear | FusedSlice
    key: nn.Linear | FusedSlice

    @property
    def inputs(self) -> tuple[tuple[Any, str], ...]:
        """Pairs of (projection, side of the attention mask) whose input moments weight the errors of a conversion."""
        return (self.query, "query"), (self.key, "key")

    def query_heads(self) -> Tensor:
        """Wq of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.query.weight, self.heads)

    def key_heads(self) -> Tensor:
        """Wk of each head of keys in mathematical layout, (Hkv, D, d)."""
        return split_heads(self.key.weight, self.key_value_heads)

    def query_bias(self) -> Tensor | None:
        """Query bias of each head, (H, d), or None where the projection has none."""
        bias = self.query.bias
        return None if bias is None else bias.detach().reshape(self.heads, self.head_width)


@dataclass(frozen=True, eq=False)
class ValueSite(AttentionSite):
    """An attention module whose values and output projection are dense.

    Args:
        value: projection of values, weight (Hkv·d, D), storage layout of `nn.Linear`; the part that is it where the
            model keeps several in one layer.
        output: the output projection, weight (D, H·d), or (H·d, D) in a transposed layer.
    """

    value: nn.Linear | FusedSlice
    output: nn.Linear | Conv1D

    @property
    def width(self) -> int:
        """Hkv·d: the widest values, and the width at which a conversion is exact."""
        return self.key_value_width

    @property
    def inputs(self) -> tuple[tuple[Any, str], ...]:
        """Pair of (projection, side of the attention mask) whose input moments weight the errors of a conversion."""
        return ((self.output, "query"),)

    def value_heads(self) -> Tensor:
        """Wv of each head of values in mathematical layout, (Hkv, D, d)."""
        return split_heads(self.value.weight, self.key_value_heads)

    def value_bias(self) -> Tensor | None:
        """Value bias of each head of values, (Hkv, d), or None where the projection has none."""
        bias = self.value.bias
        return None if bias is None else bias.detach().reshape(self.key_value_heads, self.head_width)

    def output_heads(self) -> Tensor:
        """Wo of each head in mathematical layout, (H, d, D)."""
        weight = self.output.weight.detach()
        rows: Tensor = weight if isinstance(self.output, Conv1D) else weight.T
        return rows.reshape(self.heads, -1, rows.shape[1])


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """Turn an `nn.Linear` weight (H·d, D) into per-head matrices (H, D, d)."""
    return weight.detach().view(heads, -1, weight.shape[1]).transpose(1, 2)


def find_dense_attention(
    model: nn.Module,
    families: dict[str, AttentionFamily],
    modules: str = "*",
    kinds: Collection[Kind] = KINDS,
) -> list[DenseSite]:
    """List every attention module of `model` that can be converted; as `find_attention`, and checks the projections.

    Raises:
        UnsupportedModelError: as `find_attention`; something stands between projection and dot product (rotary
            embedding, query/key normalisation) that the family does not describe; a query or key projection is no
            plain `nn.Linear`, is quantized, or is not H·d wide; the family's description leaves this kind of
            attention out.
    """
    found = [_dense(site) for site in find_attention(model, families, modules, kinds)]
    refuse_interposed(transformers_model(model), _described(transformers_model(model), families))
    _refuse_undescribed_parts(model, families, modules)
    return found


def find_dense_values(
    model: nn.Module,
    families: dict[str, AttentionFamily],
    modules: str = "*",
    kinds: Collection[Kind] = KINDS,
) -> list[ValueSite]:
    """List every attention module of `model` whose values can be converted; as `find_dense_attention`.

    Raises:
        UnsupportedModelError: as `find_attention`; the value or output projection is no plain layer, is quantized,
            or is not H·d wide; heads are mixed before it; the family's description leaves this kind out.
    """
    found = [_dense_values(site) for site in find_attention(model, families, modules, kinds)]
    _refuse_undescribed_parts(model, families, modules)
    return found


def _dense(site: AttentionSite) -> DenseSite:
    if site.family.keeps_scores:
        refuse_scores(site.name, site.module, site.family.keeps_scores)
    _refuse_undescribed(site)
    query = _projection(site, site.family.query, site.heads)
    key = _projection(site, site.family.key, site.key_value_heads)
    return DenseSite(**vars(site), query=query, key=key)


def _dense_values(site: AttentionSite) -> ValueSite:
    _refuse_undescribed(site)
    value, path = _projection(site, site.family.value, site.key_value_heads), site.family.output
    output = site.part(path)
    if hasattr(output, "alphas"):
        raise UnsupportedModelError(
            f"{site.path(path)} mixes the heads; call merge_alphas_ first, then convert values"
        )
    plain = type(output) in (nn.Linear, Conv1D)
    inputs = output.weight.shape[0 if isinstance(output, Conv1D) else 1] if plain else 0
    if not plain or inputs != site.width:
        got = f"a plain layer that reads {inputs} channels" if plain else type(output).__name__
        raise UnsupportedModelError(
            f"{site.path(path)}: got {got}; expected a plain nn.Linear that reads {site.heads} heads × "
            f"{site.head_width} = {site.width}; adapters must be merged and quantization undone before converting"
        )
    _refuse_quantized(site.path(path), output.weight)
    return ValueSite(**vars(site), value=value, output=output)


def _refuse_undescribed(site: AttentionSite) -> None:
    if site.kind in site.family.undescribed:
        raise UnsupportedModelError(
            f"{site.name}: {site.kind} attention of {site.family.name} cannot be converted, because "
            f"{site.family.undescribed[site.kind]}; leave it out with a pattern of module paths, or by kinds"
        )
    for name, reason in site.family.must_lack.items():
        if getattr(site.module, name, None):
            raise UnsupportedModelError(
                f"{site.name}: this {site.family.name} cannot be converted, because {reason} "
                f"({name} is {getattr(site.module, name)})"
            )


def _projection(site: AttentionSite, path: str, heads: int) -> nn.Linear | FusedSlice:
    """Read a dense projection that is as wide as so many heads and holds plain floats."""
    found: nn.Linear | FusedSlice = read(site.name, site.module, site.family, path, nn.Linear)
    if found.out_features != heads * site.head_width:
        raise UnsupportedModelError(
            f"{site.name}.{path}: got {found.out_features} output channels; expected {heads} heads × "
            f"{site.head_width} = {heads * site.head_width}; the {site.family.name} description does not fit this "
            "model"
        )
    _refuse_quantized(f"{site.name}.{path}", found.weight)
    return found


def _refuse_quantized(path: str, weight: Tensor) -> None:
    if weight.dtype not in PLAIN or type(weight) not in (Tensor, nn.Parameter):
        kind = f"{type(weight).__module__}.{type(weight).__qualname__} of {weight.dtype}"
        raise UnsupportedModelError(f"{path}: weights are {kind}; convert before quantizing")


def transformers_model(model: Any) -> PreTrainedModel:
    """Return the Transformers model itself.

    Args:
        model: a Transformers model; a SentenceTransformer, whose first module holds one; a PEFT model, which wraps
            one; or another module that passes on the attributes of one.

    Raises:
        UnsupportedModelError: it is none of these.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if hasattr(model, "get_base_model"):  # of PEFT; paths must be those of the model without the wrapper
        return transformers_model(model.get_base_model())
    if isinstance(model, nn.Sequential) and len(model):
        inner = getattr(next(iter(model)), "auto_model", None)
        if isinstance(inner, nn.Module):
            return transformers_model(inner)
    if isinstance(model, nn.Module) and isinstance(getattr(model, "config", None), PretrainedConfig):
        return model
    inside = next((name for name in ("module", "_orig_mod") if hasattr(getattr(model, name, None), "config")), None)
    hint = (
        f"pass the model inside, model.{inside}"
        if inside
        else "pass a transformers.PreTrainedModel, or a SentenceTransformer that holds one"
    )
    raise UnsupportedModelError(f"{type(model).__name__} is no Transformers model; {hint}")
