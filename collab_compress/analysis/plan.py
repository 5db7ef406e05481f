"""What each width of queries and keys, values and feed-forward blocks costs and loses; nothing is converted."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import tokenizer_of, transformers_model
from collab_compress.calibration import Batch, Calibration
from collab_compress.calibration.source import read_calibration
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.cost import Part, PartCost, block_cost, costs_at
from collab_compress.conversion.inventory import Inventory, refuse_unconvertible
from collab_compress.conversion.maps import READING, Progress, silent
from collab_compress.conversion.report import to_frame
from collab_compress.conversion.widths import LossCurves, loss_curves
from collab_compress.errors import CalibrationError, UnsupportedModelError
from collab_compress.options import CalibrationOptions

WIDTH_SHARES = (3 / 4, 1 / 2, 3 / 8, 1 / 4)  # of the dense widths
BAR_CHARACTERS = 20  # of the longest bar
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One part of a model at one width, all else dense.

    Args:
        part: "dk", "dv" or "dff".
        width: of the part; the narrowest module's, where they differ.
        loss: what is lost of the residual stream's variance, mean over layers; an upper bound, as refitting repairs
            some of it.
        parameters: of the whole model, over dense.
        operations: of all attention modules and feed-forward blocks, over dense, at the plan's length.
    """

    part: Part
    width: int
    loss: float
    parameters: float
    operations: float


@dataclass(frozen=True)
class Plan:
    """What several widths of each part of a model cost and lose; printing it gives a table.

    Args:
        rows: by part, the widest first.
        length: tokens for which operations are counted.
        left_out: part that cannot be converted → reason.
        uncounted: what operations leave out, because it cannot be converted.

    Example:
        >>> print(Plan((Row("dk", 12, 0.02, 0.9, 0.6), Row("dk", 6, 0.08, 0.8, 0.4)), length=128, left_out={}))
        Parameters and operations (at 128 tokens) are those of the whole model.
        part  width  parameters  operations  loss in a layer
        dk       12       90.0%       60.0%   2.00% █████
        dk        6       80.0%       40.0%   8.00% ████████████████████
    """

    rows: tuple[Row, ...]
    length: int
    left_out: dict[str, str]
    uncounted: tuple[str, ...] = ()

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each width."""
        return to_frame([asdict(row) for row in self.rows])

    def __str__(self) -> str:
        largest = max((row.loss for row in self.rows), default=0.0) or 1.0
        uncounted = f", without {' and '.join(self.uncounted)}" if self.uncounted else ""
        lines = [
            f"Parameters and operations (at {self.length} tokens{uncounted}) are those of the whole model.",
            "part  width  parameters  operations  loss in a layer",
        ]
        for row in self.rows:
            bar = "█" * max(1, round(BAR_CHARACTERS * row.loss / largest))
            lines.append(
                f"{row.part:<4}  {row.width:>5}  {row.parameters:>10.1%}  {row.operations:>10.1%}  "
                f"{row.loss:>6.2%} {bar}"
            )
        lines += [f"{part} stays as it is: {reason}" for part, reason in self.left_out.items()]
        return "\n".join(lines)


def part_losses(
    inventory: Inventory, batches: Sequence[Batch], progress: Progress = silent
) -> tuple[LossCurves, dict[str, str]]:
    """Return what each part of a model that can be converted loses at every width, and why others cannot be."""
    narrowable: dict[str, list[Any]] = {}
    left_out: dict[str, str] = {}
    for part, parts in {"dk": "scores", "dv": "narrowable_values", "dff": "narrowable_blocks"}.items():
        try:
            narrowable[part], left_out[part] = getattr(inventory, parts)
        except UnsupportedModelError as error:
            narrowable[part], left_out[part] = [], str(error)
    losses = loss_curves(inventory, narrowable["dk"], narrowable["dv"], narrowable["dff"], batches, progress)
    return losses, {part: reason for part, reason in left_out.items() if reason}


def _costs(inventory: Inventory, part: Part, widths: Mapping[str, int], length: int) -> list[PartCost]:
    """Return the costs of all parts of one kind at some widths, given by the path of the part."""
    if part == "dff":
        blocks = [block for block in inventory.narrowable_blocks[0] if block.down in widths]
        return [block_cost(inventory.model, block, widths[block.down], length) for block in blocks]
    sites = [site for site in inventory.attention if site.name in widths]
    costs = chain.from_iterable(costs_at(site, length, **{part: widths[site.name]}) for site in sites)
    return [cost for cost in costs if cost.part == part]


@torch.inference_mode(False)
def plan(
    model: PreTrainedModel,
    calibration: Calibration = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
    shares: Sequence[float] = WIDTH_SHARES,
) -> Plan:
    """Return what widths of queries and keys, of values and of feed-forward blocks cost and lose.

    The dense model runs once on up to 256 sequences of the calibration data; the losses of all widths follow from
    that (`conversion.widths`).

    Args:
        model: dense; it does not change.
        calibration: as for `compress`.
        tokenizer: as for `compress`.
        progress: called with what is being done, how many layers are done, and how many there are, or None.
        calibration_options: as for `compress`.
        shares: of the dense widths; widths are rounded up, and dense ones left out.

    Raises:
        UnsupportedModelError: the model has no numbered layers that can be called alone.
        CompressionError: the model can be neither changed nor measured, as for `compress`.
        CalibrationError: calibration data is missing or unusable.

    Example:
        >>> result = plan(model, [batch], shares=(1 / 2,))
        >>> [(row.part, row.width) for row in result.rows]
        [('dk', 12), ('dv', 12), ('dff', 16)]
    """
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    model = transformers_model(model)
    refuse_unconvertible(model, "plan")
    model = sharing_copy(model)  # so that other threads may run the model meanwhile
    progress = progress or silent
    progress(READING, 0, None)
    data = read_calibration(model, calibration, tokenizer, calibration_options, seed=0)
    for note in data.notes:
        _logger.warning(note)
    if not data.held_back:
        raise CalibrationError("a plan takes calibration data of at least two sequences; pass more")
    batches, length = data.sample, data.length
    inventory = Inventory(model, batches[0])
    losses, left_out = part_losses(inventory, batches, progress)
    blocks = inventory.narrowable_blocks[0]
    attention = chain.from_iterable(costs_at(site, length) for site in inventory.attention)
    dense = [*attention, *(block_cost(model, block, None, length) for block in blocks)]
    operations = sum(cost.macs_after for cost in dense)
    rows = []
    for part, curves in losses.items():
        for share in sorted(shares, reverse=True):
            widths = {name: math.ceil(share * (len(curve) - 1)) for name, curve in curves.items()}
            if all(width == len(curves[name]) - 1 for name, width in widths.items()):
                continue  # dense, or there is no such part
            costs = _costs(inventory, part, widths, length)
            saved = sum(cost.parameters_before - cost.parameters_after for cost in costs)
            rows.append(
                Row(
                    part=part,
                    width=min(widths.values()),
                    loss=sum(float(curves[name][width]) for name, width in widths.items()) / len(widths),
                    parameters=1 - saved / model.num_parameters(),
                    operations=1 - sum(cost.macs_before - cost.macs_after for cost in costs) / operations,
                )
            )
    kinds = {"attention": inventory.attention, "feed-forward blocks": blocks}
    return Plan(tuple(rows), length, left_out, tuple(kind for kind, parts in kinds.items() if not parts))
