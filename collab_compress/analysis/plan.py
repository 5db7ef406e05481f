"""Try several widths of queries and keys, values and feed-forward blocks: what each costs and loses."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis.cost import model_latency
from collab_compress.architectures import find_attention, transformers_model
from collab_compress.calibration import Batch, Calibration
from collab_compress.conversion.calibrate import Calibrated, read
from collab_compress.conversion.compress import compress
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.feed_forward import find_feed_forward
from collab_compress.conversion.plan import Progress
from collab_compress.conversion.report import PartReport, Report, to_frame
from collab_compress.errors import CalibrationError, CollabCompressError, UnsupportedModelError
from collab_compress.options import CalibrationOptions, Compression, Solver

SHARES = (3 / 4, 1 / 2, 3 / 8, 1 / 4)  # of the dense widths
SEQUENCES = 128  # of the calibration data: few, because the trials are thrown away
FEW_SWEEPS = 36  # of the solver, for errors about 2 % higher
BAR = 20  # characters of the longest bar
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """One part of a model at one width, all else dense.

    Args:
        part: "dk", "dv" or "dff".
        width: width of the part.
        share: of the dense width.
        drift: relative error of the model's outputs on held-back data.
        parameters: of the model, over dense.
        operations: of the part, over dense, at the plan's length.
        time: of the model, over dense, measured; None where it was not.
        knee: whether this trial's squared drift is furthest below the line from dense to the narrowest trial:
            beyond it the same saving costs more.
    """

    part: str
    width: int
    share: float
    drift: float
    parameters: float
    operations: float
    time: float | None
    knee: bool = False


@dataclass(frozen=True)
class Plan:
    """What several widths of each part of a model cost and lose; printing it gives a table.

    Args:
        trials: by part, the widest first.
        length: tokens for which operations are counted and time was measured.
        left_out: part that cannot be converted → reason.
    """

    trials: tuple[Trial, ...]
    length: int
    left_out: dict[str, str]

    @property
    def knees(self) -> dict[str, int]:
        """Part → the width at its knee, as arguments of `Compression`."""
        return {trial.part: trial.width for trial in self.trials if trial.knee}

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each trial."""
        return to_frame([asdict(trial) for trial in self.trials])

    def __str__(self) -> str:
        largest = max((trial.drift for trial in self.trials), default=0.0) or 1.0
        lines = [f"part  width  operations  parameters  time at {self.length} tokens  outputs move by"]
        for trial in self.trials:
            time = "" if trial.time is None else f"{trial.time:.2f}"
            bar = "█" * max(1, round(BAR * trial.drift / largest))
            knee = "  ← knee" if trial.knee else ""
            lines.append(
                f"{trial.part:<4}  {trial.width:>5}  {trial.operations:>9.0%}   {trial.parameters:>9.1%}   "
                f"{time:>{15 + len(str(self.length))}}  {trial.drift:>6.1%} {bar}{knee}"
            )
        lines += [f"{part} stays as it is: {reason}" for part, reason in self.left_out.items()]
        return "\n".join(lines)


def plan(
    model: PreTrainedModel,
    calibration: Calibration | Calibrated = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
    shares: Sequence[float] = SHARES,
    timed: bool = True,
) -> Plan:
    """Try several widths of queries and keys, of values and of feed-forward blocks, each by itself.

    Every trial is a conversion of a copy that shares the model's tensors, on up to 128 sequences of the calibration
    data, with the fast settings of the solver; the model does not change.

    Args:
        model: dense.
        calibration: as for `compress`.
        tokenizer: as for `compress`.
        progress: called with the trial, the number of finished trials and their total.
        calibration_options: as for `compress`.
        shares: of the dense widths; widths are rounded up, and dense ones left out.
        timed: whether to measure the latency of each trial and of the dense model, with 8 sequences in a batch.

    Raises:
        UnsupportedModelError: the model's family is not known.
        CalibrationError: calibration data is missing or unusable, or holds fewer than two sequences.
    """
    model, tokenizer = transformers_model(model), tokenizer or getattr(model, "tokenizer", None)
    model = sharing_copy(model)  # so that other threads may run the model meanwhile
    data = read(model, calibration, tokenizer, calibration_options, seed=0)
    for note in data.notes:
        _logger.warning(note)
    if not data.held_back:
        raise CalibrationError("a plan takes calibration data of at least two sequences; pass more")
    few = data.sample(SEQUENCES)
    site = find_attention(model)[0]
    steps = {"dk": site.head_width if site.family.rotary else 1, "dv": site.key_value_heads}
    left_out: dict[str, str] = {}
    dense_widths = _dense_widths(model, few.used, left_out)
    total = len(dense_widths) * len(shares)
    trials: list[Trial] = []
    for number, (part, dense_width) in enumerate(dense_widths.items()):
        rounding = steps.get(part, 1)
        rounded = {rounding * math.ceil(share * dense_width / rounding) for share in shares}
        widths = {width for width in rounded if width < dense_width}
        if not widths:
            left_out[part] = f"every share of its {dense_width} channels rounds up to all of them; pass smaller ones"
        trials_of_part: list[Trial] = []
        for place, width in enumerate(sorted(widths, reverse=True)):
            if progress is not None:
                progress(f"{part}={width}", number * len(shares) + place, total)
            try:
                converted = sharing_copy(model)
                report = compress(converted, _compression(part, width), few)
                time = _relative_time(model, converted, few.length) if timed else None
            except CollabCompressError as error:
                left_out[part], trials_of_part = str(error), []
                break
            trials_of_part.append(_trial(part, width, width / dense_width, report, time))
        trials += _with_knee(trials_of_part)
    if progress is not None:
        progress("", total, total)
    return Plan(tuple(trials), few.length, left_out)


def _dense_widths(model: PreTrainedModel, batches: Sequence[Batch], left_out: dict[str, str]) -> dict[str, int]:
    """Return part → its dense width, the least of the modules'; note why feed-forward blocks are left out."""
    sites = find_attention(model)
    keys = min(site.key_value_width for site in sites)
    widths = {"dk": keys if sites[0].family.rotary else min(site.width for site in sites), "dv": keys}
    try:
        widths["dff"] = min(block.width for block in find_feed_forward(model, batches[0]))
    except UnsupportedModelError as error:
        left_out["dff"] = str(error)
    return widths


def _compression(part: str, width: int) -> Compression:
    """Return the conversion of one part to a width, with the fast settings of the solver."""
    if part == "dff":
        return Compression(dff=width)
    if part == "dv":
        return Compression(dv=width)
    return Compression(dk=width, solver=Solver(sweeps=FEW_SWEEPS))


def _trial(part: str, width: int, share: float, report: Report, time: float | None) -> Trial:
    entries: list[PartReport] = [
        *report.modules,
        *report.values,
        *report.feed_forward,
    ]
    before = sum(entry.macs_before for entry in entries)
    after = sum(entry.macs_after for entry in entries)
    return Trial(
        part=part,
        width=width,
        share=share,
        drift=math.nan if report.drift is None else report.drift.relative_error,
        parameters=report.parameters_after / report.parameters_before,
        operations=after / before,
        time=time,
    )


def _relative_time(dense: PreTrainedModel, converted: PreTrainedModel, length: int) -> float | None:
    """Return the time of a converted model over that of the dense one.

    None for a model that reads no tokens, and where times vary too much, as on a machine that does other work.
    """
    try:
        latency = model_latency(dense, converted, length)
    except CollabCompressError:
        return None
    return latency.ratio if latency.is_steady else None


def _with_knee(trials: Sequence[Trial]) -> list[Trial]:
    """Mark the trial furthest below the line from the dense part to the narrowest trial, if any is below it."""
    if not trials:
        return []
    last = trials[-1]

    def below(trial: Trial) -> float:
        loss = (trial.drift / last.drift) ** 2 if last.drift else 1.0
        return (1 - trial.share) / (1 - last.share) - loss - 1e-9

    knee = max(trials, key=below)
    return [replace(trial, knee=trial is knee and below(knee) > 0) for trial in trials]
