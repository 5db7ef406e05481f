"""Get the replacement of each attention module ready, in one process or several, without touching the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import DenseSite, ValueSite
from collab_compress.attention import DenseValues, MapForm, NarrowValues, RotaryScores, form_for
from collab_compress.attention.projections import width_in
from collab_compress.attention.rotary import arranged
from collab_compress.calibration import Batch, gather_moments
from collab_compress.conversion.report import ModuleReport, ValueReport, module_report, value_report
from collab_compress.distributed import process_state
from collab_compress.errors import CompressionError
from collab_compress.factorization import (
    Factors,
    Moments,
    Narrowing,
    centres_queries,
    factorize,
    factorize_rotary,
    narrow_values,
)
from collab_compress.factorization.als import FAST_SWEEPS
from collab_compress.factorization.rotary import FAST_SWEEPS as FAST_ROTARY_SWEEPS
from collab_compress.options import Compression, Solver

Progress = Callable[[str, int, int], None]
FEW = 4  # vectors for each dimension of the inputs: with fewer, a covariance is mostly chance
STARVED = 0.5  # share of a head's score energy below which its task is at risk
AT_ONCE = 8  # modules at most that are decomposed at a time: each has a work space
STATISTICS_SHARE = 1 / 16  # of the model's own bytes: what moments may take at a time, …
STATISTICS_BYTES = 64 * 2**20  # … or this much, where that is more


Site: TypeAlias = DenseSite | ValueSite
"""An attention module by one of its maps."""


@dataclass(frozen=True)
class Planned:
    """A map of a module whose replacement is ready.

    Args:
        site: the module.
        form: of the replacement.
        parts: the replacement.
        dense: what is replaced, as the form takes it to undo that.
        report: errors and costs.
    """

    site: Site
    form: MapForm
    parts: Any
    dense: Any
    report: ModuleReport | ValueReport


def plan(
    model: PreTrainedModel,
    sites: Sequence[Site],
    compression: Compression,
    batches: Sequence[Batch],
    progress: Progress | None = None,
    calibrated: Callable[[float], None] | None = None,
    *,
    modules: Mapping[str, Compression] | None = None,
    weights: Mapping[str, Tensor | None] | None = None,
    length: int = 128,
) -> list[Planned]:
    """Decompose modules, in groups whose moments take little memory beside the model.

    Args:
        model: the dense model; it runs on all batches once for each group.
        sites: what to decompose.
        compression: the widths, the form and the solver.
        batches: calibration data; without, all directions of the inputs weigh alike.
        progress: called with a module's name, how many are done, and how many there are.
        calibrated: called after each run on all batches, with the seconds it took.
        modules: path of a module → its own compression, where widths differ.
        weights: path of a module → how much the scores of each head count, (H,); alike if not given.
        length: tokens for which reports count multiply-accumulates.

    Raises:
        CompressionError: a module cannot be decomposed.
        CalibrationError: a module saw no token, or an input was not finite.
    """
    own = {site.name: (modules or {}).get(site.name, compression) for site in sites}
    weighted = bool(batches) and any(_narrower(site, own[site.name]) for site in sites)
    planned: list[Planned] = []
    for group in _groups(model, sites) if weighted else [list(sites)]:
        moments: list[tuple[Moments, ...] | None] = [None] * len(group)
        if weighted:
            started = perf_counter()
            moments[:] = gather_moments(model, group, batches)
            if calibrated is not None:
                calibrated(perf_counter() - started)
        with _workers(group, compression) as submit:
            tasks = []
            for place, site in enumerate(group):
                head_weights = (weights or {}).get(site.name)
                tasks.append(submit(partial(_plan_one, site, own[site.name], moments[place], head_weights, length)))
                moments[place] = None  # held by the task, until it is done
            for site in group:
                if progress is not None:
                    progress(site.name, len(planned), len(sites))
                planned.append(tasks.pop(0)())
    if progress is not None:
        progress("", len(sites), len(sites))
    return planned


Check: TypeAlias = Callable[[], None]
Task: TypeAlias = Callable[[Check], Planned]


@contextmanager
def _workers(sites: Sequence[Site], compression: Compression) -> Iterator[Callable[[Task], Callable[[], Planned]]]:
    """Yield `submit(task) -> wait`.

    On a CPU several tasks run at once, each in a thread to itself: matrices are too small for threads to share one
    well. Results depend on how many run at once by rounding only. An error or an interrupt ends all of them at their
    next sweep.
    """
    places = {
        compression.solver.device or projection.weight.device.type for site in sites for projection, _ in site.inputs
    }
    threads = torch.get_num_threads()
    count = min(len(sites), AT_ONCE, threads) if places == {"cpu"} else 1
    if count == 1 or compression.solver.method == "parafac":
        yield lambda task: partial(task, lambda: None)
        return
    pool = ThreadPoolExecutor(count)
    failures: list[BaseException] = []

    def check() -> None:
        if failures:
            raise CancelledError

    def run(task: Task) -> Planned:
        try:
            return task(check)
        except BaseException as error:
            failures.append(error)
            raise

    def submit(task: Task) -> Callable[[], Planned]:
        future = pool.submit(run, task)

        def wait() -> Planned:
            try:
                return future.result()
            except CancelledError:
                raise failures[0] from None

        return wait

    torch.set_num_threads(threads // count)
    try:
        yield submit
    except BaseException as error:
        failures.append(error)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _narrower(site: Site, compression: Compression) -> bool:
    """Whether a map loses anything."""
    width = compression.dv if isinstance(site, ValueSite) else compression.dk
    return width is not None and width < site.key_value_width


def gets_content_bias(site: DenseSite, compression: Compression, calibrated: bool) -> bool:
    """Return whether a module will have content biases: if its queries have a bias, or if centring creates them."""
    if site.family.rotary:  # biases stay in the projections
        return False
    biased = site.query.bias is not None
    folded = calibrated and _narrower(site, compression) and centres_queries(biased, compression.solver.centre)
    return biased or folded


def _groups(model: PreTrainedModel, sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Divide modules, in order, so that the moments of a group fit; a module that does not fit is alone."""
    room = max(STATISTICS_BYTES, int(model.get_memory_footprint() * STATISTICS_SHARE))
    group: list[Site] = []
    taken = 0
    for site in sites:
        size = sum(8 * width_in(projection) ** 2 for projection, _ in site.inputs)
        if len(site.inputs) > 1 and site.kind != "cross":  # queries and keys read the same input
            size //= 2
        if group and taken + size > room:
            yield group
            group, taken = [], 0
        group.append(site)
        taken += size
    yield group


def _sweeps(solver: Solver, fast: int) -> int | None:
    return fast if solver.effort == "fast" else solver.sweeps


def _plan_one(
    site: Site,
    compression: Compression,
    moments: tuple[Moments, ...] | None,
    weights: Tensor | None,
    length: int,
    check: Check,
) -> Planned:
    if isinstance(site, ValueSite):
        return _plan_values(site, compression, moments, length)
    return _plan_scores(site, compression, moments, weights, length, check)


def _plan_scores(
    site: DenseSite,
    compression: Compression,
    moments: tuple[Moments, ...] | None,
    weights: Tensor | None,
    length: int,
    check: Check,
) -> Planned:
    """Decompose the scores of one module and build what will replace its query and key projections."""
    assert compression.dk is not None
    query_moments, key_moments = moments or (None, None)
    started = perf_counter()
    form = form_for(compression.form, site)
    if issubclass(form, RotaryScores):
        return _plan_rotary(site, compression, form, moments, weights, length, check)
    options = compression.solver
    try:
        result = factorize(
            site.query_heads(),
            site.key_heads(),
            compression.dk,
            query_bias=site.query_bias(),
            query_moments=query_moments,
            key_moments=key_moments,
            solver=options.method if options.method in form.solvers else form.solvers[0],
            seed=options.seed,
            sweeps=_sweeps(options, FAST_SWEEPS),
            tolerance=options.tolerance,
            damping=options.damping,
            centre=options.centre,
            device=options.device,
            progress=lambda *_: check(),
            equal=compression.equal_heads,
            head_weights=weights,
        )
    except (ValueError, ImportError) as error:
        raise CompressionError(f"{site.name}: {error}") from error
    made = form.of(site, compression.dk, result.factors.content_bias is not None, result.sizes)
    parts = made.build(site.module, site.parent)
    found = result.factors.to(dtype=parts.mixing.dtype)  # where they are: not every device has float64
    made.load_(parts, found.query, found.mixing, found.key, found.content_bias)
    vectors = (0.0, 0.0) if moments is None else (moments[0].count, moments[1].count)
    energy = None if result.sizes is None else _head_energy(site, result.factors, moments)
    report = module_report(site, made, result, length, perf_counter() - started, vectors, energy)
    return Planned(site, made, parts, _dense(site), report)


def _head_energy(site: DenseSite, factors: Factors, moments: tuple[Moments, ...] | None) -> tuple[float, ...]:
    """Return the share of each head's score energy that heads without shared channels keep, weighed by the inputs."""
    assert factors.query is not None
    like = factors.key
    shares = []
    for query, key, channels in zip(site.query_heads(), site.key_heads(), factors.mixing, strict=True):
        query, key = query.to(like), key.to(like)
        lost = torch.cat([query, -factors.query * channels], 1), torch.cat([key, factors.key], 1)
        grams = [
            [side.mT @ (side if weights is None else weights @ side) for side in sides]
            for sides, weights in (
                ((query, lost[0]), None if moments is None else moments[0].covariance().to(like)),
                ((key, lost[1]), None if moments is None else moments[1].covariance().to(like)),
            )
        ]
        energy, missing = ((ours * theirs).sum().item() for ours, theirs in zip(*grams, strict=True))
        shares.append(1 - missing / energy if energy > 0 else 1.0)
    return tuple(shares)


def starved_heads(planned: Sequence[Planned]) -> list[str]:
    """Return a warning where heads keep less than half of the energy of their scores, which can cost a task a lot."""
    starved = [
        (share, head, item.site.name)
        for item in planned
        if isinstance(item.report, ModuleReport)
        for head, share in enumerate(item.report.head_energy or ())
        if share < STARVED
    ]
    if not starved:
        return []
    share, head, name = min(starved)
    return [
        f"{len(starved)} heads keep less than {STARVED:.0%} of the energy of their scores; head {head} of {name} "
        f"keeps {max(share, 0):.0%}: score your task, pass a larger dk, or leave out equal heads"
    ]


def _plan_rotary(
    site: DenseSite,
    compression: Compression,
    form: type[RotaryScores],
    moments: tuple[Moments, ...] | None,
    weights: Tensor | None,
    length: int,
    check: Check,
) -> Planned:
    """Share the channels of one module whose queries and keys are turned; as `_plan_scores`."""
    assert compression.dk is not None
    started = perf_counter()
    query_moments, key_moments = moments or (None, None)
    asked = form.of(site, compression.dk, content_bias=False)
    heads = [
        asked.channels_of(matrices, projection.bias)
        for matrices, projection in ((site.query_heads(), site.query), (site.key_heads(), site.key))
    ]
    try:
        result = factorize_rotary(
            heads[0],
            heads[1],
            asked.rank // 2,
            query_moments=query_moments,
            key_moments=key_moments,
            damping=compression.solver.damping,
            sweeps=_sweeps(compression.solver, FAST_ROTARY_SWEEPS),
            rotated=site.rotated // 2,
            device=compression.solver.device,
            check=check,
            head_weights=weights,
        )
    except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise CompressionError(f"{site.name}: {error}") from error
    found = result.factors
    order = arranged(found.frequencies, site.head_width // 2)
    made = form.of(site, compression.dk, content_bias=False, sizes=[found.frequencies[place] for place in order])
    parts = made.build(site.module, site.parent)
    query = None if found.query is None else found.query[:, order]
    made.load_channels_(parts, query, found.mixing[:, order], found.key[:, order], site.query)
    vectors = (0.0, 0.0) if moments is None else (moments[0].count, moments[1].count)
    report = module_report(site, made, result, length, perf_counter() - started, vectors)
    return Planned(site, made, parts, _dense(site), report)


def _plan_values(
    site: ValueSite, compression: Compression, moments: tuple[Moments, ...] | None, length: int
) -> Planned:
    """Narrow the values of one module and build the replacements of its value and output projections."""
    assert compression.dv is not None
    started = perf_counter()
    seen = None if moments is None else moments[0]
    made = NarrowValues.of(site, compression.dv, site.value.bias is not None)
    fold = site.output.bias is not None and compression.solver.centre is not False
    try:
        found = narrow_values(
            site.value_heads(), site.output_heads(), made.sizes, seen, fold=fold, damping=compression.solver.damping,
            device=compression.solver.device,
        )  # fmt: skip
    except ValueError as error:
        raise CompressionError(f"{site.name}: {error}") from error
    parts = made.build(site.module, site.parent)
    made.load_(parts, *_narrowed(site, found))
    report = value_report(site, made, found, length, perf_counter() - started, 0 if seen is None else seen.count)
    return Planned(site, made, parts, _dense(site), report)


def _narrowed(site: ValueSite, found: Narrowing) -> tuple[Any, ...]:
    """Return the parameters to load: Wv·P (D, dv), its bias, O (dv, D) and its bias."""
    like = found.output
    heads, own = site.value_heads(), site.value_bias()
    value = torch.cat([head.to(like) @ kept for head, kept in zip(heads, found.heads, strict=True)], 1)
    value_bias = None
    if own is not None:
        value_bias = torch.cat([head.to(like) @ kept for head, kept in zip(own, found.heads, strict=True)])
    bias = site.output.bias
    if bias is not None:
        bias = bias.detach().to(like)
        bias = bias if found.bias is None else bias + found.bias
    made = (value, value_bias, found.output, bias)  # rounded where they are: not every device has float64
    return tuple(None if each is None else each.to(site.value.weight.dtype) for each in made)


def few_vectors(planned: Sequence[Planned]) -> list[str]:
    """Warn of modules that saw too few calibration vectors for their width."""
    few = [
        (vectors, width_in(projection), item.site.name)
        for item in planned
        for vectors, (projection, _) in zip(item.report.vectors, item.site.inputs, strict=True)
        if 0 < vectors < FEW * width_in(projection)
    ]
    if not few:
        return []
    vectors, width, name = min(few, key=lambda seen: seen[0] / seen[1])
    others = len({name for _, _, name in few}) - 1
    return [
        f"{name}{f' and {others} more modules' if others else ''} saw few calibration vectors: {vectors} of width "
        f"{width}, where {FEW} times the width would be {FEW * width}; pass more data, or more sequences of it"
    ]


def rounded(planned: Sequence[Planned], compression: Compression) -> list[str]:
    """Warn of modules whose dk differs from the requested one."""
    forms = [item.form for item in planned if isinstance(item.form, RotaryScores)]
    others = [form for form in forms if form.rank != compression.dk]
    if not others:
        return []
    return [
        f"dk {compression.dk} was rounded up to {others[0].rank}: a rotary embedding turns whole heads of "
        f"{others[0].head_width} channels"
    ]


def breakdowns(planned: Sequence[Planned]) -> list[str]:
    """Warn of solvers that met singular systems."""
    return [
        f"{item.site.name}: {item.report.breakdowns} sweeps of the solver met a singular system; "
        + ("it went on with a shifted one" if item.report.sweeps else "it kept its start")
        + "; look at the module's error, or raise the damping"
        for item in planned
        if isinstance(item.report, ModuleReport) and item.report.breakdowns
    ]


def plan_distributed(sites: Sequence[Site], plan: Callable[[Sequence[Site]], list[Planned]]) -> list[Planned]:
    """Plan a part of the modules in each process, and return the plans of all modules, in order.

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
    own = {_key(item.site): item for item in mine}
    described: dict[Any, Any] = {
        key: (form, report)
        for key, form, report in gather_object([(_key(item.site), item.form, item.report) for item in mine])
    }
    planned = []
    for place, site in enumerate(sites):
        item = own.get(_key(site)) or empty_plan(site, *described[_key(site)])
        for tensor in item.parts.tensors():
            sent = tensor.to(state.device)  # where processes can reach each other
            tensor.copy_(broadcast(sent, place % count))
        planned.append(item)
    return planned


def _key(site: Site) -> tuple[str, str]:
    return site.name, type(site).__name__


def empty_plan(site: Site, form: MapForm, report: Any = None) -> Planned:
    """Return a replacement whose weights are not set yet."""
    return Planned(site, form, form.build(site.module, site.parent), _dense(site), report)


def _dense(site: Site) -> Any:
    """Return the dense parameters that a replacement stands for, as its form restores them."""
    if isinstance(site, ValueSite):
        output: Any = site.output
        return DenseValues(site.value, output, output.weight, output.bias)
    return site.query, site.key
