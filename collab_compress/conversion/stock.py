"""Plain models with narrower heads, for families whose config has room for them: no edit, no package to load them."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention, transformers_model
from collab_compress.attention.install import FORMS_AT
from collab_compress.checkpoint import edits_of
from collab_compress.conversion.expand import expand_to_
from collab_compress.errors import CompressionError


def to_stock(model: PreTrainedModel) -> PreTrainedModel:
    """Make a plain model that computes what a converted one does, all its heads narrower than those it came from.

    Its class is that of the stock model, and its config has the narrower width (`d_kv` of T5, `head_dim` of ViT): it
    loads without this package. The width is what the widest head needs, its content bias included.

    Args:
        model: both maps of all attention modules converted, queries and keys in the per-head form. Best with
            `equal_heads`: then no head is wider than the others.

    Returns:
        A new model, on the CPU or wherever `model` is, in its dtype.

    Raises:
        CompressionError: the family's config has no width of heads; a module is not converted, or heads share their
            channels; the model has other edits; no narrower heads would come of it.
    """
    model = transformers_model(model)
    refuse_stock(model)
    sites = find_attention(model, FAMILIES)
    width = max(_needs(site) for site in sites)
    if width >= sites[0].head_width:
        raise CompressionError(
            f"heads of {type(model).__name__} would be {width} wide, as the stock model's are {sites[0].head_width}; "
            "pass a smaller dk and dv, or expand the model"
        )
    expanded = copy.deepcopy(model)
    scaling = [site.scaling for site in sites]
    expand_to_(expanded, width)
    if edits_of(expanded):
        kinds = " and ".join(edit.kind for edit in edits_of(expanded))
        raise CompressionError(f"a stock model has no room for {kinds}; merge the alphas, or leave all heads in")
    config = copy.deepcopy(expanded.config)
    setattr(config, sites[0].family.free_width, width)
    stock: PreTrainedModel = type(model)(config).to(model.device, model.dtype)
    stock.load_state_dict(expanded.state_dict())
    with torch.no_grad():
        for site, old in zip(find_attention(stock, FAMILIES), scaling, strict=True):
            query = site.part(site.family.query)
            for parameter in (query.weight, query.bias):
                if parameter is not None:
                    parameter.mul_(old / site.scaling)
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.train(model.training)


def refuse_stock(model: PreTrainedModel) -> None:
    """Raise if no plain model can be made of this model, converted or not.

    Raises:
        CompressionError: the family's config has no width of heads, or a rotary embedding turns them.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is not None and family.rotary:
        raise CompressionError(
            f"heads of {type(model).__name__} are turned by a rotary embedding, so there are no narrower ones; "
            "narrow its feed-forward blocks alone (dff), which gives a stock model, or save it with its code for "
            "people without this package (standalone), or expand it"
        )
    if family is None or not family.free_width:
        have = ", ".join(sorted(each.name for each in FAMILIES.values() if each.free_width))
        raise CompressionError(
            f"a stock {type(model).__name__} has heads as wide as its width divided by their number, so it has no "
            f"room for narrower ones ({have} have); narrow its feed-forward blocks alone (dff), which gives a stock "
            "model, or save it with its code for people without this package (standalone), or expand it"
        )


def _needs(site: AttentionSite) -> int:
    """How wide the widest head of a module is."""
    module: Any = site.module
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    if scores is None or values is None or scores.head_sizes is None:
        raise CompressionError(
            f"{site.name}: a stock model needs queries, keys and values of all modules narrower, no channels shared; "
            "convert with dk, dv, form='per-head' and equal_heads=True"
        )
    return int(max(max(scores.head_sizes) + scores.content_bias, *values.sizes))
