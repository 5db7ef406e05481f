"""Make layers of a pretrained model narrower, or fewer, all or nothing.

A conversion goes from an inventory of the model (`inventory`) to widths and layers (`widths`, `depth`), to new
weights in a copy that shares those of the model (`sequential`), and only then into the model.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import tokenizer_of, transformers_model
from collab_compress.attention import MapConfig, MapEdit
from collab_compress.calibration import Calibration
from collab_compress.calibration.batches import refuse_noise, sample_sequences, sequence_count
from collab_compress.checkpoint import all_or_nothing, path_in_base, record_edit_
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.cost import block_cost
from collab_compress.conversion.data import Data, read
from collab_compress.conversion.depth import Depth, deep_stacks, find_depth
from collab_compress.conversion.feed_forward import FeedForward, adopt_, narrower_config
from collab_compress.conversion.inventory import Inventory, refuse_unconvertible
from collab_compress.conversion.layers import layer_of
from collab_compress.conversion.maps import (
    READING,
    Planned,
    Progress,
    Task,
    empty_plan,
    replacement,
    silent,
    warnings_of,
)
from collab_compress.conversion.output_error import measure_output_error
from collab_compress.conversion.report import OutputError, PartReport, Report
from collab_compress.conversion.sequential import (
    Parts,
    Refit,
    check_weights,
    convert_layers_,
    install_maps_,
    install_refits,
)
from collab_compress.conversion.widths import MAX_LOSS_SEQUENCES, Choice, choose_widths
from collab_compress.errors import CompressionError, UnsupportedModelError, check_type, one_line
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
            back to measure the output error: "auto" (for a model that reads English, texts that come with the
            package; else random tokens or noise), a file of texts, texts or text pairs, batches, or None.
        tokenizer: of the model; not needed for batches, None, and a SentenceTransformer.
        progress: called with what is being done, how many layers are done, and how many there are, or None.
        calibration_options: number and length of the calibration sequences.

    Returns:
        Errors, costs and output error.

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
    with torch.random.fork_rng(devices):  # new layers are initialised before they are filled
        device = working_device(compression.solver.device)
        _refuse_early(model, compression, calibration)
        dense = sharing_copy(model)  # so that other threads may run the model meanwhile
        progress = progress or silent
        progress(READING, 0, None)
        data = read(dense, calibration, tokenizer, calibration_options, compression.solver.seed)
        inventory = Inventory(dense, data.used[0] if data.used else None, compression.modules)
        with torch.autocast(model.device.type, enabled=False):  # a caller's would round the moments
            choice = _chosen(inventory, data, compression.with_solver(device=device), progress)
            conversion = _converted(inventory, data, choice, progress)
        before, ties = model.num_parameters(), tied_weights(model)
        with all_or_nothing(model):
            conversion.install_(model)
    untied = _untied({group for group in map(conversion.remaining, ties) if len(group) > 1} - tied_weights(model))
    warnings = (*data.notes, *conversion.notes, *untied, *_warnings(dense, data, compression, conversion))
    for warning in warnings:
        _logger.warning(warning)
    return Report(
        parts=tuple(replace(report, name=conversion.renamed(report.name)) for report in conversion.reports),
        parameters_before=before,
        parameters_after=model.num_parameters(),
        length=data.length,
        output_error=conversion.output_error,
        seconds=perf_counter() - started,
        threads=torch.get_num_threads(),
        sequences=sum(map(sequence_count, data.used)),
        warnings=warnings,
        compression=choice.whole(compression).with_solver(device=compression.solver.device),
        choice=choice.reason,
        refits=tuple(replace(fit.report, name=conversion.renamed(fit.report.name)) for fit in conversion.refits),
        removed_layers=tuple(conversion.depth.removed) if conversion.depth else (),
    )


def _refuse_early(model: PreTrainedModel, compression: Compression, calibration: Calibration) -> None:
    """Refuse what cannot be converted, before any data are read."""
    refuse_unconvertible(model, "compress")
    inventory = Inventory(model, modules=compression.modules)
    if compression.keep is None:
        inventory.tasks(compression)
    else:  # may choose any width of each module
        inventory.refuse_all()
    if compression.layers is not None:
        deep_stacks(model, compression.layers)
    if compression.keep is not None or compression.dff is not None or compression.layers is not None:
        refuse_noise(model, calibration)


def _chosen(inventory: Inventory, data: Data, compression: Compression, progress: Progress) -> Choice:
    """Return the widths of all modules: as passed, or chosen by what they lose on a part of the data."""
    if compression.keep is None:
        return Choice(compression)
    if not data.held_back:
        raise CompressionError(
            "keep chooses by what is lost on calibration data; pass at least two sequences, best your own texts"
        )
    check_weights(inventory.model.named_parameters())
    few = sample_sequences(data.used, MAX_LOSS_SEQUENCES)
    return choose_widths(inventory, compression, few, data.length, progress)


@dataclass(frozen=True)
class Conversion:
    """A conversion that is ready to be installed.

    Args:
        maps: replacements of attention maps.
        reports: on each part.
        blocks: feed-forward blocks that become narrower.
        config: of the model with narrower blocks; None where they stay.
        refits: new weights of residual linear layers.
        depth: which layers go; None where all stay.
        output_error: error of the outputs; None without data.
        notes: sentences for the report.
    """

    maps: Sequence[Planned]
    reports: Sequence[PartReport]
    blocks: Sequence[FeedForward] = ()
    config: PretrainedConfig | None = None
    refits: Sequence[Refit] = ()
    depth: Depth | None = None
    output_error: OutputError | None = None
    notes: Sequence[str] = ()

    def renamed(self, name: str) -> str:
        """Return the path that a module has in the converted model."""
        return self.depth.renamed(name) if self.depth else name

    def remaining(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some parameters that the converted model keeps, by the names that they have there."""
        removed = self.depth.removed if self.depth else ()
        return frozenset(self.renamed(name) for name in names if layer_of(name) not in removed)

    def install_(self, model: PreTrainedModel) -> None:
        """Install the conversion in the model, in place, and record it for checkpoints."""
        modules = [model.get_submodule(item.site.name) for item in self.maps]
        install_maps_(model, self.maps)
        install_refits(model, self.refits, self.blocks)
        if self.config is not None:
            adopt_(model, self.config)
        if self.depth is not None:
            self.depth.drop_(model)
            self.depth.renumber_(model)
        configs: dict[str, dict[str, MapConfig]] = {}
        for module, item in zip(modules, self.maps, strict=True):
            configs.setdefault(item.map.config.kind, {})[path_in_base(model, module)] = item.map.config
        for kind, of_kind in configs.items():
            record_edit_(model, MapEdit(kind, of_kind))


def _converted(inventory: Inventory, data: Data, choice: Choice, progress: Progress) -> Conversion:
    """Compute a conversion in a copy that shares the model's weights."""
    model, compression = inventory.model, choice.compression
    tasks = inventory.tasks(compression, choice.modules)
    parts, config, depth, notes = _parts(inventory, data, compression, tasks, progress)
    if not data.used:
        maps = []
        for number, task in enumerate(tasks):
            progress(f"fitting {task.site.name}", number, len(tasks))
            maps.append(replacement(task, None, None, data.length))
        progress("fitted all layers", len(tasks), len(tasks))
        return Conversion(maps, [item.report for item in maps])
    converted = sharing_copy(model)
    if depth is not None and (note := depth.drop_(converted)):
        notes = (*notes, note)
    maps, refits = convert_layers_(
        converted, model, parts, data.used, data.held_back, length=data.length, progress=progress
    )
    blocks = [PartReport(**vars(block_cost(model, block, parts.dff, data.length))) for block in parts.blocks]
    reports = [*(item.report for item in maps), *blocks]
    progress("measuring output error", 0, None)
    output_error = measure_output_error(converted, model, data.held_back)
    return Conversion(maps, reports, parts.blocks, config, refits, depth, output_error, notes)


def _parts(
    inventory: Inventory, data: Data, compression: Compression, tasks: list[Task], progress: Progress
) -> tuple[Parts, PretrainedConfig | None, Depth | None, Sequence[str]]:
    """Return what to convert, the config of a model with narrower blocks, the layers that go, and notes."""
    refits = wants_refit(data, compression)
    blocks, config = narrower_blocks(inventory, compression.dff)
    takes_layers = refits or compression.layers is not None
    if not data.used or not (takes_layers or any(not task.is_exact for task in tasks)):
        return Parts(tasks), config, None, ()
    if takes_layers:
        check_weights(inventory.model.named_parameters())
    depth = None
    try:
        _ = inventory.layers  # raises if they cannot be called alone
        linears = inventory.residual_linears if refits else []
        if compression.layers is not None:
            depth = find_depth(inventory, compression.layers, data, refits, progress)
    except UnsupportedModelError as error:
        if compression.dff is not None or compression.layers is not None or compression.solver.refit:
            raise
        return Parts(tasks, in_layers=False), None, None, [f"no layer was refitted: {error}"] if refits else ()
    parts = Parts(tasks, linears, blocks, compression.dff or 0)
    return parts if depth is None else parts.without(depth.removed, depth.targets), config, depth, ()


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


def narrower_blocks(inventory: Inventory, dff: int | None) -> tuple[list[FeedForward], PretrainedConfig | None]:
    """Return the feed-forward blocks to make narrower, and the config of a model with those.

    Raises:
        CompressionError: a block is narrower already.
        UnsupportedModelError: the model has no blocks that can be made narrower.
    """
    if dff is None:
        return [], None
    for block in inventory.blocks:
        if dff > block.width:
            raise CompressionError(
                f"{block.down} reads {block.width} neurons, and dff is {dff}; pass up to {block.width}"
            )
    return inventory.blocks, narrower_config(inventory.model, inventory.blocks, dff)


def _warnings(model: PreTrainedModel, data: Data, compression: Compression, conversion: Conversion) -> list[str]:
    """Return warnings of few or random data, and those of `warnings_of`."""
    vectors = {fit.report.name: fit.report.vectors for fit in conversion.refits}
    blocks = [(block.down, vectors[block.down], block.width) for block in conversion.blocks]
    warnings = warnings_of(conversion.maps, compression, blocks)
    chosen = [what for what, some in (("neurons", blocks), ("layers", conversion.depth)) if some]
    if chosen and not data.refit:
        random, texts = "noise alone, after which a model may be useless", "images or sounds like yours"
        if model.main_input_name == "input_ids":
            random = "random tokens alone, which loses more"
            texts = "texts like yours, or on texts that a language model has 'generated'"
        warnings.append(f"{' and '.join(chosen)} were chosen on {random}; calibrate on {texts}")
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
    data = read(model, calibration, tokenizer, options, compression.solver.seed)
    inventory = Inventory(model, data.used[0] if data.used else None, compression.modules)
    wants_refit(data, compression)
    narrower_blocks(inventory, compression.dff)
    choice = _chosen(inventory, data, compression, silent)
    working_device(compression.solver.device)
    for task in inventory.tasks(choice.compression, choice.modules):
        install_maps_(model, [empty_plan(task.site, task.config())])
