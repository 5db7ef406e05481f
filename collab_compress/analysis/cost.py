"""What attention costs, dense and converted: parameters, multiply-accumulates, T*, and bytes in a key cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention import FORMS, Form, ScoreForm, SharedScores
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import HeadError


@dataclass(frozen=True)
class FormCost:
    """What the scores of one attention module cost in one form.

    Args:
        parameters: of query and key projections, mixing matrix and content biases included.
        macs: multiply-accumulates of the scores of one sequence.
        key_bytes: what a key cache keeps of a token, in the model's dtype; 0 in an encoder, which keeps none.
    """

    parameters: int
    macs: int
    key_bytes: int


@dataclass(frozen=True)
class ModuleCost:
    """What the scores of one attention module cost in both forms.

    Args:
        name: path of the module.
        kind: kind of attention.
        length: tokens T for which multiply-accumulates are counted.
        dk: channels R of all heads together, or None for a dense module for which none was given.
        form: whether heads share these channels, or each has its own.
        dense: cost in dense form.
        converted: cost at that dk, or None without.
        break_even_length: T*, the number of tokens beyond which converted scores cost more, or None without dk.
    """

    name: str
    kind: Kind
    length: int
    dk: int | None
    form: str
    dense: FormCost
    converted: FormCost | None
    break_even_length: float | None


@dataclass(frozen=True)
class LayerCost:
    """What a whole attention layer costs, values and output projection included, biases not.

    Args:
        parameters: of its four projections, and of the mixing matrix.
        macs: multiply-accumulates for one sequence.
    """

    parameters: int
    macs: int


@dataclass(frozen=True)
class PaperRow:
    """One comparison of Table 1 of "Multi-Head Attention: Collaborate Instead of Concatenate", at T = 128.

    Args:
        width: D, and dense query/key width H·d.
        heads: number of heads H.
        dk: shared width R.
        dense: computed here.
        collaborative: computed here, content biases not counted.
        printed: the paper's dense parameters, collaborative parameters (10⁶), dense and collaborative operations
            (10⁸).
    """

    width: int
    heads: int
    dk: int
    dense: LayerCost
    collaborative: LayerCost
    printed: tuple[float, float, float, float]


def module_costs(
    model: PreTrainedModel,
    length: int = 128,
    *,
    dk: int | None = None,
    form: Form = "shared",
    kinds: Collection[Kind] = KINDS,
) -> list[ModuleCost]:
    """Count what the scores of every attention module cost, as they are and in the other form.

    Args:
        model: stock or converted.
        length: tokens T.
        dk: channels R to give dense modules, content biases besides; a converted module has its own.
        form: whether dense modules are to share them; a converted module has its own form.
        kinds: which kinds of attention.

    Returns:
        One entry a module, in the model's order.

    Raises:
        HeadError: the length or the dk is not positive, or the form is unknown.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    if length < 1 or (dk is not None and dk < 1):
        raise HeadError(f"got length {length} and dk {dk}; expected at least 1")
    if form not in FORMS:
        raise HeadError(f"unknown form {form!r}; expected one of {', '.join(FORMS)}")
    return [_module_cost(site, length, dk, form) for site in find_attention(model, FAMILIES, kinds=kinds)]


def layer_cost(width: int, heads: int, dk: int | None = None, length: int = 128) -> LayerCost:
    """Count what a whole attention layer costs, without biases (section 3.4 of the paper).

    Values and output take 2·D² parameters and 2·T·D² + T²·D multiply-accumulates in both forms.

    Args:
        width: D, and the dense query/key width H·d.
        heads: number of heads H.
        dk: shared width R, or None for the dense layer.
        length: tokens T.

    Raises:
        HeadError: the width is no multiple of the number of heads.
    """
    if width % heads:
        raise HeadError(f"width {width} is no multiple of {heads} heads")
    macs = 2 * length * width**2 + length**2 * width
    if dk is None:
        head_width = width // heads
        return LayerCost(
            dense_parameters(width, heads, head_width, bias=False) + 2 * width**2,
            dense_macs(width, heads, head_width, length) + macs,
        )
    form = SharedScores(heads, width // heads, "", "", dk, content_bias=False)
    return LayerCost(form.parameters(width) + 2 * width**2, form.macs(width, length) + macs)


def paper_table_1() -> list[PaperRow]:
    """Recompute Table 1 of "Multi-Head Attention: Collaborate Instead of Concatenate": FairSeq, then BERT-base."""
    return [
        PaperRow(width, heads, dk, layer_cost(width, heads), layer_cost(width, heads, dk), printed)
        for width, heads, dk, printed in (
            (512, 8, 128, (1.05, 0.66, 1.51, 1.09)),
            (768, 12, 256, (2.36, 1.58, 3.27, 2.65)),
        )
    ]


def _module_cost(site: AttentionSite, length: int, dk: int | None, option: Form) -> ModuleCost:
    module: Any = site.module
    query, key = (getattr(part, "proj", part) for part in (site.part(site.family.query), site.part(site.family.key)))
    width, bias = key.in_features, query.bias is not None
    form: ScoreForm | None = None if dk is None else FORMS[option].of(site, dk, content_bias=True)
    if hasattr(module, "score_form"):
        form = module.score_form
        bias = site.part(site.family.value).bias is not None  # as values have it, queries had it
    number = 0 if site.kind == "encoder" else query.weight.element_size()
    dense = FormCost(
        dense_parameters(width, site.heads, site.head_width, bias),
        dense_macs(width, site.heads, site.head_width, length),
        site.width * number,
    )
    if form is None:
        return ModuleCost(site.name, site.kind, length, None, option, dense, None, None)
    converted = FormCost(form.parameters(width), form.macs(width, length), form.key_width * number)
    return ModuleCost(site.name, site.kind, length, form.rank, form.option, dense, converted, form.break_even(width))
