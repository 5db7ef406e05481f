"""Find the attention modules of a live model, read their projections, separate or fused, and refuse all others."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures.families import FAMILIES, NORMALISED, AttentionFamily, Paths
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.options import KINDS, Kind
from collab_compress.transformers_parts import VERSIONS

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes that can be computed with
NORMS = ("q_norm", "query_norm", "q_layernorm", "query_layernorm")
WITHOUT = "feed-forward blocks (dff), layers and the vocabulary need none"
STOCK_HEADS = "stock_heads"  # attribute of converted modules: H, where their own holds the number of key groups
SEE = "docs/families.md lists what can be converted of each family, and since which version of Transformers"


@dataclass(frozen=True, eq=False)
class FusedSlice:
    """One of the projections in a fused layer, viewed as an `nn.Linear` of its own.

    Args:
        layer: the layer, with weight ((H + 2·Hkv)·d, D), transposed in a `Conv1D`, and bias ((H + 2·Hkv)·d,) or None.
        first: first channel of the projection's first head.
        step: distance between the first channels of two heads.
        heads: number of heads H.
        head_width: width d of one head.
        has_bias: whether the layer's bias is one of the projection too.

    Example:
        >>> layer = torch.nn.Linear(24, 72)  # queries, keys and values of 3 heads
        >>> keys = FusedSlice(layer, first=24, step=8, heads=3, head_width=8)
        >>> torch.equal(keys.weight, layer.weight[24:48])
        True
    """

    layer: nn.Linear | Conv1D
    first: int
    step: int
    heads: int
    head_width: int
    has_bias: bool = True

    @property
    def in_features(self) -> int:
        """Input width D."""
        return int(self.layer.weight.shape[1 - self.dim])

    @property
    def out_features(self) -> int:
        """Output width H·d."""
        return self.heads * self.head_width

    @property
    def dim(self) -> int:
        """Dimension of the layer's weight along which channels lie: 1 in a transposed layer."""
        return int(isinstance(self.layer, Conv1D))

    @property
    def weight(self) -> Tensor:
        """The weight in the layout of `nn.Linear`, (H·d, D); a view where heads lie side by side."""
        weight: Tensor = self.layer.weight
        return self._select(weight.T if self.dim else weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias, (H·d,), or None; a view where heads lie side by side."""
        return None if self.layer.bias is None or not self.has_bias else self._select(self.layer.bias)

    def rows(self, head: int) -> range:
        """Return the channels of one head in the layer."""
        start = self.first + head * self.step
        return range(start, start + self.head_width)

    def _select(self, channels: Tensor) -> Tensor:
        if self.step == self.head_width:
            return channels[self.first : self.first + self.out_features]
        return torch.cat([channels[rows.start : rows.stop] for rows in map(self.rows, range(self.heads))])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight, and the bias where there is one."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def register_forward_pre_hook(self, hook: Any) -> RemovableHandle:
        """Register `hook` on the input of the layer."""
        return self.layer.register_forward_pre_hook(hook)


def fused_slice(module: Any, family: AttentionFamily, path: str) -> FusedSlice | None:
    """Return the projection at a path of the family in a stock module's fused layer, or None."""
    paths = (family.paths.query, family.paths.key, family.paths.value)
    layer: Any = getattr(module, family.paths.fused, None) if family.paths.fused and path in paths else None
    if type(layer) not in (nn.Linear, Conv1D):
        return None
    heads, width = attrgetter(family.paths.heads, family.paths.head_width)(module)
    groups = attrgetter(family.paths.key_value_heads)(module) if family.paths.key_value_heads else heads
    if layer.weight.shape[int(isinstance(layer, Conv1D))] != (heads + 2 * groups) * width:
        return None
    index = paths.index(path)
    if family.layout.interleaved:
        return FusedSlice(layer, index * width, 3 * width, heads, width)
    before = (0, heads, heads + groups)[index]
    return FusedSlice(layer, before * width, width, groups if index else heads, width)


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention module of a live model, dense or edited. A module that serves several layers is one site.

    Args:
        name: path of the module in the model.
        module: the attention module.
        family: its description.
        kind: self-attention to all positions ("encoder") or only to earlier ones ("decoder"), or "cross".
        layer: index among the sites of its kind.
        heads: number of heads H.
        head_width: width d of one head's keys.
        scaling: factor of the scores.
        parent: the module that holds it.
        key_value_heads: number of heads of keys and values Hkv; each serves H / Hkv heads of queries.
        reads_tokens: whether its model has a vocabulary, unlike an image tower.

    Example:
        >>> site = find_attention(model)[0]
        >>> site.part("query"), site.path("query")
        (Linear(in_features=24, out_features=24, bias=True), 'encoder.layer.0.attention.self.query')
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
    def paths(self) -> Paths:
        """Where the parts of the module are."""
        return self.family.paths

    @property
    def width(self) -> int:
        """H·d: width of the queries of all heads, and of the input of the output projection."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Hkv·d: width of the keys, and of the values, of all heads."""
        return self.key_value_heads * self.head_width

    @property
    def rotated(self) -> int:
        """Number of channels of a head that a rotary embedding rotates, its first."""
        family = self.family
        if family.rotary is None or (family.rotary.where and not self.part(family.rotary.where)):
            return 0
        if family.rotary.width == "partial_rotary_factor":
            share = self.part("config.rope_parameters").get("partial_rotary_factor", 1.0)
            return int(self.head_width * share)
        return int(self.part(family.rotary.width)) if family.rotary.width else self.head_width

    @property
    def has_positions(self) -> bool:
        """Whether products with relative embeddings are terms of its scores."""
        relative = self.family.relative
        return relative is not None and self.part(relative.enabled) and score_terms(self.module, self.family) > 1

    @property
    def own_positions(self) -> str:
        """Why heads have more than queries, keys and values, or "": positions have projections of their own."""
        relative = self.family.relative
        if relative is None or not self.has_positions or self.part(relative.shared):
            return ""
        return f"relative positions have projections of their own ({relative.shared} is false)"

    @property
    def no_dk(self) -> str:
        """Why its queries and keys cannot be converted; empty where they can."""
        return self.family.limits.no_dk or self.own_positions

    def part(self, path: str) -> Any:
        """Read an attribute by a path of the family's, such as `query`, `key`, `value` or `output`."""
        if path.startswith(".."):
            return _attribute(self.name, self.parent, self.family, path[2:])
        return _attribute(self.name, self.module, self.family, path)

    def path(self, path: str) -> str:
        """Return the path in the model of an attribute that the family describes relative to the module."""
        return f"{self.name.rpartition('.')[0]}.{path[2:]}" if path.startswith("..") else f"{self.name}.{path}"


@dataclass(frozen=True, eq=False)
class DenseSite(AttentionSite):
    """An attention module whose queries and keys are dense.

    Args:
        query: projection of queries, weight (H·d, D), storage layout of `nn.Linear`; its slice of a fused layer.
        key: projection of keys, weight (Hkv·d, D).

    Example:
        >>> site = find_dense_attention(model)[0]
        >>> site.widths, site.key_heads().shape, site.query_bias().shape
        ((24, 24), torch.Size([3, 24, 8]), torch.Size([3, 8]))
    """

    query: nn.Linear | FusedSlice
    key: nn.Linear | FusedSlice

    @property
    def inputs(self) -> tuple[tuple[Any, str], ...]:
        """Pairs of (projection, side of the attention mask) whose input moments weight the errors of a conversion."""
        return (self.query, "query"), (self.key, "key")

    @property
    def widths(self) -> tuple[int, int]:
        """Input widths of queries and keys."""
        return self.query.in_features, self.key.in_features

    def query_heads(self) -> Tensor:
        """Return Wq of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.query.weight, self.heads)

    def key_heads(self) -> Tensor:
        """Return Wk of each head of keys in mathematical layout, (Hkv, D, d)."""
        return split_heads(self.key.weight, self.key_value_heads)

    def query_bias(self) -> Tensor | None:
        """Return the query bias of each head, (H, d), or None where the projection has none."""
        bias = self.query.bias
        return None if bias is None else bias.detach().reshape(self.heads, self.head_width)

    def key_bias(self) -> Tensor | None:
        """Return the key bias of each head of keys, (Hkv, d), or None where the projection has none."""
        bias = self.key.bias
        return None if bias is None else bias.detach().reshape(self.key_value_heads, self.head_width)


@dataclass(frozen=True, eq=False)
class ValueSite(AttentionSite):
    """An attention module whose values and output projection are dense.

    Args:
        value: projection of values, weight (Hkv·d, D), storage layout of `nn.Linear`; its slice of a fused layer.
        output: the output projection, weight (D, H·d), or (H·d, D) in a transposed layer.

    Example:
        >>> site = find_dense_values(model)[0]
        >>> site.widths, site.value_bias().shape
        ((24, 24), torch.Size([3, 8]))
    """

    value: nn.Linear | FusedSlice
    output: nn.Linear | Conv1D

    @property
    def inputs(self) -> tuple[tuple[Any, str], ...]:
        """Pair of (projection, side of the attention mask) whose input moments weight the errors of a conversion."""
        return ((self.output, "query"),)

    @property
    def widths(self) -> tuple[int, int]:
        """Input width of values, output width of the output projection."""
        return self.value.in_features, self.output.weight.shape[isinstance(self.output, Conv1D)]

    def value_heads(self) -> Tensor:
        """Return Wv of each head of values in mathematical layout, (Hkv, D, d)."""
        return split_heads(self.value.weight, self.key_value_heads)

    def value_bias(self) -> Tensor | None:
        """Return the value bias of each head of values, (Hkv, d), or None where the projection has none."""
        bias = self.value.bias
        return None if bias is None else bias.detach().reshape(self.key_value_heads, self.head_width)

    def output_heads(self) -> Tensor:
        """Return Wo of each head in mathematical layout, (H, d, D)."""
        weight = by_input(self.output)
        return weight.reshape(self.heads, -1, weight.shape[1])


def by_input(layer: nn.Linear | Conv1D) -> Tensor:
    """Return the weight of a linear layer as (inputs, outputs), detached; a view."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, Conv1D) else weight.T


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """Split an `nn.Linear` weight (H·d, D) into per-head matrices (H, D, d)."""
    return weight.detach().view(heads, -1, weight.shape[1]).transpose(1, 2)


def find_attention(
    model: nn.Module, modules: str = "*", kinds: Collection[Kind] = KINDS, *, optional: bool = False
) -> list[AttentionSite]:
    """List the attention modules of `model`, in the model's order, each once.

    Each is described by the family of the innermost model that it belongs to: a model of two towers, or an
    encoder and a decoder put together, has several.

    Args:
        model: a Transformers model, stock or edited; as for `transformers_model`.
        modules: glob on module paths; only matching modules are listed.
        kinds: only modules of these kinds are listed.
        optional: whether a model without described attention has none, instead of an error.

    Raises:
        UnsupportedModelError: unknown family; no module matches; a module lacks an attribute its family promises.
        HeadError: `kinds` is no collection, as ("encoder",) is.

    Example:
        >>> for site in find_attention(model):
        ...     print(site.name, site.kind, site.heads, site.head_width)
        encoder.layer.0.attention.self encoder 3 8
        encoder.layer.1.attention.self encoder 3 8
    """
    if not isinstance(kinds, Collection) or isinstance(kinds, str):
        raise HeadError(f"kinds is {kinds!r}; expected a tuple of some of {', '.join(KINDS)}, as ('encoder',)")
    model = transformers_model(model)
    owners = _owners(model)
    described = _described(owners, optional)
    if not described and optional and modules == "*":
        return []
    if not described:
        raise UnsupportedModelError(
            f"{_class(model)}: model type {_type(model)!r} has no description{_first_attention(model)}; {WITHOUT}; "
            f"{SEE}"
        )
    sites: list[AttentionSite] = []
    for name, module in model.named_modules():
        family = described.get(name)
        if family is not None and _class(module) in family.attention_classes:
            site = _site(name, module, family, model.get_submodule(name.rpartition(".")[0]), owners[name])
            sites.append(replace(site, layer=[other.kind for other in sites].count(site.kind)))
    chosen = [site for site in sites if fnmatch(site.name, modules) and site.kind in kinds]
    if not sites and optional and modules == "*":
        return []
    if not chosen:
        have = ", ".join(f"{site.name} ({site.kind})" for site in sites[:3]) + (", …" if len(sites) > 3 else "")
        classes = dict.fromkeys(name for family in described.values() for name in family.attention_classes)
        wanted = repr(modules) + ("" if set(kinds) == set(KINDS) else f" with kind {' or '.join(kinds)}")
        raise UnsupportedModelError(
            f"no {' or '.join(classes)} of {_class(model)} matches {wanted}; "
            + (f"the attention modules are {have}" if sites else "the model contains none")
        )
    return chosen


def _class(module: object) -> str:
    return type(module).__name__


def _type(model: object) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _is_attention(module: nn.Module) -> bool:
    return "attention" in _class(module).lower()


def _first_attention(model: nn.Module) -> str:
    """Return words on the first module of a model that may be attention, or ""."""
    attention = ((name, module) for name, module in model.named_modules() if _is_attention(module))
    return next((f"; its first attention module is {name} ({_class(module)})" for name, module in attention), "")


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost model that holds each module of `model`, by the path of the module."""
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_model = not name or isinstance(module, PreTrainedModel)
        owners[name] = module if is_model else owners[name.rpartition(".")[0]]
    return owners


def _described(owners: dict[str, nn.Module], optional: bool = False) -> dict[str, AttentionFamily]:
    """Return the family of each module by its path, without modules of unknown families.

    Families that need a newer Transformers raise an error, or are left out if they are `optional`.
    """
    described = {name: FAMILIES[type_] for name, owner in owners.items() if (type_ := _type(owner)) in FAMILIES}
    for name, family in list(described.items()):
        if too_old := _why_too_old(_type(owners[name]), family):
            if not optional:
                raise UnsupportedModelError(too_old)
            del described[name]
    return described


def _why_too_old(type_: str | None, family: AttentionFamily) -> str:
    """Return why models of a described family cannot be converted with this Transformers, or ""."""
    since = family.since
    if not since or Version(transformers.__version__) >= Version(since):
        return ""
    return (
        f"models of type {type_!r} can be converted with Transformers {since} and newer versions, not "
        f"{transformers.__version__}; pip install 'transformers>={since}'"
    )


def _site(
    name: str, module: nn.Module, family: AttentionFamily, parent: nn.Module, owner: nn.Module
) -> AttentionSite:
    """Return an attention module of the model `owner` as the first of its kind."""
    causal = family.causal or getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    kind: Kind = "decoder" if causal else "encoder"
    if family.paths.cross and family.paths.cross in name.split("."):
        kind = "cross"
    heads = read(name, module, family, STOCK_HEADS if STOCK_HEADS in module.__dict__ else family.paths.heads, int)
    head_width = read(name, module, family, family.paths.head_width, int)
    path = "scaling" if hasattr(module, "scaling") else family.paths.scaling
    scaling = float(read(name, module, family, path, (int, float))) if path else default_scaling(module, family)
    groups = read(name, module, family, family.paths.key_value_heads, int) if family.paths.key_value_heads else heads
    if groups < 1 or heads % groups:
        raise UnsupportedModelError(
            f"{name}: got {groups} heads of keys and values for {heads} of queries; expected a divisor of {heads}"
        )
    return AttentionSite(
        name=name,
        module=module,
        family=family,
        kind=kind,
        layer=0,
        heads=heads,
        head_width=head_width,
        scaling=scaling,
        parent=parent,
        key_value_heads=groups,
        reads_tokens=hasattr(getattr(owner, "config", None), "vocab_size"),
    )


def score_terms(module: nn.Module, family: AttentionFamily) -> int:
    """Return the number of terms by which a module scales its scores: 1, or up to 3 with relative embeddings."""
    terms = [] if family.relative is None else attrgetter(family.relative.terms)(module)
    return 1 + len({"c2p", "p2c"}.intersection(terms))


def default_scaling(module: nn.Module, family: AttentionFamily) -> float:
    """Return the factor of the scores of a stock module that holds none, 1/√(d · terms of the scores)."""
    width: int = attrgetter(family.paths.head_width)(module)
    return float((width * score_terms(module, family)) ** -0.5)


def read(name: str, module: nn.Module, family: AttentionFamily, path: str, kind: Any) -> Any:
    """Read `module.path`, the attribute of an attention module at path `name`, and check its type."""
    value = _attribute(name, module, family, path)
    own_forward = isinstance(value, nn.Linear) and type(value).forward is not nn.Linear.forward
    if not isinstance(value, kind | FusedSlice if kind is nn.Linear else kind) or own_forward:
        expected = "int" if kind is int else "a number"
        remedy = f"the {family.name} description does not fit this model"
        if kind is nn.Linear:
            expected = "a plain Linear"
            remedy = "adapters must be merged and quantization undone before converting"
        raise UnsupportedModelError(f"{name}.{path}: got {_class(value)}, expected {expected}; {remedy}")
    return value


def _attribute(name: str, module: nn.Module, family: AttentionFamily, path: str) -> Any:
    """Read `module.path`, or the slice of a fused layer for such a path."""
    if path in module.__dict__.get("rows", {}):  # of a converted module
        return _converted_rows(module, family, path)
    try:
        return attrgetter(path)(module)
    except AttributeError:
        projection = fused_slice(module, family, path)
        if projection is not None:
            return projection
        layer = getattr(module, family.paths.fused, None) if family.paths.fused else None
        if layer is not None and type(layer) not in (nn.Linear, Conv1D):
            return layer  # for the message about its type
    raise UnsupportedModelError(
        f"{name} ({_class(module)}) has no attribute {path!r}, which the {family.name} description "
        f"promises; Transformers {transformers.__version__} may have renamed it: transformers{VERSIONS} was tried"
    )


def _converted_rows(module: Any, family: AttentionFamily, path: str) -> Any:
    """Return the rows of the layer that holds a projection of a converted module, or the layer if it is not plain."""
    layer_path, start, stop = module.rows[path]
    layer = module.get_submodule(layer_path)
    if type(layer) is not nn.Linear:
        return layer
    width, has_bias = attrgetter(family.paths.head_width)(module), path != family.paths.key or family.key_bias
    if (stop - start) % width:
        width = stop - start
    return FusedSlice(layer, start, width, (stop - start) // width, width, has_bias)


def find_dense_attention(model: nn.Module, modules: str = "*") -> list[DenseSite]:
    """List every attention module of `model` that can be converted; as `find_attention`, and checks the projections.

    Raises:
        UnsupportedModelError: as `find_attention`; an operation between projection and dot product (rotary
            embedding, query/key normalisation) is not described by the family; a query or key projection is no
            plain `nn.Linear`, is quantized, or is not H·d wide; the family's description leaves this kind of
            attention out.

    Example:
        >>> (site,) = find_dense_attention(model, "*layer.1*")
        >>> site.query_heads().shape  # (H, D, d)
        torch.Size([3, 24, 8])
    """
    sites = dense_scores(model, find_attention(model, modules))
    refuse_unknown_parts(model, modules)
    return sites


def find_dense_values(model: nn.Module, modules: str = "*") -> list[ValueSite]:
    """List every attention module of `model` whose values can be converted; as `find_dense_attention`.

    Raises:
        UnsupportedModelError: as `find_attention`; the value or output projection is no plain layer, is quantized,
            or is not H·d wide; heads are mixed before it; the family's description leaves this kind out.

    Example:
        >>> site = find_dense_values(model)[0]
        >>> site.value_heads().shape, site.output_heads().shape
        (torch.Size([3, 24, 8]), torch.Size([3, 8, 24]))
    """
    sites = [dense_values(site) for site in find_attention(model, modules)]
    refuse_unknown_parts(model, modules)
    return sites


def dense_scores(model: nn.Module, sites: Sequence[AttentionSite]) -> list[DenseSite]:
    """Return attention modules of `model` with their queries and keys; raises as `find_dense_attention`."""
    dense = [_dense_scores(site) for site in sites]
    _refuse_interposed(transformers_model(model), dense)
    return dense


def _dense_scores(site: AttentionSite) -> DenseSite:
    if site.no_dk:
        _refuse_scores(site.name, site.module, site.no_dk)
    _refuse_undescribed(site)
    query = _projection(site, site.paths.query, site.heads)
    key = _projection(site, site.paths.key, site.key_value_heads)
    return DenseSite(**vars(site), query=query, key=key)


def dense_values(site: AttentionSite) -> ValueSite:
    """Return an attention module with its values and outputs; raises as `find_dense_values`."""
    _refuse_undescribed(site)
    value = _projection(site, site.paths.value, site.key_value_heads)
    output, path = site.part(site.paths.output), site.path(site.paths.output)
    if hasattr(output, "alphas"):
        raise UnsupportedModelError(f"{path} mixes the heads; call merge_alphas_ first, then convert values")
    plain = type(output) in (nn.Linear, Conv1D)
    inputs = output.weight.shape[0 if isinstance(output, Conv1D) else 1] if plain else 0
    if inputs != site.width:
        got = f"a plain layer that reads {inputs} channels" if plain else _class(output)
        raise UnsupportedModelError(
            f"{path}: got {got}; expected a plain nn.Linear that reads {site.heads} heads × {site.head_width} = "
            f"{site.width}; adapters must be merged and quantization undone before converting"
        )
    _refuse_quantized(path, output.weight)
    return ValueSite(**vars(site), value=value, output=output)


def _projection(site: AttentionSite, path: str, heads: int) -> nn.Linear | FusedSlice:
    """Read a dense projection, and check that it is as wide as the heads and holds plain floats."""
    projection: nn.Linear | FusedSlice = read(site.name, site.module, site.family, path, nn.Linear)
    width = heads * site.head_width
    if projection.out_features != width:
        raise UnsupportedModelError(
            f"{site.name}.{path}: got {projection.out_features} output channels; expected {heads} heads × "
            f"{site.head_width} = {width}; the {site.family.name} description does not fit this model"
        )
    _refuse_quantized(f"{site.name}.{path}", projection.weight)
    return projection


def _refuse_quantized(path: str, weight: Tensor) -> None:
    if weight.dtype not in PLAIN or type(weight) not in (Tensor, nn.Parameter):
        kind = f"{type(weight).__module__}.{type(weight).__qualname__} of {weight.dtype}"
        raise UnsupportedModelError(f"{path}: weights are {kind}; convert before quantizing")


def refuse_kept_attention(site: AttentionSite) -> None:
    """Refuse an attention module that cannot be edited."""
    if site.family.limits.feed_forward_only:
        raise UnsupportedModelError(
            f"{site.name}: attention of {site.family.name} can be neither converted nor hooked, because "
            f"{site.family.limits.feed_forward_only}; convert feed-forward blocks alone (dff), and leave it out by "
            "modules or kinds"
        )


def _refuse_undescribed(site: AttentionSite) -> None:
    """Refuse attention that cannot be edited, or a kind that the family's description leaves out."""
    refuse_kept_attention(site)
    family = site.family
    if site.kind in family.limits.undescribed:
        raise UnsupportedModelError(
            f"{site.name}: {site.kind} attention of {family.name} cannot be converted, because "
            f"{family.limits.undescribed[site.kind]}; leave it out with a pattern of module paths (modules='…')"
        )


def _refuse_scores(name: str, module: nn.Module, reason: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{name} ({_class(module)}): queries and keys cannot be converted, because {reason}; leave out dk, "
        "and narrow values (dv) and feed-forward blocks (dff)"
    )


def _refuse_interposed(model: nn.Module, sites: Iterable[AttentionSite]) -> None:
    """Refuse operations between projection and dot product, other than a rotary embedding that the family describes.

    The collaborative form factors Wq·Wkᵀ, so nothing else may stand between the two.
    """
    owners = _owners(model)
    families = {owners[site.name]: site.family for site in sites}
    rotating = set()
    for name, module in model.named_modules():
        family = families.get(owners[name])
        child, is_rotary = name.rpartition(".")[2].lower(), "rotaryembedding" in _class(module).lower()
        if family is not None and child in NORMS:
            _refuse_scores(name, module, NORMALISED)
        if family is not None and not family.rotary and (is_rotary or child == "rotary_emb"):
            _refuse_scores(name, module, "a rotary embedding rotates queries and keys after their projection")
        if is_rotary:
            rotating.add(owners[name])
    for owner, family in families.items():
        if family.rotary and owner not in rotating:
            raise UnsupportedModelError(
                f"{_class(owner)} has no rotary embedding, which the {family.name} description promises; models of "
                "this family with other positions cannot be converted"
            )


def why_undescribed(model: nn.Module, modules: str = "*") -> str:
    """Return which selected attention of a model has no description for this Transformers; empty for none."""
    model = transformers_model(model)
    for name, owner in _owners(model).items():
        module, type_ = model.get_submodule(name), _type(owner)
        if not (name and _is_attention(module) and fnmatch(name, modules)):
            continue
        if type_ not in FAMILIES:
            return f"{name} ({_class(module)}): model type {type_!r} has no description"
        if too_old := _why_too_old(type_, FAMILIES[type_]):
            return f"{name} ({_class(module)}): {too_old}"
    return ""


def refuse_unknown_parts(model: nn.Module, modules: str) -> None:
    """Refuse selected attention in a model inside `model` whose family has no description."""
    if reason := why_undescribed(model, modules):
        raise UnsupportedModelError(
            f"{reason}; leave it out with a pattern of module paths (modules='…'); {WITHOUT}; {SEE}"
        )


def refuse_hooks(path: str, layer: nn.Module, stays: bool = False) -> None:
    """Refuse a projection with hooks, a forward pass or parts of its own, which a conversion would lose.

    Weight reparametrizations by hooks (`torch.nn.utils.prune`, `weight_norm`) are refused too. Accelerate's forward
    passes only move tensors, and are allowed. A layer that `stays` in the model keeps hooks on its outputs.
    """
    hooks: dict[str, Any] = {
        "a forward pre-hook": layer._forward_pre_hooks,
        "a forward hook": {} if stays else layer._forward_hooks,
        "a backward hook": {} if stays else {**layer._backward_hooks, **layer._backward_pre_hooks},
        "a forward pass set on the instance": "forward" in vars(layer) and not hasattr(layer, "_hf_hook"),
    }
    present = [name for name, hook in hooks.items() if hook]
    if isinstance(layer, nn.Linear | Conv1D) and not stays:
        parts = {**layer._parameters, **layer._buffers, **layer._modules}.keys() - {"weight", "bias"}
        present += [f"{part}, a parameter, buffer or module of its own" for part in sorted(parts)]
    if present:
        raise UnsupportedModelError(
            f"{path} ({_class(layer)}) has {present[0]}, which would not survive; remove it (torch.nn.utils.prune."
            "remove and torch.nn.utils.remove_weight_norm make such weights plain), then register it anew"
        )


def _sentence_parts(model: Any) -> dict[str, Any]:
    """Return path → part of a SentenceTransformer, one for each Transformers model that its parts hold."""
    parts: dict[int, tuple[str, Any]] = {}
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        inner = None if isinstance(part, PreTrainedModel) else getattr(part, "auto_model", None)
        if isinstance(inner, nn.Module):
            parts.setdefault(id(inner), (path, part))
    return dict(parts.values())


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a SentenceTransformer, or of a part of one; None for others."""
    parts = _sentence_parts(model)
    return getattr(next(iter(parts.values())) if len(parts) == 1 else model, "tokenizer", None)


def transformers_model(model: Any) -> PreTrainedModel:
    """Return the Transformers model itself.

    Args:
        model: a Transformers model; a SentenceTransformer, or a part of one, that holds one; a PEFT model, or what
            `torch.compile` returned, which wrap one; or another module that passes on the attributes of one.

    Raises:
        UnsupportedModelError: it is none of these.

    Example:
        >>> transformers_model(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
            ...
        collab_compress.errors.UnsupportedModelError: Linear is no Transformers model; ...
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
        return transformers_model(compiled)  # paths must be those of the model without the wrapper
    if hasattr(model, "get_base_model"):  # of PEFT
        return transformers_model(model.get_base_model())
    parts = _sentence_parts(model)
    if len(parts) > 1:
        paths = [f"model.get_submodule({path!r})" for path in parts]
        raise UnsupportedModelError(
            f"{_class(model)} holds {len(parts)} Transformers models, as a Router does; pass one after the other: "
            f"{', '.join(paths)}, with data as it reads"
        )
    for part in parts.values():
        return transformers_model(part.auto_model)
    is_module = isinstance(model, nn.Module) and hasattr(model, "base_model_prefix")  # BertEncoder has a config alone
    if is_module and isinstance(getattr(model, "config", None), PretrainedConfig):
        return model
    hint = "pass a transformers.PreTrainedModel, or a SentenceTransformer that holds one"
    if hasattr(getattr(model, "module", None), "config"):  # of DistributedDataParallel
        hint = "pass the model inside, model.module"
    raise UnsupportedModelError(f"{_class(model)} is no Transformers model; {hint}")
