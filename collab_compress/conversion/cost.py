"""Count parameters, multiply-accumulates and key-value cache of the parts of a layer, dense and converted.

Queries and keys are counted as in "Multi-Head Attention: Collaborate Instead of Concatenate", section 3.4; values and
the output projection separately. H heads, d head width, R shared width, T tokens.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention
from collab_compress.architectures.sites import score_terms
from collab_compress.attention import NarrowConfig, QKConfig, RotaryConfig, SharedConfig, maps_of
from collab_compress.attention.projections import width_in
from collab_compress.conversion.feed_forward import FeedForward, block_shapes
from collab_compress.conversion.residual import width_out
from collab_compress.errors import HeadError

Part: TypeAlias = Literal["dk", "dv", "dff"]
"""Queries and keys, values and outputs, or feed-forward block, by the option that makes it narrower."""


@dataclass(frozen=True)
class PartCost:
    """The cost of one part of a layer, dense and converted.

    Args:
        name: path of the attention module, or of the second layer of a feed-forward block.
        part: "dk" for queries and keys, "dv" for values and outputs, "dff" for a feed-forward block.
        width: of all heads together, or number of neurons; None where the part stays dense.
        parameters_before: of its dense layers; of outputs without the bias.
        parameters_after: of what replaces them.
        macs_before: multiply-accumulates of one sequence, dense.
        macs_after: the same, converted.
        cache_before: bytes of a token's keys or values in a key-value cache, dense; 0 without one.
        cache_after: the same, converted, padded to whole heads.

    Example:
        >>> scores = part_costs(model, 128, dk=12)[0]
        >>> scores.part, scores.width, scores.macs_after < scores.macs_before
        ('dk', 12, True)
    """

    name: str
    part: Part
    width: int | None
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int
    cache_before: int = 0
    cache_after: int = 0


def part_costs(
    model: PreTrainedModel,
    length: int = 128,
    *,
    dk: int | None = None,
    dv: int | None = None,
    kinds: Collection[Kind] = KINDS,
) -> list[PartCost]:
    """Return the cost of queries and keys, then of values and outputs, of every attention module.

    Args:
        model: stock or converted.
        length: tokens T.
        dk: channels R at which dense queries and keys are counted, plus content biases where queries have a bias;
            converted ones keep their width.
        dv: channels at which dense values are counted; narrow values keep their width.
        kinds: attention types.

    Returns:
        Two entries a module, in the model's order.

    Raises:
        HeadError: the length, dk or dv is not positive.
        UnsupportedModelError: the model's family is not known, or it has no attention of these types.

    Example:
        >>> [(cost.part, cost.parameters_after) for cost in part_costs(model, length=128, dk=12)[:2]]
        [('dk', 696), ('dv', 1176)]
    """
    numbers = {"length": length, "dk": dk, "dv": dv}
    if any(number is not None and number < 1 for number in numbers.values()):
        got = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
        raise HeadError(f"got {got}; expected at least 1")
    return [cost for site in find_attention(model, kinds=kinds) for cost in costs_at(site, length, dk, dv)]


def costs_at(
    site: AttentionSite, length: int, dk: int | None = None, dv: int | None = None, head_dim: int | None = None
) -> tuple[PartCost, PartCost]:
    """Return the costs of one module, as it is converted, or else would be at these widths."""
    return attention_costs(site, length, *configs_at(site, dk, dv, head_dim))


def qk_config(site: AttentionSite, dk: int, head_dim: int | None = None) -> QKConfig:
    """Return the config of a module's queries and keys at a width."""
    if site.family.rotary:
        return RotaryConfig.of(site, dk)
    return SharedConfig.of(site, dk, head_dim, site.part(site.paths.query).bias is not None)


def ov_config(site: AttentionSite, dv: int) -> NarrowConfig:
    """Return the config of a module's values and outputs at a width."""
    return NarrowConfig.of(site, dv, site.part(site.paths.value).bias is not None)


def configs_at(
    site: AttentionSite, dk: int | None, dv: int | None, head_dim: int | None = None
) -> tuple[QKConfig | None, NarrowConfig | None]:
    """Return the configs of the maps that a module has, or else would have at these widths; None for dense ones."""
    qk, ov = (None if converted is None else converted.config for converted in maps_of(site.module))
    if qk is None and dk is not None:
        qk = qk_config(site, dk, head_dim)
    if ov is None and dv is not None:
        ov = ov_config(site, dv)
    return qk, ov


def attention_costs(
    site: AttentionSite, length: int, qk: QKConfig | None, ov: NarrowConfig | None
) -> tuple[PartCost, PartCost]:
    """Return the cost of a module's queries and keys, and of its values and outputs; None stands for dense ones."""
    query, key, value, output = (
        getattr(site.part(path), "proj", site.part(path))  # without padding to whole heads
        for path in (site.paths.query, site.paths.key, site.paths.value, site.paths.output)
    )
    widths, value_widths = (width_in(query), width_in(key)), (width_in(value), width_out(output))
    value_bias, biases = value.bias is not None, (query.bias is not None, key.bias is not None)
    if maps_of(site.module)[0] is not None:  # dense queries have a bias where values have one
        biases = value_bias, value_bias and site.family.key_bias
    dense, channels = site.key_value_width, (site.width, site.key_value_width)
    dense_values = NarrowConfig.of(site, dense, value_bias)
    has_cache = site.kind != "encoder" and (not site.family.causal or hasattr(site.module, "layer_idx"))
    number_bytes = query.weight.element_size() if has_cache else 0
    cached_keys, cached_values = _cached_channels(site, qk.key_channels if qk else dense, ov.dv if ov else dense)
    before = dense_parameters(widths, channels, biases)
    macs = dense_macs(widths, channels, length) + position_macs(site, length, site.width)
    macs_after = macs if qk is None else qk.macs(widths, length) + position_macs(site, length, qk.heads * qk.width)
    scores = PartCost(
        name=site.name,
        part="dk",
        width=qk.rank if qk else None,
        parameters_before=before,
        parameters_after=qk.parameters(widths) if qk else before,
        macs_before=macs,
        macs_after=macs_after,
        cache_before=dense * number_bytes,
        cache_after=cached_keys * number_bytes,
    )
    values = PartCost(
        name=site.name,
        part="dv",
        width=ov.dv if ov else None,
        parameters_before=dense_values.parameters(value_widths),
        parameters_after=(ov or dense_values).parameters(value_widths),
        macs_before=dense_values.macs(value_widths, length),
        macs_after=(ov or dense_values).macs(value_widths, length),
        cache_before=dense * number_bytes,
        cache_after=cached_values * number_bytes,
    )
    return scores, values


def _cached_channels(site: AttentionSite, key: int, value: int) -> tuple[int, int]:
    """Return how many channels of keys and values a cache holds for each token, as the module lays them out."""
    layout, dense = site.family.layout, site.key_value_width
    if site.family.forward != "stock":
        return key, value
    if layout.head_count_attr and key != dense and value != dense:  # laid out alike
        key = value = max(key, value)
    elif layout.fixed_head_count:
        return dense, dense
    key, value = (width + -width % site.head_width for width in (key, value))
    return (max(key, value),) * 2 if layout.equal_widths else (key, value)


def block_cost(model: PreTrainedModel, block: FeedForward, width: int | None, length: int) -> PartCost:
    """Return the cost of a feed-forward block with `width` neurons, biases included; None for all of them."""
    if width is not None and not 1 <= width <= block.width:
        raise HeadError(f"{block.down} reads {block.width} neurons, and dff is {width}; pass up to {block.width}")
    parameters, macs = [0, 0], [0, 0]
    for when, neurons in enumerate((block.width, width or block.width)):
        for shapes in block_shapes(model, block, neurons).values():
            parameters[when] += sum(map(prod, shapes.values()))
            macs[when] += length * prod(shapes["weight"])
    return PartCost(block.down, "dff", width, *parameters, *macs)


def dense_parameters(widths: tuple[int, int], channels: tuple[int, int], biases: tuple[bool, bool]) -> int:
    """Return the parameters of dense projections from input widths to channels, with a bias or without."""
    return sum((width + bias) * count for width, count, bias in zip(widths, channels, biases, strict=True))


def position_macs(site: AttentionSite, length: int, channels: int) -> int:
    """Return the multiply-accumulates of contents and relative embeddings, of T tokens and all heads' channels.

    Embeddings are projected once for all texts of a batch, which is not counted.
    """
    relative = site.family.relative
    if relative is None or not site.has_positions:
        return 0
    embeddings = min(2 * int(site.part(relative.span)), 2 * length - 1)
    return (score_terms(site.module, site.family) - 1) * length * embeddings * channels


def dense_macs(widths: tuple[int, int], channels: tuple[int, int], length: int) -> int:
    """Return the multiply-accumulates of dense scores over T tokens: T·D a channel, and T² a query channel."""
    return length * (widths[0] * channels[0] + widths[1] * channels[1]) + length**2 * channels[0]
