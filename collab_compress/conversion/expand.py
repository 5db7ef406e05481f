"""Describe converted models, read their factors, make them dense again: expanded, or with narrower stock heads."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    ValueParts,
    uninstall_,
)
from collab_compress.attention.install import FORMS_AT
from collab_compress.attention.values import output_dim
from collab_compress.checkpoint import all_or_nothing, edits_of, forget_edits_
from collab_compress.devices import float64_device
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
        scores: Any = getattr(module, ScoreForm.at, None)
        values: Any = getattr(module, NarrowValues.at, None)
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
        query (D, R), mixing (H, R), key (D, R), content_bias (H, D) or None, in the memory of the parameters. Modules
        in the rotary form have no factors.

    Raises:
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
        CheckpointError: the model was loaded before this package was imported.
    """
    model = transformers_model(model)
    edits_of(model)  # refuses a model that was loaded without this package
    factors = {}
    for name, module in model.named_modules():
        form: Any = getattr(module, ScoreForm.at, None)
        if form is not None and not isinstance(form, RotaryScores):
            factors[name] = Factors(*form.read(name, module))
    return factors


@dataclass(frozen=True)
class Expansion:
    """Report of `expand`.

    Args:
        errors: module path → relative error of the dense scores over all heads,
            ‖[T̂_i; v_iᵀ] − [Wq_i; bq_iᵀ]·Wk_iᵀ‖/‖[T̂_i; v_iᵀ]‖; rounding alone if every head's rank is at most d.
    """

    errors: dict[str, float]

    @property
    def exact(self) -> bool:
        """Whether the dense model computes the same, up to rounding."""
        return max(self.errors.values(), default=0.0) < 1e-5


@torch.inference_mode(False)
def expand(model: PreTrainedModel) -> Expansion:
    """Turn collaborative attention back into dense attention heads, in place and all or nothing.

    Each head's (D+1)×D matrix [T̂_i; v_iᵀ] of context and content is factored at width d by truncated singular value
    decomposition. That is exact if its rank is at most d (always after a conversion at dk = H·d), else the best
    possible. Narrow values are padded by zeros, which is exact.

    Args:
        model: a converted model.

    Returns:
        The error of each module. Without other edits the model is stock again, and saves as such.

    Raises:
        CompressionError: nothing is converted, the model is sharded, weights are not finite, or there are content
            biases where the stock queries have no bias.
        UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
    """
    model = transformers_model(model)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        return _expand(model, None)


@torch.inference_mode(False)
def to_stock(model: PreTrainedModel) -> PreTrainedModel:
    """Make a stock model with narrower heads that computes what a converted one does, and loads without this package.

    Its config has the narrower width (`d_kv` of T5, `head_dim` of ViT), which is what the widest head needs, its
    content bias included.

    Args:
        model: both maps of all attention modules converted, queries and keys in the per-head form; best with
            `equal_heads`, so that no head is wider than the others.

    Returns:
        A new model on the same device, in the same dtype.

    Raises:
        CompressionError: the family's config has no head width; a module is not converted, or heads share channels;
            the model has other edits; heads would not be narrower.
    """
    model = transformers_model(model)
    refuse_stock(model)
    sites = find_attention(model)
    width = max(_needed_width(site) for site in sites)
    if width >= sites[0].head_width:
        raise CompressionError(
            f"heads of {type(model).__name__} would be {width} wide, as the stock model's are {sites[0].head_width}; "
            "pass a smaller dk and dv, or expand the model"
        )
    expanded = copy.deepcopy(model)
    scaling = [site.scaling for site in sites]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):  # new layers draw weights
        _expand(expanded, width)
        if edits_of(expanded):
            kinds = " and ".join(edit.kind for edit in edits_of(expanded))
            raise CompressionError(f"a stock model has no room for {kinds}; merge the alphas, or leave all heads in")
        config = copy.deepcopy(expanded.config)
        setattr(config, sites[0].family.free_width, width)
        stock: PreTrainedModel = type(model)(config).to(model.device, model.dtype)
    stock.load_state_dict(expanded.state_dict())
    for name, parameter in expanded.named_parameters():
        stock.get_parameter(name).requires_grad_(parameter.requires_grad)
    with torch.no_grad():
        for site, old in zip(find_attention(stock), scaling, strict=True):
            query = site.part(site.family.query)
            for parameter in (query.weight, query.bias):
                if parameter is not None:
                    parameter.mul_(old / site.scaling)
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.train(model.training)


def refuse_stock(model: PreTrainedModel) -> None:
    """Raise if no stock model can be made of this model, converted or not.

    Raises:
        CompressionError: the family's config has no head width, or heads have a rotary embedding.
    """
    family = FAMILIES.get(model.config.model_type)
    advice = (
        "narrow its feed-forward blocks alone (dff), which gives a stock model, or save it with its code for people "
        "without this package (standalone), or expand it"
    )
    if family is not None and family.rotary:
        raise CompressionError(
            f"heads of {type(model).__name__} are rotated by a rotary embedding, so there are no narrower ones; "
            + advice
        )
    if family is None or not family.free_width:
        names = ", ".join(sorted(other.name for other in FAMILIES.values() if other.free_width))
        raise CompressionError(
            f"the head width of a stock {type(model).__name__} is its hidden size divided by the number of heads, so "
            f"heads cannot be narrower ({names} have a width of their own); {advice}"
        )


def _needed_width(site: AttentionSite) -> int:
    scores, values = (getattr(site.module, at, None) for at in FORMS_AT)
    if scores is None or values is None or scores.head_sizes is None:
        raise CompressionError(
            f"{site.name}: a stock model needs queries, keys and values of all modules narrower, no channels shared; "
            "convert with dk, dv, form='per-head' and equal_heads=True"
        )
    return int(max(max(scores.head_sizes) + scores.content_bias, *values.sizes))


def _expand(model: PreTrainedModel, head_width: int | None) -> Expansion:
    """Expand a converted model in place, to heads of the model's own width or of another."""
    edits_of(model)  # refuses a model that was loaded without this package
    refuse_unwritable(model, "expand", CompressionError)
    dense_parts: list[tuple[Any, str, Any]] = []
    errors = {}
    for site in find_attention(model):
        name, module = site.name, site.module
        scores, values = (getattr(module, at, None) for at in FORMS_AT)
        if scores is not None:
            _refuse_hooks(site, scores.query, scores.key)
            _refuse_content_bias(model, site, scores)
            try:
                if isinstance(scores, RotaryScores):
                    query, key, errors[name] = _dense_rotary(name, module)
                else:
                    query, key, errors[name] = _dense_projections(site, scores, head_width)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise CompressionError(f"{name}: {error} Look for NaN in its weights") from error
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
    return Expansion(errors)


def _refuse_hooks(site: AttentionSite, *paths: str) -> None:
    for path in paths:
        for part, layer in site.module.get_submodule(path).named_modules(prefix=f"{site.name}.{path}"):
            refuse_hooks(part, layer)


def _refuse_content_bias(model: PreTrainedModel, site: AttentionSite, form: ScoreForm) -> None:
    """Refuse content biases where stock queries have no bias: a reloaded model would lack them."""
    if not form.content_bias:
        return
    value = site.part(site.family.value)
    if getattr(value, "proj", value).bias is None:  # queries have one exactly where values have
        raise CompressionError(
            f"{site.name} has content biases, which centre=True made, and queries of a stock "
            f"{type(model).__name__} have no bias to hold them; keep the model converted, or convert with "
            "centre=False and expand that"
        )


def _dense_values(site: AttentionSite, form: NarrowValues, output: Any, head_width: int | None) -> ValueParts:
    form = form if head_width is None else replace(form, head_width=head_width)
    value, bias, weight = form.read(site.name, site.module, output)
    dense_bias = None if bias is None else form.widened(bias, 0, form.sizes)
    dense = _linear(form.widened(value, 1, form.sizes), dense_bias, site.part(form.value).proj.weight)
    wide = form.widened(weight, 0, form.output_sizes)  # (H·d, D)
    output_weight = nn.Parameter(wide.T.contiguous() if output_dim(output) else wide, output.weight.requires_grad)
    return ValueParts(dense, output, output_weight, output.bias)


def _dense_projections(site: AttentionSite, form: Any, head_width: int | None) -> tuple[nn.Linear, nn.Linear, float]:
    """Return dense query and key projections of a collaborative module, and their relative error."""
    module: Any = site.module
    width = form.head_width if head_width is None else head_width
    *factors, bias = form.read(site.name, module)
    place = float64_device(factors[0].device)
    query, mixing, key = (factor.to(place).double() for factor in factors)
    content = None if bias is None else bias.to(place).double()
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
    dense_key = _linear(torch.cat(key_weights, 1), torch.zeros(form.heads * width) if has_key_bias else None, like)
    return dense_query, dense_key, (lost / total) ** 0.5 if total else 0.0


def _head_matrix(context: Tensor, key: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return [T̂_i; v_iᵀ] as a product: left (D+1, R+1) times right (D, R+1) transposed."""
    if content is None:
        return context, key
    left = nn.functional.pad(context, (0, 1, 0, 1))
    left[-1, -1] = 1.0
    return left, torch.cat([key, content[:, None]], 1)


def _dense_rotary(name: str, module: Any) -> tuple[nn.Linear, nn.Linear, float]:
    """Return dense query and key projections of shared rotary heads, and their relative error."""
    form: RotaryScores = module.score_form
    query, mixing, key = form.read_channels(name, module)  # (D, R/2), (G, R/2), (D, R/2)
    if form.grouped:  # mixed keys are keys of the group
        frequencies = torch.tensor(form.frequencies, device=key.device)
        keys = [key.new_zeros(len(key), form.head_width // 2) for _ in mixing]
        for summed, row in zip(keys, mixing, strict=True):
            summed.index_add_(1, frequencies, key * row.conj())
        sides, error = (query, torch.cat(keys, 1)), 0.0
    else:
        sides, error = _nearest_rotary_heads(form, query, mixing, key)
    projections = []
    for path, channels, biased in zip((form.query, form.key), sides, (form.query_bias, form.key_bias), strict=True):
        weight = form.to_heads(channels.real, channels.imag)  # (D, H·d), or (D + 1, H·d) with a bias
        bias = weight[-1] if biased else None
        like = module.get_submodule(path).proj.weight
        projections.append(_linear(weight[:-1] if biased else weight, bias, like))
    return projections[0], projections[1], error


def _nearest_rotary_heads(
    form: RotaryScores, query: Tensor, mixing: Tensor, key: Tensor
) -> tuple[tuple[Tensor, Tensor], float]:
    """Return complex queries and keys (D, H·d/2) with one channel for each head and frequency, and their error.

    A frequency of a head gets the nearest matrix of rank one. Channels without rotation are real, and any of them may
    be shared with any other.
    """
    pairs, rotated = form.head_width // 2, form.rotated // 2
    left, right = query.new_zeros(len(query), form.heads * pairs), key.new_zeros(len(key), form.heads * pairs)
    lost = total = 0.0
    still = [channel for channel, frequency in enumerate(form.frequencies) if frequency >= rotated]
    for head, row in enumerate(mixing):
        if still:
            u, s, v = _svd(
                torch.cat([query.real[:, still] * row.real[still], query.imag[:, still] * row.imag[still]], 1),
                torch.cat([key.real[:, still], key.imag[:, still]], 1),
            )
            count = pairs - rotated
            rank, columns = min(2 * count, len(s)), slice(head * pairs + rotated, (head + 1) * pairs)
            for side, vectors in ((left, u), (right, v)):
                padded = vectors.new_zeros(len(side), 2 * count)
                padded[:, :rank] = vectors[:, :rank] * s[:rank].sqrt()
                side[:, columns] = torch.complex(padded[:, :count], padded[:, count:])
            lost, total = lost + float(s[rank:].square().sum()), total + float(s.square().sum())
        for frequency in range(rotated):
            channels = [channel for channel, other in enumerate(form.frequencies) if other == frequency]
            if channels:
                u, s, v = _svd(query[:, channels] * row[channels], key[:, channels])
                column, root = head * pairs + frequency, s[0].sqrt()
                left[:, column], right[:, column] = u[:, 0] * root, v[:, 0] * root
                lost, total = lost + float(s[1:].square().sum()), total + float(s.square().sum())
    return (left, right), (lost / total) ** 0.5 if total else 0.0


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
