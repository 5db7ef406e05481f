"""Make layers of a pretrained model narrower, or fewer, all or nothing.

A conversion goes from an inventory of the model (`inventory`) to widths and layers (`widths`, `layer_search`), to
new weights in a copy that shares those of the model (`sequential`), and only then into the model.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import tokenizer_of, transformers_model
from collab_compress.attention.projections import width_in
from collab_compress.calibration import Calibration
from collab_compress.calibration.batches import sequence_count
from collab_compress.calibration.source import SplitData, read_calibration
from collab_compress.calibration.stacks import layer_of
from collab_compress.checkpoint import all_or_nothing
from collab_compress.checkpoint.edits import configs_of, own_configs_
from collab_compress.conversion.agreement import measure
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.depth import Depth, deep_stacks
from collab_compress.conversion.feed_forward import FeedForward, adopt_, narrower_config
from collab_compress.conversion.inventory import Inventory, check_weights, refuse_early
from collab_compress.conversion.layer_search import find_depth
from collab_compress.conversion.maps import (
    READING,
    Progress,
    Replacement,
    empty_replacement,
    record_maps_,
    rounded_widths,
    silent,
)
from collab_compress.conversion.reading import Reading
from collab_compress.conversion.report import Agreement, OutputError, PartReport, RefitReport, Report
from collab_compress.conversion.residual import ResidualLinear
from collab_compress.conversion.sequential import Parts, Refit, convert_layers_, install_maps_, install_refits
from collab_compress.conversion.widths import Choice, choose_widths
from collab_compress.devices import EMULATED, emulates_bfloat16, forked_rng
from collab_compress.errors import CompressionError, UnsupportedModelError, check_type, one_line
from collab_compress.options import KEEP, CalibrationOptions, Compression

_logger = logging.getLogger(__name__)
MIN_VECTORS_PER_DIM = 4  # with fewer vectors for each dimension of the inputs, a covariance is mostly chance
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
    With `layers`, the layers that matter least are removed first (`conversion/layer_search.py`); the widths are those
    of the others.

    Args:
        model: a Transformers model, or a SentenceTransformer that holds one; dtype and device are kept.
        compression: widths or the share to keep, and how it is computed; half of the layers' operations by default.
        calibration: data that says which input directions matter (`calibration_batches`), of which an eighth is held
            back to measure the output error: "auto" (for a model that reads English, texts that come with the
            package; else random tokens), a file of texts, texts or text pairs, batches, or None. Models of images or
            sounds need batches of their processor, or None.
        tokenizer: of the model; not needed for batches, None, and a SentenceTransformer.
        progress: called with what is being done, how many layers are done, and how many there are, or None.
        calibration_options: number and length of the calibration sequences.

    Returns:
        Errors, costs, what of the dense model's results stays, and the output error.

    Raises:
        UnsupportedModelError: the model, or a module of it, cannot be converted.
        CompressionError: no stack has more than `layers`, dk or dv beyond H·d, weights that are not finite, a module
            that is already converted, a quantized model.
        CalibrationError: calibration data is missing or unusable, or too little.
    """
    check_type("compression", compression, Compression, CompressionError)
    if tokenizer is None:
        tokenizer = tokenizer_of(model)
    wrapper, model = model, transformers_model(model)
    started = perf_counter()
    with forked_rng(model.device):  # new layers are initialised before they are filled
        device = working_device(compression.solver.device)
        refuse_early(model, compression)
        dense = sharing_copy(model)  # so that other threads may run the model meanwhile
        progress = progress or silent
        progress(READING, 0, None)
        data = read_calibration(dense, calibration, tokenizer, calibration_options, compression.solver.seed)
        inventory = Inventory(dense, data.used[0] if data.used else None, compression.modules)
        if compression.layers is not None and data.used:
            deep_stacks(dense, inventory.stacks, compression.layers)  # refuses before any width is chosen
        with torch.autocast(model.device.type, enabled=False):  # a caller's would round the moments
            choice = choose_widths(inventory, compression.with_solver(device=device), data, progress)
            conversion = _convert(inventory, data, choice, progress, Reading.of(wrapper, dense, tokenizer))
        conversion.install_(model)
    warnings = conversion.warnings(compression, data, dense, model)
    for warning in warnings:
        _logger.warning(warning)
    return Report(
        parts=conversion.in_model(conversion.reports),
        parameters_before=dense.num_parameters(),
        parameters_after=model.num_parameters(),
        length=data.length,
        output_error=conversion.output_error,
        seconds=perf_counter() - started,
        threads=torch.get_num_threads(),
        sequences=sum(map(sequence_count, data.used)),
        warnings=warnings,
        compression=choice.whole(compression).with_solver(device=compression.solver.device),
        choice=choice.reason,
        refits=conversion.in_model([fit.report for fit in conversion.refits]),
        removed_layers=tuple(conversion.depth.removed),
        agreement=conversion.agreement,
    )


Named = TypeVar("Named", PartReport, RefitReport)


@dataclass(frozen=True)
class Conversion:
    """A conversion that is ready to be installed. Names are those of the dense model."""

    maps: Sequence[Replacement]  # replacements of attention maps
    refits: Sequence[Refit]  # new weights of residual linear layers
    blocks: Sequence[FeedForward]  # that become narrower
    config: PretrainedConfig | None  # of the model with narrower blocks; None where they stay
    depth: Depth  # which layers are removed
    reports: Sequence[PartReport]  # on each part
    output_error: OutputError | None  # None without data
    agreement: Agreement | None  # None where it cannot be told
    notes: Sequence[str]  # sentences for the report

    def in_model(self, reports: Sequence[Named]) -> tuple[Named, ...]:
        """Return reports by the names of the converted model."""
        return tuple(replace(report, name=self.depth.renamed(report.name)) for report in reports)

    def remaining(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of these parameters the converted model keeps, by its names."""
        return frozenset(self.depth.renamed(name) for name in names if not layer_of(name, self.depth.removed))

    def warnings(
        self, passed: Compression, data: SplitData, dense: PreTrainedModel, model: PreTrainedModel
    ) -> tuple[str, ...]:
        """Return what the report warns of; `dense` is the model before the conversion, `model` the converted one."""
        configs = [item.map.config for item in self.maps]
        chosen = {"neurons": self.blocks, "layers": self.depth.removed}
        return (
            *data.notes,
            *self.notes,
            *_untied_weights(map(self.remaining, _tied_weights(dense)), _tied_weights(model)),
            *([] if passed.keep is not None else rounded_widths(configs, passed.dk, passed.dv)),
            *self._few_vectors(),
            *_breakdowns(self.in_model(self.reports)),
            *_random_choices([] if data.refit else [what for what, some in chosen.items() if some]),
        )

    def _few_vectors(self) -> list[str]:
        """Warn of modules whose moments are of few vectors."""
        by_name = {fit.report.name: fit.report.vectors for fit in self.refits}
        seen = [(block.down, by_name[block.down], block.width) for block in self.blocks]
        for item in self.maps:
            for vectors, (projection, _) in zip(item.report.vectors, item.site.inputs, strict=True):
                seen.append((item.site.name, vectors, width_in(projection)))
        few = [entry for entry in seen if 0 < entry[1] < MIN_VECTORS_PER_DIM * entry[2]]
        if not few:
            return []
        name, vectors, width = min(few, key=lambda entry: entry[1] / entry[2])
        others = len({name for name, *_ in few}) - 1
        more = f" and {others} more modules" if others else ""
        return [
            f"{self.depth.renamed(name)}{more} saw few calibration vectors: {vectors} of width {width}, where "
            f"{MIN_VECTORS_PER_DIM} times the width would be {MIN_VECTORS_PER_DIM * width}; pass more data, or more "
            "sequences of it"
        ]

    def install_(self, model: PreTrainedModel) -> None:
        """Install the conversion in the model, in place and all or nothing, and record it for checkpoints."""
        modules = [model.get_submodule(item.site.name) for item in self.maps]
        with all_or_nothing(model):
            install_maps_(model, self.maps)
            install_refits(model, self.refits, self.blocks)
            if self.config is not None:
                adopt_(model, self.config)
            configs = own_configs_(model, self.config) if self.config is not None or self.depth.removed else []
            if self.depth.removed:
                self.depth.move_(model)
                self.depth.drop_(model, configs)
            record_maps_(model, zip(modules, (item.map.config for item in self.maps), strict=True))


def _convert(
    inventory: Inventory, data: SplitData, choice: Choice, progress: Progress, reading: Reading
) -> Conversion:
    """Compute a conversion in a copy that shares the model's weights."""
    model, compression = inventory.model, choice.compression
    refits = wants_refit(data, compression)
    blocks, config = narrower_blocks(inventory, compression.dff)
    tasks = inventory.tasks(compression, choice.modules)
    linears, layers = list[ResidualLinear](), list[str]()
    if refits or compression.layers is not None:
        check_weights(model.named_parameters())
    depth, notes = Depth(), list[str]()
    try:
        if refits:
            linears = inventory.residual_linears
        if data.used and (refits or compression.layers or not all(task.is_exact for task in tasks)):
            layers = list(inventory.layers)  # raises if they cannot be called alone
    except UnsupportedModelError as error:
        if compression.dff is not None or compression.layers is not None or compression.solver.refit:
            raise
        notes += [f"no layer was refitted: {error}"] if refits else []
    if compression.layers is not None:
        depth = find_depth(inventory, compression.layers, data, refits, progress)
    converted = sharing_copy(model)
    depth.move_(converted)
    parts = Parts(
        [task for task in tasks if not layer_of(task.site.name, depth.removed)],
        linears,
        [block for block in blocks if block.linear.layer not in depth.removed],
        compression.dff or 0,
        depth,
        layers,
    )
    why_float32 = ""
    if not layers or model.dtype != torch.float32:
        why_float32 = "it is for layers of a float32 model that are converted on calibration data"
    elif emulates_bfloat16(model.device):
        why_float32 = EMULATED
    bf16 = compression.solver.bf16 and not why_float32
    if compression.solver.bf16 and why_float32:
        notes.append(f"bf16 changed nothing: {why_float32}")
    maps, results, reports = convert_layers_(
        converted, model, parts, data.used, data.held_back, length=data.length, bf16=bf16, progress=progress
    )
    if depth.removed:
        notes.append(depth.drop_(converted, configs_of(converted)))
    if data.held_back:
        progress("measuring output error", 0, None)
    output_error, agreement = measure(converted, model, data, reading)
    return Conversion(
        maps, results, parts.blocks, config, depth, reports, output_error, agreement, list(filter(None, notes))
    )


def _breakdowns(reports: Sequence[PartReport]) -> list[str]:
    """Warn of solvers that met a singular system."""
    return [
        f"{report.name}: {report.breakdowns} sweeps of the solver met a singular system; "
        f"{'it went on with a shifted one' if report.sweeps else 'it kept its start'}; "
        "look at the module's error, or raise the damping"
        for report in reports
        if report.breakdowns
    ]


def _random_choices(chosen: Sequence[str]) -> list[str]:
    """Warn of neurons or layers that were chosen on random tokens."""
    if not chosen:
        return []
    return [
        f"{' and '.join(chosen)} were chosen on random tokens alone, which loses more; calibrate on texts "
        "like yours, or on those that a language model has 'generated'"
    ]


def _tied_weights(model: PreTrainedModel) -> set[frozenset[str]]:
    """Return the names of each parameter that several layers hold; a layer in several places counts once."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(id(parameter), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _untied_weights(before: Iterable[frozenset[str]], after: set[frozenset[str]]) -> list[str]:
    """Warn of weights that were one and no longer are."""
    pairs = sorted(sorted(group)[:2] for group in {*before} - after if len(group) > 1)
    return [
        f"{len(pairs)} weights that several layers shared, such as {first} and {second}, are separate now, which "
        "takes more parameters"
        for first, second in pairs[:1]
    ]


def wants_refit(data: SplitData, compression: Compression) -> bool:
    """Return whether layers are refitted; raise if refits, layers or neurons need more data."""
    needs = {"layers": compression.layers, "dff": compression.dff, "refit": compression.solver.refit}
    for name, value in needs.items():
        if value and not data.held_back:
            raise CompressionError(f"{name} takes calibration data of at least two sequences; pass texts")
    if compression.dff is not None or (compression.layers is not None and compression.solver.refit is None):
        return True
    return bool(data.held_back) and (data.refit if compression.solver.refit is None else compression.solver.refit)


def narrower_blocks(inventory: Inventory, dff: int | None) -> tuple[list[FeedForward], PretrainedConfig | None]:
    """Return the feed-forward blocks to make narrower, and the config of a model with those."""
    if dff is None:
        return [], None
    for block in inventory.blocks:
        if dff > block.width:
            raise CompressionError(
                f"{block.down} reads {block.width} neurons, and dff is {dff}; pass up to {block.width}"
            )
    return inventory.blocks, narrower_config(inventory.model, inventory.blocks, dff)


def working_device(device: str | None) -> str | None:
    """Return the device to decompose on; "cuda" is each process's own GPU, None the device of the weights."""
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
    """Check what `compress` checks before it decomposes, and install the same attention maps, uninitialised.

    What is to be done with the converted model can then be tried on its structure. It cannot be run.
    """
    working_device(compression.solver.device)
    refuse_early(model, compression)
    data = read_calibration(model, calibration, tokenizer, options, compression.solver.seed)
    inventory = Inventory(model, data.used[0] if data.used else None, compression.modules)
    wants_refit(data, compression)
    narrower_blocks(inventory, compression.dff)
    if compression.layers is not None:
        deep_stacks(model, inventory.stacks, compression.layers)
    choice = choose_widths(inventory, compression, data)
    for task in inventory.tasks(choice.compression, choice.modules):
        install_maps_(model, [empty_replacement(task.site, task.config())])
