"""What a conversion did, in numbers."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True)
class ModuleReport:
    """One converted attention module.

    Args:
        name: path in the model.
        rank: shared width R.
        weight_error: ‖T − T̂‖/‖T‖ over the stacked Wq·Wkᵀ.
        data_error: the same for the scores on calibration data, or None without.
        parameters_before: of the query and key projections, dense.
        parameters_after: of what replaces them.
        macs_before: multiply-accumulates of the scores of one sequence of `Report.length` tokens, dense.
        macs_after: the same, converted.
        break_even_length: T*, the number of tokens beyond which the converted scores cost more.
        sweeps: passes of the solver; 0 if exact.
        converged: whether the solver stopped because it made no more progress.
        seconds: time the decomposition took.
    """

    name: str
    rank: int
    weight_error: float
    data_error: float | None
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int
    break_even_length: float
    sweeps: int
    converged: bool
    seconds: float


@dataclass(frozen=True)
class Drift:
    """How far the converted model's outputs are from the dense model's on held-back calibration batches.

    Args:
        output: which output was compared.
        relative_error: ‖converted − dense‖/‖dense‖ over real tokens.
        sequences: how many sequences were held back.
    """

    output: str
    relative_error: float
    sequences: int


@dataclass(frozen=True)
class Report:
    """What `compress` did.

    Args:
        modules: one entry for each converted module.
        parameters_before: of the whole model, dense.
        parameters_after: of the whole model, converted.
        length: tokens T for which multiply-accumulates are counted.
        drift: drift of the outputs, or None without calibration data.
        seconds: time the conversion took, calibration included.
    """

    modules: tuple[ModuleReport, ...]
    parameters_before: int
    parameters_after: int
    length: int
    drift: Drift | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Give the report in JSON types; an infinite break-even length becomes None."""
        data = asdict(self)
        for module in data["modules"]:
            if not isfinite(module["break_even_length"]):
                module["break_even_length"] = None
        return data
