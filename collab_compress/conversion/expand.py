"""From converted back to dense: read a converted model's factors, and expand them into stock projections."""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionFamily, refuse_hooks, transformers_model
from collab_compress.attention import (
    FORM_KINDS,
    DenseValues,
    NarrowValues,
    RotaryScores,
    ScoreForm,
    is_converted,
    uninstall_,
)
from collab_compress.attention.values import output_dim
from collab_compress.checkpoint import edits_of, forget_edits_, forget_standalone_
from collab_compress.errors import CompressionError
from collab_compress.factorization import Factors
from collab_compress.heads.sharding import refuse_sharded


def read_factors(model: PreTrainedModel) -> dict[str, Factors]:
    """Read the factors of every collaborative attention module.

    Args:
        model: a converted model.

    Returns:
        Module path → factors: query (D, R), mixing (H, R), key (D, R), content_bias (H, D) or None. The tensors
        share memory with the parameters; empty for a stock model. Modules in the rotary form have none.

    Raises:
        UnsupportedModelError: a projection carries an adapter, is quantized or offloaded.
        CheckpointError: the model was loaded before this package was imported.
    """
    model = transformers_model(model)
    edits_of(model)  # refuses a model whose modules are not this package's
    factors = {}
    for name, module in model.named_modules():
        form: Any = getattr(module, "score_form", None)
        if form is not None and not isinstance(form, RotaryScores):
            factors[name] = Factors(*form.read(name, module))
    return factors


@dataclass(frozen=True)
class Expansion:
    """Report of `expand`.

    Args:
        errors: module path → relative error of the dense form, ‖[T̂_i; v_iᵀ] − [Wq_i; bq_iᵀ]·Wk_iᵀ‖/‖[T̂_i; v_iᵀ]‖
            over all heads, where queries and keys were converted; at the level of rounding where every head's rank is
            at most d.
    """

    errors: dict[str, float]

    @property
    def exact(self) -> bool:
        """Whether the dense model computes the same, up to rounding."""
        return max(self.errors.values(), default=0.0) < 1e-5


@torch.inference_mode(False)
def expand(model: PreTrainedModel) -> Expansion:
    """Turn collaborative attention back into dense per-head attention, in place and all or nothing.

    The content bias is part of the scores, so each head's context and content are factored together: the
    (D+1)×D matrix [T̂_i; v_iᵀ] at width d, by truncated singular value decomposition. That is exact where its
    rank is at most d (always after a conversion at dk = H·d), else the best possible; the error says which. Narrow
    values fit into dense ones as they are.

    Args:
        model: a converted model.

    Returns:
        The error of each module. Without other edits the model is a stock one afterwards and saves as such.

    Raises:
        CompressionError: the model holds no collaborative attention, is sharded, has weights that are not finite, or
            content biases that its stock form has no query biases for.
        UnsupportedModelError: a projection carries an adapter, is quantized or offloaded.
    """
    model = transformers_model(model)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        return expand_to_(model, None)


def expand_to_(model: PreTrainedModel, head_width: int | None) -> Expansion:
    """Expand a converted model to dense heads of any width, in place; `expand` uses the width d of the stock model.

    Args:
        model: a converted model.
        head_width: width of a head, of which the stock model may know nothing; None for its own.
    """
    edits_of(model)  # refuses a model whose modules are not this package's
    refuse_sharded(model, "expand", CompressionError)
    sites = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    if not sites:
        raise CompressionError(f"{type(model).__name__} has no converted attention to expand")
    planned: list[tuple[Any, str, Any]] = []
    errors = {}
    for name, module in sites:
        _refuse_hooks(model, name, module)
        if hasattr(module, ScoreForm.at):
            _refuse_bias_without_place(model, name, module)
            turned = isinstance(module.score_form, RotaryScores)
            try:
                made = _dense_rotary(name, module) if turned else _dense_projections(model, name, module, head_width)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise CompressionError(f"{name}: {error} Look for NaN in its weights") from error
            query, key, errors[name] = made
            planned.append((module, ScoreForm.at, (query, key)))
        if hasattr(module, NarrowValues.at):
            parent = model.get_submodule(name.rpartition(".")[0])
            planned.append((module, NarrowValues.at, _dense_values(name, module, parent, head_width)))
    for module, at, dense in planned:
        uninstall_(module, at, dense)
    for kind in FORM_KINDS:
        forget_edits_(model, kind)
    if not edits_of(model):
        forget_standalone_(model)
    return Expansion(errors)


def _refuse_hooks(model: PreTrainedModel, name: str, module: Any) -> None:
    """Refuse hooks on projections that go, or whose inputs become others.

    Raises:
        UnsupportedModelError: there are some.
    """
    paths = []
    if hasattr(module, ScoreForm.at):
        paths += [module.score_form.query, module.score_form.key]
    if hasattr(module, NarrowValues.at):
        paths.append(module.value_form.value)
        parent = model.get_submodule(name.rpartition(".")[0])
        refuse_hooks(f"{name}: its output projection", module.value_form.output_of(module, parent), stays=True)
    for path in paths:
        for part, layer in module.get_submodule(path).named_modules(prefix=f"{name}.{path}"):
            refuse_hooks(part, layer)


def _dense_values(name: str, module: Any, parent: Any, head_width: int | None) -> DenseValues:
    """Fill the values and the output projection of a module up to their dense width, by zeros: exact."""
    form: NarrowValues = module.value_form
    form = form if head_width is None else replace(form, head_width=head_width)
    output = form.output_of(module, parent)
    value, bias, weight = form.read(name, module, output)
    own = None if bias is None else form.widened(bias, 0, form.sizes)
    dense = _linear(form.widened(value, 1, form.sizes), own, module.get_submodule(form.value).proj.weight)
    wide = form.widened(weight, 0, form.output_sizes)  # (H·d, D)
    made = nn.Parameter(wide.T.contiguous() if output_dim(output) else wide, output.weight.requires_grad)
    return DenseValues(dense, output, made, output.bias)


def _refuse_bias_without_place(model: PreTrainedModel, name: str, module: Any) -> None:
    """Refuse content biases where stock queries have no bias: a reloaded model would lack what they become.

    Raises:
        CompressionError: there are some.
    """
    form: ScoreForm = module.score_form
    family = _family(model, module)
    if not form.content_bias or family is None:
        return
    try:
        value = attrgetter(family.value)(module)
    except AttributeError:
        return
    if getattr(value, "proj", value).bias is None:  # queries have one exactly where values have
        raise CompressionError(
            f"{name} has content biases, which centre=True made, and queries of a stock {type(model).__name__} have "
            "no bias to hold them; keep the model converted, or convert with centre=False and expand that"
        )


def _family(model: PreTrainedModel, module: Any) -> AttentionFamily | None:
    """Return the family of a module by its own config, which may be that of a part of the model."""
    return FAMILIES.get(getattr(module, "config", model.config).model_type)


def _dense_projections(
    model: PreTrainedModel, name: str, module: Any, head_width: int | None
) -> tuple[nn.Linear, nn.Linear, float]:
    """Build dense query and key projections for a collaborative module, and their relative error."""
    form: ScoreForm = module.score_form
    room = form.head_width if head_width is None else head_width
    *factors, bias = form.read(name, module)
    query, mixing, key = (part.double() for part in factors)
    content = None if bias is None else bias.double()
    if form.scale is not None:
        mixing = mixing * (form.scale / module.stock_scaling)
        content = None if content is None else content * (form.scale / module.stock_scaling)
    wq, bq, wk = [], [], []
    lost = total = 0.0
    for head in range(form.heads):
        left, right = _joined(query * mixing[head], key, None if content is None else content[head])
        u, s, v = _truncated(left, right)
        width = min(room, len(s))
        lost, total = lost + float(s[width:].square().sum()), total + float(s.square().sum())
        root = s[:width].sqrt()
        pad = (0, room - width)
        tall = nn.functional.pad(u[:, :width] * root, pad)  # (D+1, d)
        wk.append(nn.functional.pad(v[:, :width] * root, pad))  # (D, d)
        wq.append(tall[: len(query)])
        bq.append(tall[len(query)] if content is not None else tall.new_zeros(room))
    like = module.get_submodule(form.query).proj.weight
    dense_query = _linear(torch.cat(wq, 1), torch.cat(bq) if content is not None else None, like)
    family = _family(model, module)
    biased = content is not None and (family is None or family.key_bias)
    zero = torch.zeros(form.heads * room) if biased else None
    dense_key = _linear(torch.cat(wk, 1), zero, like)
    return dense_query, dense_key, (lost / total) ** 0.5 if total else 0.0


def _dense_rotary(name: str, module: Any) -> tuple[nn.Linear, nn.Linear, float]:
    """Build dense projections for shared rotary heads: of each head and frequency the nearest slice of rank one."""
    form: RotaryScores = module.score_form
    query, mixing, key = form.read_channels(name, module)  # (D, R/2), (G, R/2), (D, R/2)
    places = form.head_width // 2
    if form.grouped:  # mixed keys are keys of the group
        mixed = [_by_frequency(form, key * row.conj()) for row in mixing]
        sides, error = (query, torch.cat(mixed, 1)), 0.0
    else:
        left, right = query.new_zeros(len(query), form.heads * places), key.new_zeros(len(key), form.heads * places)
        lost = total = 0.0
        rotated = form.rotated // 2
        still = [place for place, frequency in enumerate(form.frequencies) if frequency >= rotated]
        for head, row in enumerate(mixing):
            if still:  # real channels, any of which may be shared with any
                u, s, v = _truncated(
                    torch.cat([query.real[:, still] * row.real[still], query.imag[:, still] * row.imag[still]], 1),
                    torch.cat([key.real[:, still], key.imag[:, still]], 1),
                )
                count = places - rotated
                kept, columns = min(2 * count, len(s)), slice(head * places + rotated, (head + 1) * places)
                for side, vectors in ((left, u), (right, v)):
                    filled = vectors.new_zeros(len(side), 2 * count)
                    filled[:, :kept] = vectors[:, :kept] * s[:kept].sqrt()
                    side[:, columns] = torch.complex(filled[:, :count], filled[:, count:])
                lost, total = lost + float(s[kept:].square().sum()), total + float(s.square().sum())
            for frequency in range(rotated):
                own = [place for place, each in enumerate(form.frequencies) if each == frequency]
                if not own:
                    continue
                u, s, v = _truncated(query[:, own] * row[own], key[:, own])
                column, root = head * places + frequency, s[0].sqrt()
                left[:, column], right[:, column] = u[:, 0] * root, v[:, 0] * root
                lost, total = lost + float(s[1:].square().sum()), total + float(s.square().sum())
        sides, error = (left, right), (lost / total) ** 0.5 if total else 0.0
    built = []
    for path, channels, biased in zip((form.query, form.key), sides, (form.query_bias, form.key_bias), strict=True):
        rows = form.to_heads(channels.real, channels.imag)  # (D, H·d)
        bias = rows[-1] if biased else None
        built.append(_linear(rows[:-1] if biased else rows, bias, module.get_submodule(path).proj.weight))
    return built[0], built[1], error


def _by_frequency(form: RotaryScores, channels: Tensor) -> Tensor:
    """Add up the channels (D, R/2) of each frequency, (D, d/2)."""
    sums = channels.new_zeros(len(channels), form.head_width // 2)
    return sums.index_add(1, torch.tensor(form.frequencies, device=channels.device), channels)


def _joined(context: Tensor, key: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write [T̂_i; v_iᵀ] as a product: left (D+1, R+1) times right (D, R+1) transposed."""
    if content is None:
        return context, key
    left = nn.functional.pad(context, (0, 1, 0, 1))
    left[-1, -1] = 1.0
    return left, torch.cat([key, content[:, None]], 1)


def _truncated(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition of left · right* without forming it."""
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(left_core @ right_core.mH)
    return left_basis @ u[:, : len(s)], s, right_basis @ vh[: len(s)].mH


def _linear(weight: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """Make an `nn.Linear` of mathematical weight (D, H·d), on the device and in the dtype of `like`."""
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias is not None, device=like.device, dtype=like.dtype)
    linear.requires_grad_(like.requires_grad)
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
