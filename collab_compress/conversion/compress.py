"""Make layers of a pretrained model narrower, or fewer, all or nothing.

A conversion finds the modules, gathers the moments of their inputs, solves for replacements, installs those in a copy
that shares the model's weights, refits what writes to the residual stream, measures how far the outputs moved, and
only then changes the model.
"""

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import (
    AttentionSite,
    DenseSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
    refuse_hooks,
    tokenizer_of,
    transformers_model,
)
from collab_compress.architectures.sites import read as read_projection
from collab_compress.attention import MapConfig, MapEdit, QKConfig, maps_of
from collab_compress.attention.projections import width_in
from collab_compress.calibration import Calibration
from collab_compress.calibration.batches import refuse_noise, sample_sequences, sequence_count
from collab_compress.checkpoint import all_or_nothing, is_quantized, path_in_base, record_edit_
from collab_compress.conversion.chain import layer_of
from collab_compress.conversion.copies import conversion_of, sharing_copy
from collab_compress.conversion.data import Data, read
from collab_compress.conversion.depth import Depth, deep_stacks, find_depth
from collab_compress.conversion.drift import drift_of
from collab_compress.conversion.feed_forward import (
    FeedForward,
    Structure,
    adopt_,
    block_report,
    narrower_config,
)
from collab_compress.conversion.fit import Refitted, check_weights, install_refits
from collab_compress.conversion.layers import Parts, convert_layers_, install_maps_
from collab_compress.conversion.maps import (
    READING,
    Planned,
    Progress,
    Site,
    Task,
    empty_plan,
    replacement,
    silent,
    warnings_of,
)
from collab_compress.conversion.report import Drift, ModuleReport, Report, ValueReport
from collab_compress.conversion.widths import MEASURED, Choice, choose_widths
from collab_compress.errors import CompressionError, UnsupportedModelError, check_type, one_line
from collab_compress.heads.sharding import refuse_unwritable
from collab_compress.options import KEEP, CalibrationOptions, Compression

_logger = logging.getLogger(__name__)
HALF = Compression(keep=KEEP)


@torch.inference_mode(False)
def compress(
    model: PreTrainedModel,
    compression: Compression = HALF,
    calibration: Calibration = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
) -> Report:
    """Convert the attention modules of `model` into collaborative form, in place and all or nothing.

    Every module is decomposed before any is replaced, so an error or an interrupt leaves the model as it was. Modules
    that are still dense can be converted by a further call, so that widths differ by layer and kind; so can values
    after queries and keys.

    With `dk`, shared projections of width R, a mixing matrix and, where queries have a bias, content biases replace
    the query and key projections of each module ("Multi-Head Attention: Collaborate Instead of Concatenate", eqs.
    7–13). Each head reads `head_dim` of the R channels; all of them in the paper.
    With `dv`, each head's values keep the channels that matter most, and the output projection is fitted to them
    (`narrow_values`). With `dff`, feed-forward blocks keep the neurons that matter most.
    Given texts or batches, the layers that write to the residual stream (output projections, and second layers of
    feed-forward blocks) are then refitted towards the dense model's hidden states (`Solver.refit`). All other weights
    stay.
    With `layers`, the layers that matter least are removed first (`conversion/depth.py`); the widths are those of the
    others.

    Args:
        model: a Transformers model, or a SentenceTransformer that holds one; dtype and device are kept.
        compression: widths or the share to keep, and how it is computed; half of the layers' operations by default.
        calibration: data that says which input directions matter (`calibration_batches`), of which an eighth is held
            back to measure drift: "auto" (for a model that reads English, texts that come with the package; else
            random tokens or noise), a file of texts, texts or text pairs, batches, or None.
        tokenizer: of the model; not needed for batches, None, and a SentenceTransformer.
        progress: called with what is being done, how many layers are done, and how many there are, or None.
        calibration_options: number and length of the calibration sequences.

    Returns:
        Errors, costs and drift.

    Raises:
        UnsupportedModelError: the model, or a module of it, cannot be converted.
        CompressionError: no stack has more than `layers`, dk or dv beyond H·d, weights that are not finite, a module
            that is already converted, a quantized model.
        CalibrationError: calibration data is missing or unusable, or too little; "auto" for a model of images or
            sounds whose neurons, layers or widths are to be chosen.
    """
    check_type("compression", compression, Compression, CompressionError)
    if tokenizer is None:
        tokenizer = tokenizer_of(model)
    model = transformers_model(model)
    started = perf_counter()
    devices = [model.device] if model.device.type == "cuda" else []
    with conversion_of(model), torch.random.fork_rng(devices):  # new layers are initialised before they are filled
        device = working_device(compression.solver.device)
        _refuse_early(model, compression, calibration)
        dense = sharing_copy(model)  # so that other threads may run the model meanwhile
        progress = progress or silent
        progress(READING, 0, None)
        data = read(dense, calibration, tokenizer, calibration_options, compression.solver.seed)
        job = _Job(dense, data, progress)
        placed = compression.with_solver(device=device)
        chosen, choice, by_module = placed, "", {}
        if compression.keep is not None:
            widths = _choose(job, placed)
            chosen, by_module, choice = widths.compression, widths.modules, widths.reason
        converted = _convert_copy(job, chosen, by_module)
        parameters_before, ties = model.num_parameters(), tied_weights(model)
        feed_forward = [
            block_report(model, block, chosen.dff or block.width, job.data.length) for block in converted.blocks
        ]
        with all_or_nothing(model):
            _install_conversion(model, converted)
    untied = _untied({group for group in map(converted.remaining, ties) if len(group) > 1} - tied_weights(model))
    warnings = (*data.notes, *converted.notes, *untied, *_warnings(job, compression, converted))
    for warning in warnings:
        _logger.warning(warning)
    renamed = converted.renamed
    reports = [replace(item.report, name=renamed(item.report.name)) for item in converted.planned]
    alike = all(other == chosen for other in by_module.values())
    return Report(
        modules=tuple(report for report in reports if isinstance(report, ModuleReport)),
        parameters_before=parameters_before,
        parameters_after=model.num_parameters(),
        length=job.data.length,
        drift=converted.drift,
        seconds=perf_counter() - started,
        threads=torch.get_num_threads(),
        sequences=sum(map(sequence_count, job.data.used)),
        warnings=warnings,
        values=tuple(report for report in reports if isinstance(report, ValueReport)),
        compression=(chosen if alike else compression).with_solver(device=compression.solver.device),
        choice=choice,
        refits=tuple(replace(fit.report, name=renamed(fit.report.name)) for fit in converted.refits),
        feed_forward=tuple(replace(block, name=renamed(block.name)) for block in feed_forward),
        removed_layers=tuple(converted.depth.removed) if converted.depth else (),
    )


@dataclass(frozen=True)
class _Job:
    """A model to convert, and its data."""

    model: PreTrainedModel  # dense, a copy that shares the tensors of the model to convert
    data: Data
    progress: Progress = silent

    @cached_property
    def structure(self) -> Structure:
        """The structure of the dense model."""
        return Structure(self.model, self.data.used[0])


def find_tasks(
    model: PreTrainedModel,
    compression: Compression,
    by_module: Mapping[str, Compression] | None = None,
) -> list[Task]:
    """Return the maps to convert, scores first, after checking that all of them can be converted.

    Args:
        by_module: path of a module → its own compression, where widths differ.
    """
    refuse_unconvertible(model, "compress")
    where = (model, compression.modules)
    attention = find_attention(*where)
    own = {site.name: (by_module or {}).get(site.name, compression) for site in attention}
    for site in attention:
        _refuse_converted(site, own[site.name])
    dense = [name for name, chosen in own.items() if chosen.dk is None]  # as the scores of rotary modules by keep
    scores = find_dense_attention(*where, dense) if len(dense) < len(own) else []
    values = find_dense_values(*where) if compression.dv is not None else []
    sites: list[Site] = [*scores, *values]
    tasks = [Task(site, own[site.name]) for site in sites]
    for task in tasks:
        site = task.site
        if isinstance(site, DenseSite):
            _check_width(site, "dk", task.compression.dk, () if site.family.rotary else (site.query, site.key))
            _check_solver(site, task.compression)
            config = task.config()
            if isinstance(config, QKConfig):
                config.check_room(site.family)
            _check_weights(site, ((site.family.query, site.query), (site.family.key, site.key)))
        else:
            _check_width(site, "dv", task.compression.dv, (site.value,))
            _check_weights(site, ((site.family.value, site.value), (site.family.output, site.output)))
        _refuse_joined(site)
    return tasks


def _refuse_joined(site: AttentionSite) -> None:
    """Refuse projections that become part of a converted module's one layer, if that would lose anything."""
    family = site.family
    if family.forward == "stock":
        return
    for path in (family.query, family.key, family.value):
        if site.kind != "cross" or path != family.query:
            projection = read_projection(site.name, site.module, family, path, nn.Linear)
            refuse_hooks(site.path(path), getattr(projection, "layer", projection))


def _refuse_early(model: PreTrainedModel, compression: Compression, calibration: Calibration) -> None:
    """Refuse what cannot be converted, before any data are read."""
    if compression.keep is None:
        find_tasks(model, compression)
    else:  # may choose any width of each module
        refuse_unconvertible(model, "compress")
        narrowest = {
            site.name: Compression(dk=None if site.family.rotary else site.heads, dv=site.key_value_heads)
            for site in find_attention(model, compression.modules)
        }
        find_tasks(model, Compression(dk=1, dv=1, modules=compression.modules), narrowest)
    if compression.layers is not None:
        deep_stacks(model, compression.layers)
    chooses = compression.keep is not None or compression.dff is not None or compression.layers is not None
    if chooses:
        refuse_noise(model, calibration)


def refuse_unconvertible(model: PreTrainedModel, caller: str) -> None:
    """Refuse a model whose layers can be neither changed nor measured, whatever the widths.

    Raises:
        CompressionError: it is quantized or sharded, was made in inference mode, has a config that cannot be copied,
            or attends by another implementation than "eager" or "sdpa".
    """
    if is_quantized(model):
        raise CompressionError(f"{type(model).__name__} is quantized; convert the unquantized checkpoint instead")
    refuse_unwritable(model, caller, CompressionError)
    _check_config(model)
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise CompressionError(
            f"attention is converted as 'eager' or 'sdpa', the model is set to {implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )


def _check_config(model: PreTrainedModel) -> None:
    """Refuse a config that cannot be copied: the edit is recorded in a copy."""
    try:
        copy.deepcopy(model.config)
    except Exception as error:  # whatever an attribute raises
        raise CompressionError(
            f"the config of {type(model).__name__} cannot be copied ({one_line(error)}); remove the attribute that "
            "cannot be copied"
        ) from error


def _refuse_converted(site: AttentionSite, compression: Compression) -> None:
    widths = (compression.dk, "queries and keys"), (compression.dv, "values")
    for converted, (width, what) in zip(maps_of(site.module), widths, strict=True):
        if width is not None and converted is not None:
            raise CompressionError(
                f"{site.name}: its {what} are already converted; leave it out by modules, expand the model "
                "first, or start from the dense checkpoint"
            )


def _check_width(site: AttentionSite, name: str, width: int | None, projections: Iterable[Any]) -> None:
    """Refuse a width beyond the channels of all heads, of which each has no more than its projections read."""
    heads, channels = site.key_value_heads, min([site.head_width, *map(width_in, projections)])
    full = heads * channels
    if width is not None and width > full and width != site.key_value_width:
        kind = "key–value heads" if heads < site.heads else "heads"
        raise CompressionError(
            f"{site.name}: {name} is {width}, but {heads} {kind} × {channels} = {full} is exact already; pass {name} "
            f"between 1 and {full}"
        )


def _check_solver(site: AttentionSite, compression: Compression) -> None:
    """Refuse other solvers and another width of heads for a rotary module."""
    if not site.family.rotary:
        return
    if compression.head_dim is not None:
        raise CompressionError(f"{site.name}: heads with a rotary embedding keep their width; leave out head_dim")
    if compression.solver.method != "als":
        raise CompressionError(f"{site.name}: other solvers do not apply to rotary embeddings; leave out solver")


def _check_weights(site: AttentionSite, projections: Iterable[tuple[str, Any]]) -> None:
    for path, projection in projections:
        layer = getattr(projection, "layer", projection)  # of a fused layer
        refuse_hooks(site.path(path), layer, stays=path == site.family.output)
        check_weights((f"{site.path(path)}.{name}", weight) for name, weight in projection.named_parameters())


def working_device(device: str | None) -> str | None:
    """Return the device to decompose on; None, if none is given, leaves each module where its weights are.

    "cuda" is each process's own GPU if a launcher started several on one machine.

    Raises:
        CompressionError: there is no such device.
    """
    if device is None:
        return None
    rank = os.environ.get("LOCAL_RANK", "")
    if device == "cuda" and rank.isdecimal() and int(rank) < torch.cuda.device_count():
        device = f"cuda:{rank}"
    try:
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CompressionError(f"device {device!r} cannot be used: {one_line(error)}") from error
    return device


def _choose(job: _Job, compression: Compression) -> Choice:
    """Choose widths by what they lose on a part of the data."""
    if not job.data.held_back:
        raise CompressionError(
            "keep chooses by what is lost on calibration data; pass at least two sequences, best your own texts"
        )
    check_weights(job.model.named_parameters())
    few = sample_sequences(job.data.used, MEASURED)
    with torch.autocast(job.model.device.type, enabled=False):
        return choose_widths(job.structure, compression, few, job.data.length, job.progress)


@dataclass(frozen=True)
class _Converted:
    """A conversion that is not yet installed in the model."""

    planned: list[Planned]  # replacements of attention maps
    blocks: list[FeedForward]  # that become narrower
    config: PretrainedConfig | None  # of the model with narrower blocks
    refits: Sequence[Refitted] = ()
    drift: Drift | None = None  # None without data
    notes: tuple[str, ...] = ()  # for the report
    depth: Depth | None = None  # None where all layers stay

    def renamed(self, name: str) -> str:
        """Return the path that a module has in the converted model."""
        return self.depth.renamed(name) if self.depth else name

    def remaining(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some parameters that the converted model keeps, by the names that they have there."""
        removed = self.depth.removed if self.depth else ()
        return frozenset(self.renamed(name) for name in names if layer_of(name) not in removed)


def _convert_copy(job: _Job, compression: Compression, by_module: Mapping[str, Compression]) -> _Converted:
    """Compute the conversion in a copy that shares the model's weights."""
    model, data = job.model, job.data
    tasks = find_tasks(model, compression, by_module)
    with torch.autocast(model.device.type, enabled=False):  # a caller's would round the moments
        parts, config, notes, depth = _parts(job, compression, tasks)
        if not data.used:
            planned = []
            for number, task in enumerate(tasks):
                job.progress(f"fitting {task.site.name}", number, len(tasks))
                planned.append(replacement(task, None, None, data.length))
            job.progress("fitted all layers", len(tasks), len(tasks))
            return _Converted(planned, [], None)
        converted = sharing_copy(model)
        if depth is not None and (note := depth.drop_(converted)):
            notes = (*notes, note)
        planned, refits = convert_layers_(
            converted, model, parts, data.used, data.held_back, length=data.length, progress=job.progress
        )
        job.progress("measuring drift", 0, None)
        drift = drift_of(converted, model, data.held_back)
    return _Converted(planned, list(parts.blocks), config, refits, drift, notes, depth)


def _parts(
    job: _Job, compression: Compression, tasks: list[Task]
) -> tuple[Parts, PretrainedConfig | None, tuple[str, ...], Depth | None]:
    """Return what is to be converted, the config of a model with narrower blocks, notes for the report, layers."""
    model, data, dff = job.model, job.data, compression.dff
    refits = wants_refit(data, compression)
    blocks, config = narrower_blocks(job, dff)
    takes_layers = refits or compression.layers is not None
    if not data.used or not (takes_layers or any(not task.is_exact for task in tasks)):
        return Parts(tasks), config, (), None
    if takes_layers:
        check_weights(model.named_parameters())
    try:
        _ = job.structure.layers  # raises if they cannot be called alone
        writers, depth = job.structure.writers if refits else [], None
        if compression.layers is not None:
            depth = find_depth(job.structure, compression.layers, data, refits, job.progress)
    except UnsupportedModelError as error:
        if dff is not None or compression.layers is not None or compression.solver.refit:
            raise
        notes = (f"no layer was refitted: {error}",) if refits else ()
        return Parts(tasks, in_layers=False), None, notes, None
    removed = () if depth is None else depth.removed
    parts = Parts(
        [task for task in tasks if layer_of(task.site.name) not in removed],
        writers,
        [block for block in blocks if block.writer.layer not in removed],
        dff or 0,
        removed,
        {} if depth is None else depth.targets,
    )
    return parts, config, (), depth


def _warnings(job: _Job, compression: Compression, converted: _Converted) -> list[str]:
    """Return warnings of few or random data, and those of `warnings_of`."""
    vectors = {refitted.report.name: refitted.report.vectors for refitted in converted.refits}
    blocks = [(block.down, vectors[block.down], block.width) for block in converted.blocks]
    warnings = warnings_of(converted.planned, compression, blocks)
    chosen = [what for what, some in (("neurons", blocks), ("layers", converted.depth)) if some]
    if chosen and not job.data.refit:
        random, data = "noise alone, after which a model may be useless", "images or sounds like yours"
        if job.model.main_input_name == "input_ids":
            random = "random tokens alone, which loses more"
            data = "texts like yours, or on texts that a language model has 'generated'"
        warnings.append(f"{' and '.join(chosen)} were chosen on {random}; calibrate on {data}")
    return warnings


def tied_weights(model: PreTrainedModel) -> set[frozenset[str]]:
    """Return the names of each parameter that several layers hold; a layer in several places counts once."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(id(parameter), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _untied(groups: set[frozenset[str]]) -> list[str]:
    """Return a warning of weights that were one and no longer are, or none."""
    pairs = sorted(sorted(group)[:2] for group in groups)
    return [
        f"{len(pairs)} weights that several layers shared, such as {first} and {second}, are separate now, which "
        "takes more parameters"
        for first, second in pairs[:1]
    ]


def narrower_blocks(job: _Job, dff: int | None) -> tuple[list[FeedForward], PretrainedConfig | None]:
    """Return the feed-forward blocks to make narrower, and the config of a model with those.

    Raises:
        CompressionError: a block is narrower already.
        UnsupportedModelError: the model has no blocks that can be made narrower.
    """
    if dff is None:
        return [], None
    blocks = job.structure.blocks
    for block in blocks:
        if dff > block.width:
            raise CompressionError(
                f"{block.down} reads {block.width} neurons, and dff is {dff}; pass up to {block.width}"
            )
    return blocks, narrower_config(job.model, blocks, dff)


def wants_refit(data: Data, compression: Compression) -> bool:
    """Return whether layers are refitted.

    Raises:
        CompressionError: they should be, or layers or neurons are to be chosen, and there are too few data.
    """
    needs = {"layers": compression.layers, "dff": compression.dff, "refit": compression.solver.refit}
    for name, value in needs.items():
        if value and not data.held_back:
            raise CompressionError(f"{name} takes calibration data of at least two sequences; pass texts")
    if compression.dff is not None or (compression.layers is not None and compression.solver.refit is None):
        return True
    return bool(data.held_back) and (data.refit if compression.solver.refit is None else compression.solver.refit)


def _install_conversion(model: PreTrainedModel, converted: _Converted) -> None:
    """Install a conversion in the model, in place, and record it for checkpoints."""
    modules = [model.get_submodule(item.site.name) for item in converted.planned]
    install_maps_(model, converted.planned)
    install_refits(model, converted.refits, converted.blocks)
    if converted.config is not None:
        adopt_(model, converted.config)
    if converted.depth is not None:
        converted.depth.drop_(model)
        converted.depth.renumber_(model)
    configs: dict[str, dict[str, MapConfig]] = {}
    for module, item in zip(modules, converted.planned, strict=True):
        configs.setdefault(item.map.config.kind, {})[path_in_base(model, module)] = item.map.config
    for kind, of_kind in configs.items():
        record_edit_(model, MapEdit(kind, of_kind))


def install_unset_(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: CalibrationOptions | None = None,
) -> None:
    """Check what `compress` checks before it decomposes, and install the same modules with uninitialised weights.

    What is to be done with the converted model can then be tried on its structure, before the work. The model cannot
    be run afterwards. Arguments and errors are those of `compress`.
    """
    _refuse_early(model, compression, calibration)
    job = _Job(model, read(model, calibration, tokenizer, options, compression.solver.seed))
    wants_refit(job.data, compression)
    narrower_blocks(job, compression.dff)
    by_module: Mapping[str, Compression] = {}
    if compression.keep is not None:
        widths = _choose(job, compression)
        compression, by_module = widths.compression, widths.modules
    tasks = find_tasks(model, compression, by_module)
    working_device(compression.solver.device)
    for task in tasks:
        install_maps_(model, [empty_plan(task.site, task.config())])
