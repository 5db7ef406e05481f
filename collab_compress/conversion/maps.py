"""Compute the replacement of an attention map, scores or values, and the weights of heads that it is solved with.

The model stays as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, DenseSite, ValueSite
from collab_compress.attention import MapForm, NarrowValues, RotaryScores, ScoreForm, SharedScores, ValueParts
from collab_compress.attention.install import HeadCall, for_each_head
from collab_compress.attention.projections import width_in
from collab_compress.attention.rotary import arranged
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sample_sequences
from collab_compress.calibration.gather import AttentionMasks, MaskKind, batch_masks, masks_of, resize_mask
from collab_compress.conversion.cost import attention_costs
from collab_compress.conversion.report import PartReport
from collab_compress.errors import CompressionError
from collab_compress.factorization import (
    Factorization,
    Moments,
    Narrowing,
    RotaryFactorization,
    factorize,
    factorize_rotary,
    narrow_values,
)
from collab_compress.heads.hooks import HeadHooks
from collab_compress.options import Compression

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with what is being done, as "fitting encoder.layer.0", how many layers are done, and how many there are, or
None."""


READING, RUNNING = "reading calibration data", "running the model on calibration data"


def silent(_: str, __: int, ___: int | None) -> None:
    """Report no progress."""


Site: TypeAlias = DenseSite | ValueSite
"""An attention module by one of its maps: scores or values."""

SiteMoments: TypeAlias = tuple[Moments, ...] | None

HEAD_WEIGHT_SEQUENCES = 128  # that head weights are measured on
LEAST_WEIGHT = 1e-3  # of the mean square of head weights: every head's scores count
MIN_VECTORS_PER_DIM = 4  # with fewer vectors for each dimension of the inputs, a covariance is mostly chance


@dataclass(frozen=True)
class Task:
    """A map to convert, and how."""

    site: Site
    compression: Compression

    @property
    def is_exact(self) -> bool:
        """Whether the map keeps its full width."""
        width = self.compression.dv if isinstance(self.site, ValueSite) else self.compression.dk
        return width is None or width >= self.site.key_value_width

    def form(self) -> ScoreForm | NarrowValues:
        """Return the form of the replacement."""
        site, compression = self.site, self.compression
        if isinstance(site, ValueSite):
            return NarrowValues.of(site, compression.dv or 0, site.value.bias is not None)
        dk = compression.dk or 0
        if site.family.rotary:
            return RotaryScores.of(site, dk)
        head_dim = dk if compression.solver.method == "parafac" else compression.head_dim
        return SharedScores.of(site, dk, head_dim, site.query.bias is not None)


@dataclass(frozen=True)
class Planned:
    """A map whose replacement is ready."""

    site: Site
    form: MapForm  # of the replacement
    parts: Any  # its parameters
    dense: Any  # what it replaces, as the form takes it to undo that
    report: PartReport


def replacement(task: Task, moments: SiteMoments, head_weights: Tensor | None, length: int) -> Planned:
    """Solve for the replacement of one map, and build it; without moments, all directions of inputs count alike."""
    site, started = task.site, perf_counter()
    form: MapForm
    result: Narrowing | Factorization | RotaryFactorization
    try:
        if isinstance(site, ValueSite):
            form, parts, result = _narrow(site, task.compression, moments)
            cost = attention_costs(site, length, values=form)[1]
        else:
            solve = _share_rotary if site.family.rotary else _share
            form, parts, result = solve(site, task.compression, moments, head_weights)
            cost = attention_costs(site, length, scores=form)[0]
    except (ValueError, ImportError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise CompressionError(f"{site.name}: {error}") from error
    solver: dict[str, Any] = {}
    if isinstance(result, Factorization):
        solver = {"sweeps": result.sweeps, "converged": result.converged, "breakdowns": result.breakdowns}
    report = PartReport(
        **vars(cost),
        weight_error=result.weight_error,
        data_error=result.data_error,
        head_dim=form.width if isinstance(form, ScoreForm) else None,
        seconds=perf_counter() - started,
        vectors=tuple(int(part.count) for part in moments) if moments else (0,) * len(site.inputs),
        **solver,
    )
    return Planned(site, form, parts, _dense(site), report)


Shared: TypeAlias = tuple[ScoreForm, Any, Factorization | RotaryFactorization]
"""Form, its parameters, and the solver's result."""


def _share(site: DenseSite, compression: Compression, moments: SiteMoments, head_weights: Tensor | None) -> Shared:
    """Factor the scores of one module."""
    assert compression.dk is not None
    query_moments, key_moments = moments or (None, None)
    form = Task(site, compression).form()
    assert isinstance(form, SharedScores)
    result = factorize(
        site.query_heads(),
        site.key_heads(),
        compression.dk,
        query_bias=site.query_bias(),
        query_moments=query_moments,
        key_moments=key_moments,
        head_weights=head_weights,
        reads=form.reads if form.reads < form.rank else None,
        solver=compression.solver,
    )
    parts = form.build(site.module, site.parent)
    factors = result.factors.to(dtype=parts.mixing.dtype)  # before they move: not every device has float64
    form.load_(parts, factors.query, factors.mixing, factors.key, factors.content_bias)
    return form, parts, result


def _share_rotary(
    site: DenseSite, compression: Compression, moments: SiteMoments, head_weights: Tensor | None
) -> Shared:
    """Share the keys of one module with a rotary embedding."""
    assert compression.dk is not None
    query_moments, key_moments = moments or (None, None)
    pairing = RotaryScores.of(site, compression.dk)
    result = factorize_rotary(
        pairing.channels_of(site.query_heads(), site.query.bias),
        pairing.channels_of(site.key_heads(), site.key.bias),
        pairing.rank // 2,
        query_moments=query_moments,
        key_moments=key_moments,
        head_weights=head_weights,
        rotated=site.rotated // 2,
        solver=compression.solver,
    )
    factors = result.factors
    order = arranged(factors.frequencies, site.head_width // 2)
    form = replace(pairing, frequencies=tuple(factors.frequencies[channel] for channel in order))
    parts = form.build(site.module, site.parent)
    form.load_channels_(parts, site.query, factors.mixing[:, order], factors.key[:, order])
    return form, parts, result


def _narrow(site: ValueSite, compression: Compression, moments: SiteMoments) -> tuple[NarrowValues, Any, Narrowing]:
    """Narrow the values of one module."""
    assert compression.dv is not None
    form = NarrowValues.of(site, compression.dv, site.value.bias is not None)
    result = narrow_values(
        site.value_heads(),
        site.output_heads(),
        form.size,
        moments[0] if moments else None,
        fold=site.output.bias is not None,
        damping=compression.solver.damping,
        device=compression.solver.device,
    )
    like = result.output
    values = [weight.to(like) @ kept for weight, kept in zip(site.value_heads(), result.heads, strict=True)]
    value_bias = output_bias = None
    biases = site.value_bias()
    if biases is not None:
        value_bias = torch.cat([bias.to(like) @ kept for bias, kept in zip(biases, result.heads, strict=True)])
    if site.output.bias is not None:
        output_bias = site.output.bias.detach().to(like)
        output_bias = output_bias if result.bias is None else output_bias + result.bias
    dtype = site.value.weight.dtype
    parts = form.build(site.module, site.parent)
    form.load_(  # in the model's dtype before they move: not every device has float64
        parts,
        torch.cat(values, 1).to(dtype),
        None if value_bias is None else value_bias.to(dtype),
        result.output.to(dtype),
        None if output_bias is None else output_bias.to(dtype),
    )
    return form, parts, result


def rounding(forms: Sequence[MapForm], dk: int | None, dv: int | None = None) -> list[str]:
    """Return warnings of a dk that rotary forms round, and of a dv that narrow values round."""
    rotary = [form for form in forms if isinstance(form, RotaryScores) and form.rank != dk]
    narrow = [form for form in forms if isinstance(form, NarrowValues) and form.dv != dv]
    return [
        f"dk {dk} was rounded up to {form.rank}: a rotary embedding rotates whole heads of {form.head_width} channels"
        for form in rotary[:1]
    ] + [
        f"dv {dv} was rounded to {form.dv}: its {form.value_heads} heads of values have {form.size} channels each"
        for form in narrow[:1]
    ]


def few_vectors(seen: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return a warning of modules, as (path, vectors, their width), that saw few vectors, or none."""
    few = [
        (vectors / width, vectors, width, name)
        for name, vectors, width in seen
        if 0 < vectors < MIN_VECTORS_PER_DIM * width
    ]
    if not few:
        return []
    _, vectors, width, name = min(few, key=lambda entry: entry[0])
    others = len({name for *_, name in few}) - 1
    more = f" and {others} more modules" if others else ""
    return [
        f"{name}{more} saw few calibration vectors: {vectors} of width {width}, where {MIN_VECTORS_PER_DIM} times "
        f"the width would be {MIN_VECTORS_PER_DIM * width}; pass more data, or more sequences of it"
    ]


def warnings_of(
    planned: Sequence[Planned], compression: Compression, others: Iterable[tuple[str, int, int]] = ()
) -> list[str]:
    """Return warnings of widths that were passed and rounded, of few vectors, and of solvers that broke down."""
    seen = list(others)
    for item in planned:
        for vectors, (projection, _) in zip(item.report.vectors, item.site.inputs, strict=True):
            seen.append((item.site.name, vectors, width_in(projection)))
    forms = [item.form for item in planned]
    warnings = [] if compression.keep is not None else rounding(forms, compression.dk, compression.dv)
    warnings += few_vectors(seen)
    for item in planned:
        if item.report.breakdowns:
            outcome = "it went on with a shifted one" if item.report.sweeps else "it kept its start"
            warnings.append(
                f"{item.site.name}: {item.report.breakdowns} sweeps of the solver met a singular system; {outcome}; "
                "look at the module's error, or raise the damping"
            )
    return warnings


def empty_plan(site: Site, form: MapForm, report: Any = None) -> Planned:
    """Return a replacement whose weights are not set yet."""
    return Planned(site, form, form.build(site.module, site.parent), _dense(site), report)


def _dense(site: Site) -> Any:
    """Return the dense parameters of a map, as its form restores them."""
    if isinstance(site, ValueSite):
        output: Any = site.output
        return ValueParts(site.value, output, output.weight, output.bias)
    return site.query, site.key


def head_weights(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Tensor | None]:
    r"""Return the weight w of each head's score errors, by their first-order effect on the residual stream.

    With attention probabilities $p_{ij}$, values $v_j$, head output $o_i = \sum_j p_{ij} v_j$ and the head's rows O
    of the output projection, errors $\delta s_{ij}$ of the scores change what the head adds by
    $\sum_j p_{ij} \delta s_{ij} (v_j - o_i) O$. Of independent errors with variance 1 the mean square is

    $$w^2 = E_i \sum_j p_{ij}^2 \|(v_j - o_i) O\|^2$$

    which is small for a head that attends to tokens without content, and large for one that picks few tokens and adds
    much. Weights (H,) are in float64 with mean square 1; None if no head adds anything.
    """
    if not sites or not batches:
        return {}
    with evaluation_mode(model), HeadWeights(sites) as watcher:
        for batch in sample_sequences(batches, HEAD_WEIGHT_SEQUENCES):
            watcher.masks = batch_masks(model, batch)
            run_batch(model, batch)
    return watcher.weights()


class HeadWeights(HeadHooks):
    """The weights of `head_weights`, summed while modules run inside a `with` block."""

    needs_probs = True
    masks: Mapping[MaskKind, AttentionMasks] = {}
    """Masks of the batch that runs next."""

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        self._tokens = {site.name: 0 for site in sites}
        self._squares = {site.name: torch.zeros(site.heads, dtype=torch.float64, device="cpu") for site in sites}
        self._add(sites)

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Add w² of one call of a module."""
        assert call.probs is not None
        values = for_each_head(call.value, site.heads)
        squares = _squares(call.probs, values, outputs.transpose(1, 2), _gram(site, values.shape[-1]))
        masks = masks_of(site, self.masks)
        for dim, mask in ((2, masks.query), (3, masks.key)):
            mask = resize_mask(mask, squares.shape[dim])
            if mask is not None and mask.shape == (squares.shape[0], squares.shape[dim]):
                squares = squares * mask.to(squares.device).unsqueeze(1).unsqueeze(5 - dim)
        self._squares[site.name] += squares.sum((0, 2, 3)).cpu().double()
        mask = resize_mask(masks.query, outputs.shape[1])
        self._tokens[site.name] += outputs.shape[0] * outputs.shape[1] if mask is None else int(mask.sum())
        return outputs

    def mean_squares(self) -> dict[str, float]:
        """Return the mean of w² over the heads of each module, for one token."""
        return {name: float(squares.mean()) / max(1, self._tokens[name]) for name, squares in self._squares.items()}

    def weights(self) -> dict[str, Tensor | None]:
        """Return the weights by path of the module, as `head_weights`."""
        return {name: _normalise(squares) for name, squares in self._squares.items()}


def _gram(site: AttentionSite, width: int) -> Tensor | None:
    """Return O·Oᵀ of each head, (H, s, s); None if the output projection is no plain layer."""
    output = site.part(site.paths.output)
    if type(output) not in (nn.Linear, Conv1D):
        return None
    weight: Tensor = output.weight if isinstance(output, Conv1D) else output.weight.mT
    if len(weight) != site.heads * width:
        return None
    heads = weight.detach().reshape(site.heads, width, -1)
    return heads @ heads.mT


def _normalise(squares: Tensor) -> Tensor | None:
    """Return w (H,) with mean square 1 of sums of w²; None if no head adds anything."""
    mean = squares.mean()
    if not bool(torch.isfinite(mean)) or float(mean) <= 0:
        return None
    return (squares / mean + LEAST_WEIGHT).sqrt()


def _squares(probs: Tensor, values: Tensor, outputs: Tensor, gram: Tensor | None) -> Tensor:
    """Return p² ‖(v − o) O‖² of each query and key, (B, H, T, S); `gram` is O·Oᵀ (H, s, s), None for the identity."""
    probs, values, outputs = (
        probs.float(),
        values.float(),
        outputs.float(),
    )  # (B, H, T, S), (B, H, S, s), (B, H, T, s)
    projected = values if gram is None else values @ gram.float()
    distance = (projected * values).sum(-1).unsqueeze(2) - 2 * outputs @ projected.mT
    distance = distance + ((outputs if gram is None else outputs @ gram.float()) * outputs).sum(-1, keepdim=True)
    return probs.square() * distance.clamp_min(0)
