"""Compute the replacement of an attention map, scores or values, and the weights of heads that it is solved with.

The model stays as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, DenseSite, ValueSite
from collab_compress.architectures.sites import by_input
from collab_compress.attention import ConvertedMap, MapConfig, MapEdit, NarrowConfig, QKConfig, RotaryConfig
from collab_compress.attention.maps import Layers
from collab_compress.attention.run import HeadCall, for_each_head
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sample_sequences
from collab_compress.calibration.gather import AttentionMasks, MaskKind, batch_masks, masks_of, resize_mask
from collab_compress.checkpoint import path_in_base, record_edit_
from collab_compress.conversion.cost import attention_costs, configs_at, ov_config, qk_config
from collab_compress.conversion.report import PartReport
from collab_compress.errors import CompressionError
from collab_compress.factorization import Factorization, Moments
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


@dataclass(frozen=True)
class MapTask:
    """A map to convert, and how."""

    site: Site
    compression: Compression

    @property
    def is_exact(self) -> bool:
        """Whether the map keeps its full width."""
        width = self.compression.dv if isinstance(self.site, ValueSite) else self.compression.dk
        return width is None or width >= self.site.key_value_width

    def config(self) -> MapConfig:
        """Return the config of the replacement."""
        compression = self.compression
        if isinstance(self.site, ValueSite):
            return ov_config(self.site, compression.dv or 0)
        head_dim = compression.dk if compression.solver.method == "parafac" else compression.head_dim
        return qk_config(self.site, compression.dk or 0, head_dim)


@dataclass(frozen=True)
class Replacement:
    """A map whose replacement is ready."""

    site: Site
    map: ConvertedMap
    layers: Layers  # its projections
    report: PartReport


def replace_map(task: MapTask, moments: SiteMoments, head_weights: Tensor | None, length: int) -> Replacement:
    """Solve for the replacement of one map, and build it; without moments, all directions of inputs count alike."""
    site, config, started = task.site, task.config(), perf_counter()
    try:
        found, layers, result = config.module.from_dense(site, config, moments, head_weights, task.compression.solver)
    except (ValueError, ImportError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise CompressionError(f"{site.name}: {error}") from error
    is_value = isinstance(site, ValueSite)
    qk, ov = configs_at(site, task.compression.dk, task.compression.dv)  # caches depend on both maps
    qk, ov = (qk, found.config) if is_value else (found.config, ov)
    cost = attention_costs(site, length, qk, ov)[is_value]
    solver: dict[str, Any] = {}
    if isinstance(result, Factorization):
        solver = {"sweeps": result.sweeps, "converged": result.converged, "breakdowns": result.breakdowns}
    report = PartReport(
        **vars(cost),
        weight_error=result.weight_error,
        data_error=result.data_error,
        head_dim=found.config.width if isinstance(found.config, QKConfig) else None,
        seconds=perf_counter() - started,
        vectors=tuple(int(part.count) for part in moments) if moments else (0,) * len(site.inputs),
        **solver,
    )
    return Replacement(site, found, layers, report)


def rounded_widths(configs: Sequence[MapConfig], dk: int | None, dv: int | None = None) -> list[str]:
    """Warn of a dk that rotary heads round, and of a dv that narrow values round."""
    rotary = [config for config in configs if isinstance(config, RotaryConfig) and config.rank != dk]
    narrow = [config for config in configs if isinstance(config, NarrowConfig) and config.dv != dv]
    return [
        f"dk {dk} was rounded up to {config.rank}: a rotary embedding rotates whole heads of {config.head_width} "
        "channels"
        for config in rotary[:1]
    ] + [
        f"dv {dv} was rounded to {config.dv}: its {config.key_value_heads} heads of values have {config.size} "
        "channels each"
        for config in narrow[:1]
    ]


def empty_replacement(site: Site, config: MapConfig) -> Replacement:
    """Return a replacement whose weights are not set yet, and which has no report."""
    report: Any = None
    return Replacement(site, *config.module.build(config, site.module, site.parent), report)


def record_maps_(model: PreTrainedModel, maps: Iterable[tuple[nn.Module, MapConfig]]) -> None:
    """Record converted maps of attention modules for checkpoints, in place, one edit for each kind."""
    by_kind: dict[str, dict[str, MapConfig]] = {}
    for module, config in maps:
        by_kind.setdefault(config.kind, {})[path_in_base(model, module)] = config
    for kind, configs in by_kind.items():
        record_edit_(model, MapEdit(kind, configs))


def weighted_sites(tasks: Sequence[MapTask]) -> list[AttentionSite]:
    """Return the attention modules whose score errors are weighted by head."""
    return [task.site for task in tasks if isinstance(task.site, DenseSite) and not task.is_exact]


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
        super().__init__(sites)

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
    weight = by_input(output)
    if len(weight) != site.heads * width:
        return None
    heads = weight.reshape(site.heads, width, -1)
    return heads @ heads.mT


def _normalise(squares: Tensor) -> Tensor | None:
    """Return w (H,) with mean square 1 of sums of w²; None if no head adds anything."""
    mean = squares.mean()
    if not bool(torch.isfinite(mean)) or float(mean) <= 0:
        return None
    return (squares / mean + LEAST_WEIGHT).sqrt()


def _squares(probs: Tensor, values: Tensor, outputs: Tensor, gram: Tensor | None) -> Tensor:
    """Return p² ‖(v − o) O‖² of each query and key, (B, H, T, S); `gram` is O·Oᵀ (H, s, s), None for the identity."""
    probs, values, outputs = (part.float() for part in (probs, values, outputs))  # outputs (B, H, T, s)
    projected = values if gram is None else values @ gram.float()
    distance = (projected * values).sum(-1).unsqueeze(2) - 2 * outputs @ projected.mT
    distance = distance + ((outputs if gram is None else outputs @ gram.float()) * outputs).sum(-1, keepdim=True)
    return probs.square() * distance.clamp_min(0)
