"""Describe converted models, read their factors, make them dense again: expanded, or with narrower stock heads."""

import copy

import torch
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention, refuse_hooks, transformers_model
from collab_compress.attention import MAP_KINDS, SharedQK, maps_of, uninstall_
from collab_compress.attention.maps import Layers
from collab_compress.attention.projections import rows_of
from collab_compress.checkpoint import all_or_nothing, edits_of, forget_edits_
from collab_compress.devices import forked_rng
from collab_compress.errors import CompressionError
from collab_compress.factorization import Factors
from collab_compress.heads.sharding import refuse_unwritable


def describe(model: PreTrainedModel) -> dict[str, str]:
    """Return the forms and widths of each converted attention module by path; empty for a stock model.

    Narrower feed-forward blocks are not listed: their width is in the model's config, as in any model.

    Args:
        model: a Transformers model, or a SentenceTransformer that holds one.

    Raises:
        UnsupportedModelError: it is no Transformers model.
    """
    described = {}
    for name, module in transformers_model(model).named_modules():
        qk, ov = maps_of(module)
        words = [] if qk is None else [f"{qk.config.title}, dk={qk.config.rank}"]
        words += [] if ov is None else [f"{ov.config.title}, dv={ov.config.dv}"]
        if words:
            described[name] = "; ".join(words)
    return described


def is_converted(model: PreTrainedModel) -> bool:
    """Return whether any attention module of a model is converted; raises as `describe`."""
    return bool(describe(model))


def read_factors(model: PreTrainedModel) -> dict[str, Factors]:
    """Return the factors of every collaborative attention module by path; empty for a stock model.

    Args:
        model: a converted model.

    Returns:
        query (D, R), mixing (H, R), key (D, R), content_bias (H, D) or None; `query` and `key` are in the memory of
        the parameters, and `mixing` is zero where a head does not read a channel. Modules with a rotary embedding
        have no factors.

    Raises:
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
        CheckpointError: the model was loaded before this package was imported.
    """
    model = transformers_model(model)
    edits_of(model)  # refuses a model that was loaded without this package
    factors = {}
    for name, module in model.named_modules():
        qk, _ = maps_of(module)
        if isinstance(qk, SharedQK):
            factors[name] = qk.factors(name, module)
    return factors


@torch.inference_mode(False)
def expand(model: PreTrainedModel) -> None:
    """Turn converted attention back into dense heads that compute the same, in place and all or nothing.

    Each head's (D+1)×D matrix [T̂_i; v_iᵀ] of context and content is factored at width d by truncated singular value
    decomposition, which is exact if its rank is at most d: where a head reads no more than d shared channels, its
    content bias included, as by default. Narrow values are padded by zeros. Without other edits the model is stock
    again, and saves as such.

    Args:
        model: a converted model.

    Raises:
        CompressionError: nothing is converted, the model is sharded, weights are not finite, heads are wider than
            dense ones, or there are content biases where the stock queries have no bias.
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
    """
    model = transformers_model(model)
    with forked_rng(model.device):
        _expand(model, None)


@torch.inference_mode(False)
def to_stock(model: PreTrainedModel) -> PreTrainedModel:
    """Make a stock model with narrower heads that computes what a converted one does, and loads without this package.

    Its config has the narrower width (`d_kv` of T5, `head_dim` of ViT), which is what the widest head needs, its
    content bias included.

    Args:
        model: both maps of all attention modules converted.

    Returns:
        A new model on the same device, in the same dtype.

    Raises:
        CompressionError: the family's config has no head width; a module is not converted; the model has other
            edits; heads would not be narrower.
    """
    model = transformers_model(model)
    refuse_stock(model)
    sites = find_attention(model)
    width = 0
    for site in sites:
        qk, ov = maps_of(site.module)
        if qk is None or ov is None:
            raise CompressionError(
                f"{site.name}: a stock model needs queries, keys and values of all modules narrower; convert with "
                "dk, head_dim and dv"
            )
        width = max(width, qk.config.width, ov.config.size)
    if width >= sites[0].head_width:
        raise CompressionError(
            f"heads of {type(model).__name__} would be {width} wide, as the stock model's are {sites[0].head_width}; "
            "pass a smaller head_dim and dv, or expand the model"
        )
    expanded = copy.deepcopy(model)
    scaling = [site.scaling for site in sites]
    with forked_rng(model.device):  # new layers draw weights
        _expand(expanded, width)
        if edits_of(expanded):
            kinds = " and ".join(edit.kind for edit in edits_of(expanded))
            raise CompressionError(f"a stock model has no room for {kinds}; merge the alphas, or leave all heads in")
        config = copy.deepcopy(expanded.config)
        setattr(config, sites[0].paths.free_width, width)
        stock: PreTrainedModel = type(model)(config).to(model.device, model.dtype)
    frozen = [parameter for parameter in expanded.parameters() if not parameter.requires_grad]
    stock.load_state_dict(expanded.state_dict(keep_vars=True), assign=True)  # the same parameters, tied as they were
    for parameter in frozen:
        parameter.requires_grad_(False)
    with torch.no_grad():
        for site, old in zip(find_attention(stock), scaling, strict=True):
            query = site.part(site.paths.query)
            for parameter in (query.weight, query.bias):
                if parameter is not None:
                    parameter.mul_(old / site.scaling)
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.train(model.training)


def refuse_stock(model: PreTrainedModel) -> None:
    """Raise if no stock model can be made of this model, converted or not."""
    family = FAMILIES.get(model.config.model_type)
    advice = "narrow its feed-forward blocks alone (dff), which gives a stock model, or expand it"
    if family is not None and family.rotary:
        raise CompressionError(
            f"heads of {type(model).__name__} are rotated by a rotary embedding, so there are no narrower ones; "
            + advice
        )
    if family is None or not family.paths.free_width:
        names = ", ".join(sorted(other.name for other in FAMILIES.values() if other.paths.free_width))
        raise CompressionError(
            f"the head width of a stock {type(model).__name__} is its hidden size divided by the number of heads, so "
            f"heads cannot be narrower ({names} have a width of their own); {advice}"
        )


def _expand(model: PreTrainedModel, head_width: int | None) -> None:
    """Expand a converted model in place, to heads of the model's own width or of another."""
    edits_of(model)  # refuses a model that was loaded without this package
    refuse_unwritable(model, "expand", CompressionError)
    dense_parts: list[tuple[AttentionSite, str, Layers]] = []
    for site in find_attention(model):
        for converted in maps_of(site.module):
            if converted is None:
                continue
            for path in {rows.layer.removesuffix(".proj") for rows in rows_of(site.module).values()}:
                for name, layer in site.module.get_submodule(path).named_modules(prefix=f"{site.name}.{path}"):
                    refuse_hooks(name, layer)
            try:
                dense_parts.append((site, converted.at, converted.to_dense(site, head_width)))
            except torch.linalg.LinAlgError as failed:  # type: ignore[attr-defined]
                raise CompressionError(f"{site.name}: {failed} Look for NaN in its weights") from failed
    if not dense_parts:
        raise CompressionError(
            f"{type(model).__name__} has no converted attention to expand; removed neurons and refitted layers "
            "cannot be restored, so start from the dense checkpoint"
        )
    with all_or_nothing(model):
        for site, at, dense in dense_parts:
            uninstall_(site.module, at, dense, site.parent)
        for kind in MAP_KINDS:
            forget_edits_(model, kind)
