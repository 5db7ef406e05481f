"""From the share of attention to keep to widths and a form: what was measured, made a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, DenseSite, ValueSite, find_dense_attention, find_dense_values
from collab_compress.attention import FORMS, Form, NarrowValues, ScoreForm
from collab_compress.calibration import Batch
from collab_compress.conversion.compression import Compression
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import CompressionError

TYPICAL = 128  # tokens, where nothing says how long inputs are
SPLIT = {"shared": (0.85, 1.15), "per-head": (1.0, 1.0)}
"""Share of queries and keys, and of values, that a form keeps where half of both would be 1 and 1: heads have more in
common in their scores than in their values, so shared queries and keys can be the narrower."""


def choose(model: PreTrainedModel, compression: Compression, texts: Sequence[Batch] = ()) -> tuple[Compression, str]:
    """Choose dk, dv and the form that keep a share of the attention's parameters.

    Queries and keys are shared where their scores take fewer operations than dense ones at the typical length, which
    is better at equal parameters, and have channels of each head's own elsewhere. Widths are as many whole channels
    a head as keep no more than was asked for.

    Args:
        model: dense.
        compression: with `keep`; `length` is the typical length.
        texts: calibration data that are no random tokens: their mean length is the typical one where `length` is not
            given; without, it is 128 tokens.

    Returns:
        The compression with widths and form in place of the share, and a sentence that says what was chosen and why.

    Raises:
        CompressionError: the share is too small for one channel a head.
        UnsupportedModelError: a module cannot be converted.
    """
    keep = compression.keep
    if keep is None:
        return compression, ""
    where = (model, FAMILIES, compression.modules, compression.kinds)
    rotary = next((site for site in find_dense_attention(*where) if site.family.rotary), None)
    if rotary is not None:
        raise CompressionError(
            f"keep chooses widths of single channels a head; those of {rotary.family.name} come in whole heads of "
            f"{rotary.head_width}, so pass dk and dv"
        )
    sites = list(zip(find_dense_attention(*where), find_dense_values(*where), strict=True))
    length = compression.length or _mean_length(texts) or TYPICAL
    dense = sum(dense_macs(site.key.in_features, site.width, site.key_value_width, length) for site, _ in sites)
    for form in get_args(Form):
        dk, dv, kept = _widest(sites, form, keep)
        macs = sum(_scores(site, form, dk).macs(site.key.in_features, length) for site, _ in sites)
        if macs < dense:
            break
    reason = f"per head, for at {length} tokens shared scores would take more operations than dense ones"
    solver: dict[str, Any] = {"solver": "als", "sweeps": None, "tolerance": None, "effort": "best"}  # closed form
    if form == "shared":
        reason = f"shared, for at {length} tokens scores take {macs / dense:.0%} of the dense ones' operations"
        solver = {}
    why = f"Kept {kept:.0%} of the attention's parameters: dk {dk} and dv {dv}, {reason}."
    return replace(compression, keep=None, dk=dk, dv=dv, form=form, **solver), why


def _widest(sites: Sequence[tuple[DenseSite, ValueSite]], form: Form, keep: float) -> tuple[int, int, float]:
    """Find the largest widths that keep no more than a share of the parameters: dk, dv, and the share they keep."""
    heads, room = sites[0][0].heads, min(site.head_width for site, _ in sites)
    before = sum(_parameters(site, values, None, site.width, values.width) for site, values in sites)
    scores_share, values_share = SPLIT[form]
    for channels in range(room, 0, -1):
        dv = heads * channels
        dk = heads * min(room, max(1, round(channels * scores_share / values_share)))
        kept = sum(_parameters(site, values, form, dk, dv) for site, values in sites) / before
        if kept <= keep:
            return dk, dv, kept
    raise CompressionError(f"keep is {keep}, and one channel a head keeps {kept:.2f} already; pass more")


def _parameters(site: DenseSite, values: ValueSite, form: Form | None, dk: int, dv: int) -> int:
    """Count parameters of a module's four projections, as they are where no form is given."""
    width = site.key.in_features
    bias = values.value.bias is not None
    narrow = NarrowValues.of(site, dv, bias).parameters(width)
    if form is None:
        return dense_parameters(width, site.width, site.key_value_width, site.query.bias is not None) + narrow
    return _scores(site, form, dk).parameters(width) + narrow


def _scores(site: DenseSite, form: Form, dk: int) -> ScoreForm:
    return FORMS[form].of(site, dk, content_bias=site.query.bias is not None)


def _mean_length(batches: Sequence[Batch]) -> int | None:
    """Mean number of real tokens, or None without any."""
    masks = [batch["attention_mask"] for batch in batches if isinstance(batch.get("attention_mask"), Tensor)]
    sequences = sum(len(mask) for mask in masks)
    return round(sum(float(mask.sum()) for mask in masks) / sequences) if sequences else None
