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
from collab_compress.attention import NarrowValues, RotaryScores, ScoreForm, SharedScores
from collab_compress.attention.install import forms_of
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
        [('dk', 669), ('dv', 1176)]
    """
    numbers = {"length": length, "dk": dk, "dv": dv}
    if any(number is not None and number < 1 for number in numbers.values()):
        got = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
        raise HeadError(f"got {got}; expected at least 1")
    return [cost for site in find_attention(model, kinds=kinds) for cost in costs_at(site, length, dk, dv)]


def costs_at(
    site: AttentionSite, length: int, dk: int | None = None, dv: int | None = None
) -> tuple[PartCost, PartCost]:
    """Return the costs of one module, in the forms that it has, or else would have at these widths."""
    scores, values = forms_of(site.module)
    if scores is None and dk is not None:
        has_bias = site.part(site.paths.query).bias is not None
        scores = RotaryScores.of(site, dk) if site.family.rotary else SharedScores.of(site, dk, None, has_bias)
    if values is None and dv is not None:
        values = NarrowValues.of(site, dv, site.part(site.paths.value).bias is not None)
    return attention_costs(site, length, scores, values)


def attention_costs(
    site: AttentionSite, length: int, scores: ScoreForm | None = None, values: NarrowValues | None = None
) -> tuple[PartCost, PartCost]:
    """Return the cost of a module's queries and keys, and of its values and outputs."""
    module, family = site.module, site.family
    paths = (family.paths.query, family.paths.key, family.paths.value, family.paths.output)
    query, key, value, output = (getattr(site.part(path), "proj", site.part(path)) for path in paths)
    widths, value_widths = (width_in(query), width_in(key)), (width_in(value), width_out(output))
    value_bias, biases = value.bias is not None, (query.bias is not None, key.bias is not None)
    if forms_of(module)[0] is not None:  # dense queries have a bias where values have one
        biases = value_bias, value_bias and family.key_bias
    channels = site.width, site.key_value_width
    all_values = NarrowValues.of(site, site.key_value_width, value_bias)
    number_bytes = query.weight.element_size() if _has_cache(site) else 0
    cached_keys, cached_values = _cached_channels(site, scores, values)
    scores_cost = PartCost(
        name=site.name,
        part="dk",
        width=None if scores is None else scores.rank,
        parameters_before=(before := dense_parameters(widths, channels, biases)),
        parameters_after=before if scores is None else scores.parameters(widths),
        macs_before=(macs := dense_macs(widths, channels, length)),
        macs_after=macs if scores is None else scores.macs(widths, length),
        cache_before=site.key_value_width * number_bytes,
        cache_after=cached_keys * number_bytes,
    )
    values_cost = PartCost(
        name=site.name,
        part="dv",
        width=None if values is None else values.dv,
        parameters_before=all_values.parameters(value_widths),
        parameters_after=(values or all_values).parameters(value_widths),
        macs_before=all_values.macs(value_widths, length),
        macs_after=(values or all_values).macs(value_widths, length),
        cache_before=all_values.value_width * number_bytes,
        cache_after=cached_values * number_bytes,
    )
    return scores_cost, values_cost


def _has_cache(site: AttentionSite) -> bool:
    return site.kind != "encoder" and not (site.family.causal and not hasattr(site.module, "layer_idx"))


def _cached_channels(site: AttentionSite, scores: ScoreForm | None, values: NarrowValues | None) -> tuple[int, int]:
    """Return how many channels of keys and of values a cache holds for each token."""
    keys = site.key_value_width if scores is None else scores.key_width
    channels = site.key_value_width if values is None else values.value_width
    if site.family.layout.head_count_attr and scores is not None and values is not None:  # laid out alike
        widest = max(scores.rank + scores.content_channels, values.dv)
        return (widest + -widest % site.head_width,) * 2
    return (max(keys, channels),) * 2 if site.family.layout.equal_widths and (scores or values) else (keys, channels)


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


def dense_macs(widths: tuple[int, int], channels: tuple[int, int], length: int) -> int:
    """Return the multiply-accumulates of dense scores over T tokens: T·D a channel, and T² a query channel."""
    return length * (widths[0] * channels[0] + widths[1] * channels[1]) + length**2 * channels[0]
