"""Choose widths and a form from the share of attention's parameters to keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, DenseSite, ValueSite, find_dense_attention, find_dense_values
from collab_compress.attention import FORMS, NarrowValues, ScoreForm
from collab_compress.calibration import Batch
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import CompressionError
from collab_compress.options import CalibrationOptions, Compression, Form

TYPICAL = 128  # tokens, where nothing says how long inputs are
COMMON = 0.9  # share of the calibration sequences that are no longer than the length that counts
SPLIT = {"shared": (0.85, 1.15), "per-head": (1.0, 1.0)}
"""Share of queries and keys, and of values, that a form keeps where half of both would be 1 and 1: heads have more in
common in their scores than in their values, so shared queries and keys can be the narrower."""


@dataclass(frozen=True)
class Choice:
    """Widths and form for a share to keep.

    Args:
        modules: path of each attention module → its compression.
        reason: what was chosen and why, one sentence.
    """

    modules: dict[str, Compression]
    reason: str


@dataclass(frozen=True)
class _Widths:
    """Widths of one module, the parameters it then has, and its multiply-accumulates at the length that counts."""

    dk: int
    dv: int
    parameters: int
    macs: int


def choose(model: PreTrainedModel, compression: Compression, length: int) -> Choice:
    """Choose the form, and dk and dv of each module, that keep a share of the attention's parameters.

    Each module gets as many whole channels a head as keep no more of it than was asked for. Of the forms that cost
    no more than dense attention at the given length, in scores as in all, the one that costs least is taken.

    Args:
        model: dense.
        compression: with `keep`.
        length: tokens of an input.

    Raises:
        CompressionError: the share is too small for one channel a head, or no form is cheaper than dense attention.
        UnsupportedModelError: a module cannot be converted.
    """
    keep = compression.keep
    assert keep is not None
    where = (model, FAMILIES, compression.modules, compression.kinds)
    rotary = next((site for site in find_dense_attention(*where) if site.family.rotary), None)
    if rotary is not None:
        raise CompressionError(
            f"keep chooses widths of single channels a head; those of {rotary.family.name} come in whole heads of "
            f"{rotary.head_width}, so pass dk and dv"
        )
    sites = list(zip(find_dense_attention(*where), find_dense_values(*where), strict=True))
    before = sum(_dense_cost(site, values, length).parameters for site, values in sites)
    candidates = {}
    for form in get_args(Form):
        widths = [_widest(site, values, form, keep, length) for site, values in sites]
        if None not in widths:
            candidates[form] = [each for each in widths if each is not None]
    if not candidates:
        raise CompressionError(f"keep is {keep}, and one channel a head keeps {_least(sites):.2f} already; pass more")
    form = min(candidates, key=lambda name: sum(each.macs for each in candidates[name]))
    chosen = candidates[form]
    kept = sum(each.parameters for each in chosen) / before
    dense = sum(_dense_cost(site, values, length).macs for site, values in sites)
    macs = sum(each.macs for each in chosen) / dense
    if len(FORMS[form].solvers) == 1:  # closed form
        compression = compression.with_solver(method="als", effort="best", sweeps=None, tolerance=None)
    modules = {
        site.name: replace(compression, keep=None, dk=each.dk, dv=each.dv, form=form)
        for (site, _), each in zip(sites, chosen, strict=True)
    }
    return Choice(
        modules,
        f"Kept {kept:.0%} of the attention's parameters: dk {_range(each.dk for each in chosen)}, "
        f"dv {_range(each.dv for each in chosen)}, form {form}: {macs:.0%} of dense attention's operations at "
        f"{length} tokens.",
    )


def typical_length(options: CalibrationOptions, batches: Sequence[Batch] = ()) -> int:
    """Return the number of tokens for which costs count.

    That is `length` where it is given, else the length that nine in ten of the calibration sequences do not exceed,
    else 128.

    Args:
        options: with `length` or without.
        batches: calibration data that are not random tokens.
    """
    masks = [batch["attention_mask"] for batch in batches if isinstance(batch.get("attention_mask"), Tensor)]
    lengths = [mask.sum(1).float().cpu() for mask in masks if mask.dim() == 2]
    if options.length is not None or not lengths:
        return options.length or TYPICAL
    return max(1, int(torch.cat(lengths).quantile(COMMON, interpolation="lower")))


def _widest(site: DenseSite, values: ValueSite, form: Form, keep: float, length: int) -> _Widths | None:
    """Return the largest widths of one module within the share that cost no more than dense attention.

    Shared channels that cost too much are not narrowed further: they would keep much less than was asked for.
    """
    before = _dense_cost(site, values, length)
    dense_scores = dense_macs(site.key.in_features, site.width, site.key_value_width, length)
    scores_share, values_share = SPLIT[form]
    for channels in range(site.head_width, 0, -1):
        score_channels = min(site.head_width, max(1, round(channels * scores_share / values_share)))
        scores = _scores(site, form, site.heads * score_channels)
        cost = _cost(site, values, scores, site.heads * channels, length)
        cheaper = scores.macs(site.key.in_features, length) <= dense_scores and cost.macs <= before.macs
        fits = cost.parameters <= keep * before.parameters
        if fits and cheaper:
            return cost
        if fits and form == "shared":
            return None
    return None


def _cost(site: DenseSite, values: ValueSite, scores: ScoreForm, dv: int, length: int) -> _Widths:
    width = site.key.in_features
    narrow = NarrowValues.of(site, dv, values.value.bias is not None)
    return _Widths(
        scores.rank,
        dv,
        scores.parameters(width) + narrow.parameters(width),
        scores.macs(width, length) + narrow.macs(width, length),
    )


def _dense_cost(site: DenseSite, values: ValueSite, length: int) -> _Widths:
    width, queries, keys = site.key.in_features, site.width, site.key_value_width
    whole = NarrowValues.of(site, values.width, values.value.bias is not None)
    return _Widths(
        queries,
        values.width,
        dense_parameters(width, queries, keys, site.query.bias is not None) + whole.parameters(width),
        dense_macs(width, queries, keys, length) + whole.macs(width, length),
    )


def _scores(site: DenseSite, form: Form, dk: int) -> ScoreForm:
    return FORMS[form].of(site, dk, content_bias=site.query.bias is not None)


def _least(sites: Sequence[tuple[DenseSite, ValueSite]]) -> float:
    """Return the share that one channel a head keeps, of the module that keeps most."""
    return max(
        _cost(site, values, _scores(site, "per-head", site.heads), site.heads, 1).parameters
        / _dense_cost(site, values, 1).parameters
        for site, values in sites
    )


def _range(widths: Iterable[int]) -> str:
    found = sorted(set(widths))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
