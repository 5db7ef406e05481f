"""Describe converted models, read their factors, make them dense again: expanded, or with narrower stock heads."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import (
    FAMILIES,
    AttentionSite,
    find_attention,
    refuse_hooks,
    transformers_model,
)
from collab_compress.attention import (
    FORM_KINDS,
    NarrowValues,
    RotaryScores,
    ScoreForm,
    SharedScores,
    ValueParts,
    uninstall_,
)
from collab_compress.attention.form import plain_weight
from collab_compress.attention.install import forms_of
from collab_compress.attention.values import output_dim
from collab_compress.checkpoint import all_or_nothing, edits_of, forget_edits_
from collab_compress.devices import float64_device
from collab_compress.errors import CompressionError
from collab_compress.factorization import Factors
from collab_compress.heads.sharding import refuse_unwritable

EXACT = 1e-5  # largest relative error of scores that is rounding


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
        scores, values = forms_of(module)
        words = [] if scores is None else [f"{scores.title}, dk={scores.rank}"]
        words += [] if values is None else [f"{values.title}, dv={values.dv}"]
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
        query (D, R), mixing (H, R), key (D, R), content_bias (H, D) or None; all but `mixing`, which is zero where a
        head does not read a channel, in the memory of the parameters. Modules in the rotary form have no factors.

    Raises:
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
        CheckpointError: the model was loaded before this package was imported.
    """
    model = transformers_model(model)
    edits_of(model)  # refuses a model that was loaded without this package
    factors = {}
    for name, module in model.named_modules():
        form, _ = forms_of(module)
        if isinstance(form, SharedScores):
            factors[name] = Factors(*form.read(name, module))
    return factors


@torch.inference_mode(False)
def expand(model: PreTrainedModel) -> None:
    """Turn converted attention back into dense heads that compute the same, in place and all or nothing.

    Each head's (D+1)×D matrix [T̂_i; v_iᵀ] of context and content is factored at width d by truncated singular value
    decomposition, which is exact if its rank is at most d: where a head reads no more than d shared channels, its
    content bias included, as by default. Narrow values are padded by zeros.

    Args:
        model: a converted model.

    Without other edits the model is stock again, and saves as such.

    Raises:
        CompressionError: nothing is converted, the model is sharded, weights are not finite, heads are wider than
            dense ones, or there are content biases where the stock queries have no bias.
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
    """
    model = transformers_model(model)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
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
    width = max(_needed_width(site) for site in sites)
    if width >= sites[0].head_width:
        raise CompressionError(
            f"heads of {type(model).__name__} would be {width} wide, as the stock model's are {sites[0].head_width}; "
            "pass a smaller head_dim and dv, or expand the model"
        )
    expanded = copy.deepcopy(model)
    scaling = [site.scaling for site in sites]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):  # new layers draw weights
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


def _needed_width(site: AttentionSite) -> int:
    scores, values = forms_of(site.module)
    if scores is None or values is None:
        raise CompressionError(
            f"{site.name}: a stock model needs queries, keys and values of all modules narrower; convert with dk, "
            "head_dim and dv"
        )
    return int(max(scores.width, values.size))


def _expand(model: PreTrainedModel, head_width: int | None) -> None:
    """Expand a converted model in place, to heads of the model's own width or of another."""
    edits_of(model)  # refuses a model that was loaded without this package
    refuse_unwritable(model, "expand", CompressionError)
    dense_parts: list[tuple[Any, str, Any]] = []
    for site in find_attention(model):
        name, module = site.name, site.module
        scores, values = forms_of(module)
        if scores is not None:
            _refuse_hooks(site, scores.query, scores.key)
            try:
                error = 0.0
                if isinstance(scores, SharedScores):
                    query, key, error = _dense_projections(site, scores, head_width)
                else:
                    query, key = _dense_rotary(name, module)
            except torch.linalg.LinAlgError as failed:  # type: ignore[attr-defined]
                raise CompressionError(f"{name}: {failed} Look for NaN in its weights") from failed
            if error > EXACT:
                raise CompressionError(
                    f"{name}: its heads are wider than the {scores.head_width} channels of dense ones, which would "
                    f"move scores by {error:.1%}; keep the model converted, or convert the dense checkpoint with a "
                    "smaller head_dim"
                )
            dense_parts.append((module, ScoreForm.at, (query, key)))
        if values is not None:
            output = values.output_of(module, site.parent)
            refuse_hooks(f"{name}: its output projection", output, stays=True)
            _refuse_hooks(site, values.value)
            dense_parts.append((module, NarrowValues.at, _dense_values(site, values, output, head_width)))
    if not dense_parts:
        raise CompressionError(
            f"{type(model).__name__} has no converted attention to expand; removed neurons and refitted layers "
            "cannot be restored, so start from the dense checkpoint"
        )
    with all_or_nothing(model):
        for module, at, dense in dense_parts:
            uninstall_(module, at, dense)
        for kind in FORM_KINDS:
            forget_edits_(model, kind)


def _refuse_hooks(site: AttentionSite, *paths: str) -> None:
    for path in paths:
        for part, layer in site.module.get_submodule(path).named_modules(prefix=f"{site.name}.{path}"):
            refuse_hooks(part, layer)


def _dense_values(
    site: AttentionSite, form: NarrowValues, output: nn.Linear | Conv1D, head_width: int | None
) -> ValueParts:
    form = form if head_width is None else replace(form, head_width=head_width)
    value, bias, weight = form.read(site.name, site.module, output)
    dense_bias = None if bias is None else form.widened(bias)
    dense = _linear(form.widened(value), dense_bias, site.part(form.value).proj.weight)
    wide = form.widened(weight.T).T  # (H·d, D)
    output_weight = nn.Parameter(wide.T.contiguous() if output_dim(output) else wide, output.weight.requires_grad)
    return ValueParts(dense, output, output_weight, output.bias)


def _dense_projections(
    site: AttentionSite, form: SharedScores, head_width: int | None
) -> tuple[nn.Linear, nn.Linear, float]:
    """Return dense query and key projections of a collaborative module, and their relative error."""
    module: Any = site.module
    width = form.head_width if head_width is None else head_width
    *factors, bias = form.read(site.name, module)
    device = float64_device(factors[0].device)
    query, mixing, key = (factor.to(device).double() for factor in factors)
    content = None if bias is None else bias.to(device).double()
    if form.scale is not None:
        mixing = mixing * (form.scale / module.stock_scaling)
        content = None if content is None else content * (form.scale / module.stock_scaling)
    query_weights, query_biases, key_weights = [], [], []
    lost = total = 0.0
    for head in range(form.heads):
        u, s, v = _svd(*_head_matrix(query * mixing[head], key, None if content is None else content[head]))
        rank = min(width, len(s))
        lost, total = lost + float(s[rank:].square().sum()), total + float(s.square().sum())
        root = s[:rank].sqrt()
        left = nn.functional.pad(u[:, :rank] * root, (0, width - rank))  # (D+1, d), or (D, d) without content
        key_weights.append(nn.functional.pad(v[:, :rank] * root, (0, width - rank)))  # (D, d)
        query_weights.append(left[: len(query)])
        query_biases.append(left[len(query)] if content is not None else left.new_zeros(width))
    like = module.get_submodule(form.query).proj.weight
    dense_query = _linear(torch.cat(query_weights, 1), torch.cat(query_biases) if content is not None else None, like)
    has_key_bias = content is not None and site.family.key_bias
    dense_key = _linear(
        torch.cat(key_weights, 1), torch.zeros(form.heads * width, device="cpu") if has_key_bias else None, like
    )
    return dense_query, dense_key, (lost / total) ** 0.5 if total else 0.0


def _head_matrix(context: Tensor, key: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return [T̂_i; v_iᵀ] as a product: left (D+1, R+1) times right (D, R+1) transposed."""
    if content is None:
        return context, key
    left = nn.functional.pad(context, (0, 1, 0, 1))
    left[-1, -1] = 1.0
    return left, torch.cat([key, content[:, None]], 1)


def _dense_rotary(name: str, module: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the dense query and key projections of rotary heads that share keys."""
    form: RotaryScores = module.score_form
    query = module.get_submodule(form.query).proj
    plain_weight(f"{name}.{form.query}.proj", query)
    keys = form.read_keys(name, module)  # (G, D, d/2)
    weight, bias = form.key_rows(keys.transpose(0, 1).flatten(1))
    like = module.get_submodule(form.key).proj.weight
    return query, _linear(weight.T, bias, like)


def _svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition of left · right* without forming the product."""
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(left_core @ right_core.mH)
    return left_basis @ u[:, : len(s)], s, right_basis @ vh[: len(s)].mH


def _linear(weight: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """Return an `nn.Linear` with weight (D, H·d) transposed, on the device and in the dtype of `like`."""
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias is not None, device=like.device, dtype=like.dtype)
    linear.requires_grad_(like.requires_grad)
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
