"""Get the replacement of each attention module ready, in one process or several, without touching the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from accelerate.utils import broadcast, gather_object
from transformers import PreTrainedModel

from collab_compress.architectures import DenseSite
from collab_compress.attention import FORMS, ScoreForm, ScoreParts
from collab_compress.calibration import Batch, gather_moments
from collab_compress.conversion.compression import Compression
from collab_compress.conversion.report import ModuleReport, module_report
from collab_compress.distributed import process_state
from collab_compress.errors import CompressionError
from collab_compress.factorization import Moments, centres_queries, factorize

Progress = Callable[[str, int, int], None]
REPORT_LENGTH = 128
FEW = 4  # vectors for each dimension of the inputs: with fewer, a covariance is mostly chance
STATISTICS_SHARE = 1 / 16  # of the model's own bytes: what moments may take at a time, …
STATISTICS_BYTES = 64 * 2**20  # … or this much, where that is more


@dataclass(frozen=True)
class Planned:
    """A module whose replacement is ready.

    Args:
        site: the module.
        form: of its replacement.
        parts: the replacement.
        report: errors and costs.
    """

    site: DenseSite
    form: ScoreForm
    parts: ScoreParts
    report: ModuleReport


def plan(
    model: PreTrainedModel,
    sites: Sequence[DenseSite],
    compression: Compression,
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> list[Planned]:
    """Decompose modules one after the other, in groups whose moments take little memory beside the model.

    Args:
        model: the dense model; it runs on all batches once for each group.
        sites: what to decompose.
        compression: dk, solver and the rest.
        batches: calibration data; without, all directions of the inputs weigh alike.
        progress: called with a module's name, how many are done, and how many there are.

    Raises:
        CompressionError: a module cannot be decomposed.
        CalibrationError: a module saw no token, or an input was not finite.
    """
    weighted = bool(batches) and any(compression.dk < site.width for site in sites)
    planned: list[Planned] = []
    for group in _groups(model, sites) if weighted else [list(sites)]:
        moments = gather_moments(model, group, batches) if weighted else {}
        for site in group:
            if progress is not None:
                progress(site.name, len(planned), len(sites))
            planned.append(_plan(site, compression, moments.pop(site.name, None)))
    if progress is not None:
        progress("", len(sites), len(sites))
    return planned


def gets_content_bias(site: DenseSite, compression: Compression, calibrated: bool) -> bool:
    """Say whether a module will have content biases: where queries have a bias, or where centring is to make them."""
    biased = site.query.bias is not None
    folded = calibrated and compression.dk < site.width and centres_queries(biased, compression.centre)
    return biased or folded


def _groups(model: PreTrainedModel, sites: Sequence[DenseSite]) -> Iterator[list[DenseSite]]:
    """Divide modules, in order, so that the moments of a group fit; a module that does not fit is alone."""
    room = max(STATISTICS_BYTES, int(model.get_memory_footprint() * STATISTICS_SHARE))
    group: list[DenseSite] = []
    taken = 0
    for site in sites:
        size = sum(8 * heads().shape[1] ** 2 for heads in (site.query_heads, site.key_heads))
        size //= 1 if site.kind == "cross" else 2  # elsewhere queries and keys read the same input
        if group and taken + size > room:
            yield group
            group, taken = [], 0
        group.append(site)
        taken += size
    yield group


def _plan(site: DenseSite, compression: Compression, moments: tuple[Moments, Moments] | None) -> Planned:
    """Decompose one module and build what will replace its projections."""
    query_moments, key_moments = moments or (None, None)
    started = perf_counter()
    form = FORMS[compression.form]
    solver = compression.solver if compression.solver in form.solvers else form.solvers[0]
    try:
        result = factorize(
            site.query_heads(), site.key_heads(), compression.dk, query_bias=site.query_bias(),
            query_moments=query_moments, key_moments=key_moments, solver=solver,
            seed=compression.seed, sweeps=compression.sweeps, tolerance=compression.tolerance,
            damping=compression.damping, centre=compression.centre, device=compression.device,
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        raise CompressionError(f"{site.name}: {error}") from error
    made = form.of(site, compression.dk, result.factors.content_bias is not None, result.sizes)
    parts = made.build(site.module)
    found = result.factors.to(dtype=parts.mixing.dtype)  # where they are: not every device has float64
    made.load_(parts, found.query, found.mixing, found.key, found.content_bias)
    vectors = (0.0, 0.0) if moments is None else (moments[0].count, moments[1].count)
    report = module_report(site, made, result, REPORT_LENGTH, perf_counter() - started, vectors)
    return Planned(site, made, parts, report)


def few_vectors(planned: Sequence[Planned]) -> list[str]:
    """Say so where modules saw too few vectors for what is made of them."""
    few = [
        (vectors, width, item.site.name)
        for item in planned
        for vectors, width in (
            (item.report.query_vectors, item.site.query.in_features),
            (item.report.key_vectors, item.site.key.in_features),
        )
        if 0 < vectors < FEW * width
    ]
    if not few:
        return []
    vectors, width, name = min(few, key=lambda seen: seen[0] / seen[1])
    others = len({name for _, _, name in few}) - 1
    return [
        f"{name}{f' and {others} more modules' if others else ''} saw few calibration vectors: {vectors} of width "
        f"{width}, where {FEW} times the width would be {FEW * width}; pass more data, or more sequences of it"
    ]


def breakdowns(planned: Sequence[Planned]) -> list[str]:
    """Say so where a solver met systems that it could not solve."""
    return [
        f"{item.site.name}: {item.report.breakdowns} sweeps of the solver met a singular system; "
        + ("it went on with a shifted one" if item.report.sweeps else "it kept its start")
        + "; look at the module's error, or raise the damping"
        for item in planned
        if item.report.breakdowns
    ]


def plan_distributed(
    sites: Sequence[DenseSite], plan: Callable[[Sequence[DenseSite]], list[Planned]]
) -> list[Planned]:
    """Let each process plan some of the modules, and give all of them the plans of all modules, in order.

    Args:
        sites: modules of the model, which every process has.
        plan: what one process does for its modules.

    Raises:
        CompressionError: the plan of another process fails; in that process, what it failed with.
    """
    state = process_state()
    rank, count = state.process_index, state.num_processes
    mine: list[Planned] = []
    error: Exception | None = None
    try:
        mine = plan(sites[rank::count]) if sites[rank::count] else []
    except Exception as found:  # whatever it is, the others wait for this process
        error = found
    failed = [message for message in gather_object([None if error is None else str(error)]) if message is not None]
    if error is not None:
        raise error
    if failed:
        raise CompressionError(failed[0])
    own = {planned.site.name: planned for planned in mine}
    described: dict[str, Any] = {
        name: (form, report)
        for name, form, report in gather_object([(item.site.name, item.form, item.report) for item in mine])
    }
    planned = []
    for place, site in enumerate(sites):
        form, report = described[site.name]
        item = own.get(site.name) or Planned(site, form, form.build(site.module), report)
        for tensor in item.parts.tensors():
            sent = tensor.to(state.device)  # where processes can reach each other
            tensor.copy_(broadcast(sent, place % count))
        planned.append(item)
    return planned
