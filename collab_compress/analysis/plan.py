"""Look before converting: what several widths of queries and keys, values and feed-forward blocks cost and lose."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis.cost import model_latency
from collab_compress.architectures import FAMILIES, find_attention, transformers_model
from collab_compress.calibration import Batch, Calibration, calibration_batches
from collab_compress.calibration.batches import is_synthetic, sequence_count
from collab_compress.conversion.compress import compress, sharing_copy
from collab_compress.conversion.feed_forward import find_feed_forward
from collab_compress.conversion.keep import typical_length
from collab_compress.conversion.report import Report, to_frame
from collab_compress.errors import CalibrationError, CollabCompressError, UnsupportedModelError
from collab_compress.options import CalibrationOptions, Compression, Effort, Form, Solver

SHARES = (3 / 4, 1 / 2, 3 / 8, 1 / 4)  # of the dense widths
SEQUENCES = 128  # of the calibration data, for what is tried is thrown away
BAR = 20  # characters of the longest bar
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Trial:
    """One part of a model at one width, all else dense.

    Args:
        part: "dk", "dv" or "dff".
        width: of it.
        share: of the dense width.
        drift: how far the model's outputs move on held-back data, relative to their norm.
        parameters: of the whole model, over dense.
        operations: of the part, over dense, at the plan's length.
        time: of the whole model, over dense, measured; None where it was not.
        knee: whether it is the trial whose squared drift is furthest below the line from dense to the narrowest: from
            there on the same saving costs more.
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
        left_out: part that cannot be converted → why.
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
        most = max((trial.drift for trial in self.trials), default=0.0) or 1.0
        lines = [f"part  width  operations  parameters  time at {self.length} tokens  outputs move by"]
        for trial in self.trials:
            time = "" if trial.time is None else f"{trial.time:.2f}"
            bar = "█" * max(1, round(BAR * trial.drift / most))
            knee = "  ← knee" if trial.knee else ""
            lines.append(
                f"{trial.part:<4}  {trial.width:>5}  {trial.operations:>9.0%}   {trial.parameters:>9.1%}   "
                f"{time:>{15 + len(str(self.length))}}  {trial.drift:>6.1%} {bar}{knee}"
            )
        lines += [f"{part} stays as it is: {reason}" for part, reason in self.left_out.items()]
        return "\n".join(lines)


def plan(
    model: PreTrainedModel,
    calibration: Calibration = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    calibration_options: CalibrationOptions | None = None,
    form: Form = "shared",
    shares: Sequence[float] = SHARES,
    timed: bool = True,
) -> Plan:
    """Try several widths of queries and keys, of values and of feed-forward blocks, each by itself.

    Every trial is a conversion of a copy that shares the model's tensors, on up to 128 sequences of the calibration
    data, with the fast settings of the solver; the model stays as it is.

    Args:
        model: dense.
        calibration: as for `compress`.
        tokenizer: as for `compress`.
        progress: called with what is tried, how many trials are done, and how many there are.
        calibration_options: as for `compress`.
        form: of queries and keys.
        shares: of the dense widths; widths are rounded up.
        timed: whether to measure the latency of each trial beside the dense model's, 8 sequences in a batch.

    Returns:
        The trials, and why a part that cannot be converted is left out.

    Raises:
        UnsupportedModelError: the model's family is not known.
        CalibrationError: calibration data is missing or unusable, or holds fewer than two sequences.
    """
    model, tokenizer = transformers_model(model), tokenizer or getattr(model, "tokenizer", None)
    options = calibration_options or CalibrationOptions()
    batches = calibration_batches(calibration, model, tokenizer, **vars(options))
    if sum(map(sequence_count, batches)) < 2:
        raise CalibrationError("a plan takes calibration data of at least two sequences; pass more")
    batches = batches[:: max(1, math.ceil(sum(map(sequence_count, batches)) / SEQUENCES))]
    length = typical_length(options, batches)
    refit = False if is_synthetic(calibration) else None
    left_out: dict[str, str] = {}
    full = _full_widths(model, batches, left_out)
    steps = {"dk": _step(model)}
    trials: list[Trial] = []
    for number, (part, width) in enumerate(full.items()):
        found: list[Trial] = []
        for place, narrower in enumerate(_shares_of(width, shares, steps.get(part, 1))):
            if progress is not None:
                progress(f"{part}={narrower}", number * len(shares) + place, len(full) * len(shares))
            try:
                converted = sharing_copy(model)
                report = compress(converted, _compression(part, narrower, form, refit), batches, tokenizer)
                found.append(
                    _trial(part, narrower, width, report, _time(model, converted, length) if timed else None)
                )
            except CollabCompressError as error:
                left_out[part], found = str(error), []
                break
        trials += _with_knee(found)
    if progress is not None:
        progress("", len(full) * len(shares), len(full) * len(shares))
    return Plan(tuple(trials), length, left_out)


def _full_widths(model: PreTrainedModel, batches: Sequence[Batch], left_out: dict[str, str]) -> dict[str, int]:
    """Return part → its dense width, the least of the modules'; note why feed-forward blocks are left out."""
    sites = find_attention(model, FAMILIES)
    keys = min(site.key_value_width for site in sites)
    widths = {"dk": keys if _step(model) > 1 else min(site.width for site in sites), "dv": keys}
    try:
        widths["dff"] = min(block.width for block in find_feed_forward(model, batches[0]))
    except UnsupportedModelError as error:
        left_out["dff"] = str(error)
    return widths


def _step(model: PreTrainedModel) -> int:
    """Return what dk is a multiple of: whole heads with a rotary embedding."""
    site = find_attention(model, FAMILIES)[0]
    return site.head_width if site.family.rotary else 1


def _compression(part: str, width: int, form: Form, refit: bool | None) -> Compression:
    """Return the conversion of one part to a width, solved fast."""
    if part == "dff":
        return Compression(dff=width)
    if part == "dv":
        return Compression(dv=width, solver=Solver(refit=refit))
    effort: Effort = "fast" if form == "shared" else "best"
    return Compression(dk=width, form=form, solver=Solver(refit=refit, effort=effort))


def _shares_of(width: int, shares: Sequence[float], step: int) -> list[int]:
    return sorted({step * math.ceil(share * width / step) for share in shares}, reverse=True)


def _trial(part: str, width: int, dense_width: int, report: Report, time: float | None) -> Trial:
    entries = [
        *((entry.macs_before, entry.macs_after) for entry in report.modules),
        *((entry.macs_before, entry.macs_after) for entry in report.values),
        *((entry.macs_before, entry.macs_after) for entry in report.feed_forward),
    ]
    before, after = map(sum, zip(*entries, strict=True))
    return Trial(
        part=part,
        width=width,
        share=width / dense_width,
        drift=math.nan if report.drift is None else report.drift.relative_error,
        parameters=report.parameters_after / report.parameters_before,
        operations=after / before,
        time=time,
    )


def _time(dense: PreTrainedModel, converted: PreTrainedModel, length: int) -> float | None:
    """Return the time of a converted model over that of the dense one; None where that says nothing.

    So it is for a model that reads no tokens, and on a machine that does other work.
    """
    try:
        found = model_latency(dense, converted, length)
    except CollabCompressError:
        return None
    return found.ratio if found.is_steady else None


def _with_knee(trials: Sequence[Trial]) -> list[Trial]:
    """Mark the trial furthest below the line from the dense part to the narrowest trial, if any is below it."""
    if not trials:
        return []
    last = trials[-1]

    def below(trial: Trial) -> float:
        lost = (trial.drift / last.drift) ** 2 if last.drift else 1.0
        return (1 - trial.share) / (1 - last.share) - lost - 1e-9

    knee = max(trials, key=below)
    return [replace(trial, knee=trial is knee and below(knee) > 0) for trial in trials]
