"""Convert the attention of a pretrained model, all or nothing, once everything asked for is known to be possible."""

import copy
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import (
    FAMILIES,
    AttentionSite,
    DenseSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
    refuse_hooks,
    transformers_model,
)
from collab_compress.attention import FormEdit, MapForm, NarrowValues, ScoreForm, form_for, install_, uninstall_
from collab_compress.calibration import Batch, Calibration
from collab_compress.calibration.batches import is_none, is_synthetic, noted_batches, sequence_count
from collab_compress.checkpoint import is_quantized, path_in_base, record_edit_
from collab_compress.conversion.drift import measure, split_held_back
from collab_compress.conversion.feed_forward import (
    FeedForward,
    adopt_,
    block_report,
    find_feed_forward,
    narrower_config,
)
from collab_compress.conversion.head_weights import head_weights
from collab_compress.conversion.keep import Candidate, Layers, choose, typical_length
from collab_compress.conversion.plan import (
    Planned,
    Progress,
    Site,
    breakdowns,
    empty_plan,
    few_vectors,
    gets_content_bias,
    plan,
    plan_distributed,
    rounded,
    starved_heads,
)
from collab_compress.conversion.refit import Refitted, install_refits, of_first_process, refit, refitted
from collab_compress.conversion.report import Drift, ModuleReport, Report, ValueReport
from collab_compress.distributed import process_state
from collab_compress.errors import CalibrationError, CompressionError
from collab_compress.factorization import has_float64
from collab_compress.heads.sharding import refuse_sharded
from collab_compress.options import CalibrationOptions, Compression

_logger = logging.getLogger(__name__)
NO_DATA = "keep chooses by what is lost on calibration data; pass at least two sequences, best of all your own texts"
TRIAL = 256  # sequences on which each choice of widths is tried


def modules_to_convert(
    model: PreTrainedModel,
    compression: Compression,
    calibrated: bool,
    modules: Mapping[str, Compression] | None = None,
) -> list[Site]:
    """Return the modules to convert, after checking that all of them can be converted.

    Args:
        model: stock or edited.
        compression: which modules, and how.
        calibrated: whether there is calibration data.
        modules: path of a module → its own compression, where widths differ.

    Raises:
        UnsupportedModelError: a module cannot be converted.
        CompressionError: as `compress`.
    """
    if is_quantized(model):
        raise CompressionError(f"{type(model).__name__} is quantized; convert the unquantized checkpoint instead")
    refuse_sharded(model, "compress", CompressionError)
    _check_config(model)
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise CompressionError(
            f"collaborative attention runs as 'eager' or 'sdpa', the model is set to {implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )
    for chosen in find_attention(model, FAMILIES, compression.modules, compression.kinds):
        _refuse_converted(chosen, compression)
    where = (model, FAMILIES, compression.modules, compression.kinds)
    scores = find_dense_attention(*where) if compression.dk is not None else []
    values = find_dense_values(*where) if compression.dv is not None else []
    modules = modules or {}
    for site in scores:
        own = modules.get(site.name, compression)
        content_bias = gets_content_bias(site, own, calibrated)
        _check_width(site, "dk", own.dk, site.key_value_heads)
        form = form_for(own.form, site)
        _check_solver(site, form, own)
        _ = form.of(site, own.dk or 0, content_bias).multiple  # room?
        _check_weights(site, ((site.family.query, site.query), (site.family.key, site.key)))
    for each in values:
        _check_width(each, "dv", modules.get(each.name, compression).dv, each.key_value_heads)
        _check_weights(each, ((each.family.value, each.value), (each.family.output, each.output)))
    return [*scores, *values]


def _check_config(model: PreTrainedModel) -> None:
    """Refuse a config that cannot be copied: an edit is recorded in a copy, which other models do not share."""
    try:
        copy.deepcopy(model.config)
    except Exception as error:  # whatever an attribute raises
        reason = str(error).partition("\n")[0]
        raise CompressionError(
            f"the config of {type(model).__name__} cannot be copied ({reason}); take the attribute out that cannot"
        ) from error


def _refuse_converted(site: AttentionSite, compression: Compression) -> None:
    asked = {ScoreForm.at: compression.dk, NarrowValues.at: compression.dv}
    for at, width in asked.items():
        if width is not None and hasattr(site.module, at):
            what = "values are" if at == NarrowValues.at else "queries and keys are"
            raise CompressionError(
                f"{site.name}: its {what} already converted; leave it out by modules or kinds, expand the model "
                "first, or start from the dense checkpoint"
            )


def _check_width(site: AttentionSite, name: str, width: int | None, heads: int) -> None:
    if width is not None and width > heads * site.head_width:
        raise CompressionError(
            f"{site.name}: {name} is {width}, but {heads} heads × {site.head_width} = {heads * site.head_width} "
            f"is exact already; pass {name} between 1 and {heads * site.head_width}"
        )


def _check_solver(site: AttentionSite, form: type[ScoreForm], compression: Compression) -> None:
    """Refuse what a rotary module has not: centred queries, and other solvers."""
    if not site.family.rotary:
        return
    if compression.solver.centre is not None or compression.solver.method not in form.solvers:
        raise CompressionError(
            f"{site.name}: a rotary embedding turns queries and keys, so neither is centred, and solver "
            f"{' or '.join(form.solvers)} decomposes them; leave out centre and other solvers"
        )


def _check_weights(site: AttentionSite, projections: Iterable[tuple[str, Any]]) -> None:
    for path, projection in projections:
        layer = getattr(projection, "whole", projection)  # of a fused layer
        refuse_hooks(site.path(path), layer, stays=path == site.family.output)
        for name, parameter in projection.named_parameters():
            if parameter.is_meta:
                raise CompressionError(f"{site.path(path)}.{name} is offloaded; load the model into memory")
            if not bool(torch.isfinite(parameter).all()):
                raise CompressionError(
                    f"{site.path(path)}.{name} holds NaN or infinite values; the checkpoint is damaged"
                )


def working_device(device: str | None, sites: Sequence[Site], distributed: bool = False) -> str | None:
    """Return the device to decompose on; None leaves each module on the device of its weights.

    Of the processes that a launcher started on one machine each has a GPU of its own, which "cuda" is.

    Raises:
        CompressionError: there is no such device; one with a number is named for processes that share the work.
    """
    if device is None:
        places = {projection.weight.device for site in sites for projection, _ in site.inputs}
        without = {str(place) for place in places if not has_float64(place)}
        if without:
            _logger.info("%s has no float64, so modules are decomposed on the CPU", ", ".join(sorted(without)))
        return "cpu" if without else None
    place = os.environ.get("LOCAL_RANK", "")
    if distributed and process_state().num_processes > 1:
        _refuse_one_device(device)
    if device == "cuda" and place.isdecimal() and int(place) < torch.cuda.device_count():
        device = f"cuda:{place}"
    try:
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CompressionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _refuse_one_device(device: str) -> None:
    """Refuse a device with a number that several processes of one machine would share; all of them must call it.

    Raises:
        CompressionError: they would.
    """
    kind, _, number = device.partition(":")
    places = gather_object([(platform.node(), device)])
    if number and kind != "cpu" and len(set(places)) < len(places):
        raise CompressionError(
            f"device {device!r} would hold {places.count((platform.node(), device))} processes; pass {kind!r}, and "
            "each takes its own"
        )


@torch.inference_mode(False)
def compress(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
    distributed: bool = False,
) -> Report:
    """Convert the attention modules of `model` into collaborative form, in place and all or nothing.

    Every module is decomposed before any is replaced, so an error or an interrupt leaves the model as it was. Modules
    that are still dense can be converted by a further call, so that widths differ by layer and kind; so can values
    after queries and keys.
    With `dk`, the query and key projections of each module give way to shared ones of width R, a mixing matrix and,
    where queries have a bias, content biases ("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7–13).
    In the per-head form each head keeps projections of its own, as wide as pays, and there is no mixing matrix.
    With `dv`, each head's values keep the channels that matter most, and the output projection is fitted to what is
    left of all heads (`narrow_values`).
    Given texts or batches, the layers that write to the residual stream (output projections, and second layers of
    feed-forward blocks) are then refitted towards the dense model's hidden states, as `Solver.refit` says. All else
    stays the model's own.

    Args:
        model: a Transformers model, or a SentenceTransformer, of which its Transformers model is converted; dtype and
            device are kept.
        compression: dk and dv, or the share to keep, the form, and how it is computed.
        calibration: data that says which input directions matter: "synthetic" (random tokens), None, a file of
            texts, texts or text pairs, or batches. An eighth of it is held back to measure drift.
        tokenizer: of the model; needed unless `calibration` is None or batches, or the model a SentenceTransformer.
        progress: called with a module's name, how many are done, and how many there are.
        calibration_options: how many sequences of the calibration data are used, and how long.
        distributed: whether the processes that `accelerate launch` started share the modules between them. All
            of them must call this with the same arguments; each gets the whole conversion.

    Returns:
        Errors, costs and drift.

    Raises:
        UnsupportedModelError: the model, or a module of it, cannot be converted.
        CompressionError: dk or dv beyond H·d, weights that are not finite, a module that is already converted, a
            quantized model.
        CalibrationError: calibration data is missing or unusable.
    """
    given, model = model, transformers_model(model)
    tokenizer = getattr(given, "tokenizer", None) if tokenizer is None and given is not model else tokenizer
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # new layers are initialised before they are filled
        return _compress(
            model,
            compression,
            calibration,
            tokenizer,
            progress,
            options=calibration_options or CalibrationOptions(),
            distributed=distributed,
        )


def _compress(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration,
    tokenizer: PreTrainedTokenizerBase | None,
    progress: Progress | None,
    *,
    options: CalibrationOptions,
    distributed: bool,
) -> Report:
    started = perf_counter()
    found = None
    if compression.keep is None:  # what cannot be converted is refused before any data are read
        working_device(
            compression.solver.device, modules_to_convert(model, compression, not is_none(calibration)), distributed
        )
    else:
        found = _data(model, compression, calibration, tokenizer, options)
    batches, notes = found or _data(model, compression, calibration, tokenizer, options)
    length = typical_length(options, () if is_synthetic(calibration) else batches)
    work = _Work(model, *split_held_back(batches), calibration, length, progress, distributed)
    modules: Mapping[str, Compression] = {}
    asked, reason = compression, ""
    if compression.keep is not None:
        candidate, reason = _choose(work, compression)
        compression, modules = candidate.compression, candidate.modules
        if all(own == compression for own in modules.values()):
            asked = compression
    prepared = _prepare(work, compression, modules)
    drift = prepared.drift()
    parameters_before = model.num_parameters()
    planned, blocks = prepared.planned, prepared.blocks
    paths = {item.site.name: path_in_base(model, item.site.module) for item in planned}
    narrowed = [block_report(model, block, compression.dff or block.width, length) for block in blocks]
    _install(planned)
    install_refits(model, prepared.refits, blocks)
    if prepared.config is not None:
        adopt_(model, prepared.config)
    for kind in dict.fromkeys(item.form.kind for item in planned):  # cannot fail, as `_check_config` found
        record_edit_(model, FormEdit(kind, {paths[i.site.name]: i.form for i in planned if i.form.kind == kind}))
    warnings = (
        *notes,
        *prepared.notes,
        *rounded(planned, compression),
        *few_vectors(planned),
        *breakdowns(planned),
        *starved_heads(planned),
    )
    if not distributed or process_state().is_main_process:
        for warning in warnings:
            _logger.warning(warning)
    reports = [item.report for item in planned]
    return Report(
        tuple(each for each in reports if isinstance(each, ModuleReport)), parameters_before, model.num_parameters(),
        length, drift, perf_counter() - started, sum(map(sequence_count, work.used)), warnings,
        tuple(each for each in reports if isinstance(each, ValueReport)), asked,
        reason,
        prepared.calibrating,
        tuple(each.report for each in prepared.refits),
        tuple(narrowed),
    )  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """A model to convert, and what it is converted with.

    Args:
        model: dense.
        used: batches to calibrate on.
        held_back: batches to measure drift on.
        calibration: what they were made of.
        length: tokens for which costs count.
        progress: as for `compress`.
        distributed: as for `compress`.
    """

    model: PreTrainedModel
    used: list[Batch]
    held_back: list[Batch]
    calibration: Any
    length: int
    progress: Progress | None
    distributed: bool


@dataclass(frozen=True)
class _Prepared:
    """A conversion of which nothing is installed yet.

    Args:
        work: of which model.
        planned: what is to replace maps of attention.
        refits: layers with new weights.
        blocks: feed-forward blocks that are made narrower.
        config: of the model with narrower blocks; None where none are.
        notes: what the report is to warn of.
        calibrating: seconds in which the model ran to see its modules' inputs.
    """

    work: _Work
    planned: list[Planned]
    refits: list[Refitted]
    blocks: list[FeedForward]
    config: PretrainedConfig | None
    notes: tuple[str, ...]
    calibrating: float

    def drift(self) -> Drift | None:
        """Return how far the outputs move."""
        model = self.work.model
        converted = partial(_converted, self.planned, model, self.refits, self.blocks)
        with torch.autocast(model.device.type, enabled=False):
            return measure(model, self.work.held_back, converted)


def _prepare(work: _Work, compression: Compression, modules: Mapping[str, Compression]) -> _Prepared:
    """Decompose the modules to convert and refit the layers that write to the residual stream; install nothing."""
    model = work.model
    sites = modules_to_convert(model, compression, not is_none(work.calibration), modules)
    device = working_device(compression.solver.device, sites, work.distributed)
    compression = compression.with_solver(device=device)
    modules = {name: own.with_solver(device=device) for name, own in modules.items()}
    blocks, config = _feed_forward(model, compression, work.used, work.held_back)
    refits = bool(blocks) or _refits(compression, work.calibration, work.used, work.held_back)
    calibrating: list[float] = []
    weights: dict[str, Tensor | None] = {}

    def decompose(chosen: Sequence[Site]) -> list[Planned]:
        return plan(
            model, chosen, compression, work.used, work.progress, calibrating.append,
            modules=modules, weights=weights, length=work.length,
        )  # fmt: skip

    with torch.autocast(model.device.type, enabled=False):  # a caller's would round the moments
        weights.update(head_weights(model, [site for site in sites if isinstance(site, DenseSite)], work.used))
        planned = plan_distributed(sites, decompose) if work.distributed else decompose(sites)
        refitted, notes = _refit(work, compression, planned, blocks) if refits else ([], ())
    return _Prepared(work, planned, refitted, blocks, config, notes, sum(calibrating))


def _refit(
    work: _Work, compression: Compression, planned: Sequence[Planned], blocks: Sequence[FeedForward]
) -> tuple[list[Refitted], tuple[str, ...]]:
    """Return the layers with new weights, and a note if those that nobody asked for cannot be had."""
    refits: list[Refitted] = []
    notes: tuple[str, ...] = ()
    dense = sharing_copy(work.model)
    narrower = {block.down: compression.dff or block.width for block in blocks}
    try:
        with _converted(planned):
            refits = refit(work.model, dense, work.used, work.held_back, work.progress, narrower=narrower)
    except CalibrationError as error:
        if compression.solver.refit or blocks:
            raise
        notes = (f"no layer was refitted: {error}",)
    return (of_first_process(refits) if work.distributed else refits), notes


def _choose(work: _Work, compression: Compression) -> tuple[Candidate, str]:
    """Choose widths and form by the drift of what is prepared on a part of the data; return them, and why.

    Raises:
        CompressionError: there is no data, or no widths keep so little.
    """
    if not (work.used and work.held_back):
        raise CompressionError(NO_DATA)
    few = replace(work, used=_part(work.used, TRIAL), held_back=_part(work.held_back, TRIAL // 4))

    def drift(candidate: Candidate) -> float:
        found = _prepare(few, candidate.compression, candidate.modules).drift()
        moved = inf if found is None else found.relative_error
        return float(gather_object([moved])[0]) if work.distributed else moved

    return choose(Layers(work.model, compression, work.length, work.used[0]), drift)


def _part(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """Return batches of about so many sequences, evenly spaced."""
    return list(batches[:: max(1, ceil(sum(map(sequence_count, batches)) / sequences))])


def _feed_forward(
    model: PreTrainedModel, compression: Compression, used: Sequence[Batch], held_back: Sequence[Batch]
) -> tuple[list[FeedForward], PretrainedConfig | None]:
    """Return the feed-forward blocks to make narrower, and the config of a model with those; none where none are.

    Raises:
        CompressionError: there is no data, or dff is beyond the width of a block.
        UnsupportedModelError: the model has no such blocks, or its config no width for them.
    """
    if compression.dff is None:
        return [], None
    if not (used and held_back):
        raise CompressionError("dff takes calibration data of at least two sequences; pass texts")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CompressionError(f"{name} holds NaN or infinite values; the checkpoint is damaged")
    blocks = find_feed_forward(model, used[0])
    for block in blocks:
        if compression.dff > block.width:
            raise CompressionError(
                f"{block.down} reads {block.width} neurons, and dff is {compression.dff}; pass up to {block.width}"
            )
    return blocks, narrower_config(model, blocks, compression.dff)


def _refits(compression: Compression, calibration: Any, used: Sequence[Batch], held_back: Sequence[Batch]) -> bool:
    """Return whether layers are to be refitted.

    Raises:
        CompressionError: they were asked for, and there is no data to refit them to.
    """
    wanted = compression.solver.refit
    if wanted and not (used and held_back):
        raise CompressionError("refit takes calibration data of at least two sequences; pass more, or leave it out")
    if wanted is None:
        wanted = not is_none(calibration) and not is_synthetic(calibration)
    return wanted and bool(used) and bool(held_back)


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def install_unset_(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: CalibrationOptions | None = None,
) -> None:
    """Check what `compress` checks before it decomposes, and install the same modules with weights that are not set.

    Whatever is to happen to the converted model can then be tried on its structure, before the work.

    Args:
        model: dense, changed in place; it cannot be run afterwards.
        compression: as for `compress`.
        calibration: as for `compress`; read, but not run.
        tokenizer: as for `compress`.
        options: as `calibration_options` of `compress`.

    Raises:
        UnsupportedModelError: as `compress`.
        CompressionError: as `compress`.
        CalibrationError: as `compress`.
    """
    options = options or CalibrationOptions()
    batches, _ = _data(model, compression, calibration, tokenizer, options)
    used, held_back = split_held_back(batches)
    _feed_forward(model, compression, used, held_back)
    _refits(compression, calibration, used, held_back)
    modules: Mapping[str, Compression] = {}
    if compression.keep is not None:
        if not (used and held_back):
            raise CompressionError(NO_DATA)
        length = typical_length(options, () if is_synthetic(calibration) else batches)
        first = next(Layers(model, compression, length, batches[0]).starts())
        compression, modules = first.compression, first.modules
    sites = modules_to_convert(model, compression, bool(batches), modules)
    working_device(compression.solver.device, sites)
    for site in sites:
        form = _form_of(site, modules.get(site.name, compression), bool(batches))
        _install([empty_plan(site, form)])


def _form_of(site: Site, compression: Compression, calibrated: bool) -> MapForm:
    """Return the form that a module will have, before heads are given widths of their own."""
    if isinstance(site, ValueSite):
        return NarrowValues.of(site, compression.dv or 0, site.value.bias is not None)
    content_bias = gets_content_bias(site, compression, calibrated)
    return form_for(compression.form, site).of(site, compression.dk or 0, content_bias)


def _data(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration,
    tokenizer: Any,
    options: CalibrationOptions,
) -> tuple[list[Batch], list[str]]:
    """Return the batches to calibrate on, and notes on what was left out."""
    return noted_batches(
        calibration,
        model,
        tokenizer,
        sequences=options.sequences,
        length=options.length,
        seed=compression.solver.seed,
    )


def _install(planned: Sequence[Planned]) -> None:
    """Install the replacements in all modules, or in none if one fails."""
    try:
        for item in planned:
            install_(item.site.module, item.form, item.parts)
    except BaseException:
        _uninstall(planned)
        raise


def _uninstall(planned: Sequence[Planned]) -> None:
    for item in planned:
        uninstall_(item.site.module, item.form.at, item.dense)


@contextmanager
def _converted(
    planned: Sequence[Planned],
    model: PreTrainedModel | None = None,
    refits: Sequence[Refitted] = (),
    blocks: Sequence[FeedForward] = (),
) -> Iterator[None]:
    """Make the model the converted one for a while, its refitted layers included."""
    _install(planned)
    try:
        if model is None:
            yield
        else:
            with refitted(model, refits, blocks):
                yield
    finally:
        _uninstall(planned)
