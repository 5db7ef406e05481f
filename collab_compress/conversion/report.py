"""Reports of conversions: costs and errors of each part, refits, and how far the outputs moved."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from collab_compress.conversion.cost import Part, PartCost
from collab_compress.errors import CollabCompressError, install
from collab_compress.options import Compression


def width_range(widths: Iterable[int]) -> str:
    """Return one width, or the smallest and the largest, as text."""
    ordered = sorted(set(widths))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`."""
    try:
        import pandas as pd
    except ImportError as error:
        raise CollabCompressError(f"tables need pandas: {install('data')}") from error
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class PartReport(PartCost):
    """One converted part of a layer: its costs as in `PartCost`, and errors.

    Args:
        weight_error: relative error of the stacked products Wq·Wkᵀ, or Wv·Wo, ‖T − T̂‖/‖T‖; None for a feed-forward
            block.
        data_error: the same of the scores, or of the layer's outputs, on calibration data; None without data.
        head_dim: width of one head's queries and keys, content bias included; None for other parts.
        sweeps: iterations of the solver; 0 for an answer in closed form.
        converged: whether the solver stopped because it made no more progress.
        breakdowns: iterations of the solver that met a singular system. It continues with a shifted system or, if
            that fails, stops with the best factors so far.
        seconds: time of the decomposition.
        vectors: number of vectors in the moments, for each projection whose inputs count; 0 without data.
    """

    weight_error: float | None = None
    data_error: float | None = None
    head_dim: int | None = None
    sweeps: int = 0
    converged: bool = True
    breakdowns: int = 0
    seconds: float = 0.0
    vectors: tuple[int, ...] = ()


@dataclass(frozen=True)
class RefitReport:
    """One refitted layer, by the residual stream after it on held-back calibration sequences.

    Args:
        name: path of the layer.
        error_before: ‖converted − dense‖ over the norm of the dense stream less its mean, with tokens weighted as in
            the fit, and with the layers below refitted but not this one, which may read fewer neurons already.
        error_after: the same, with this layer refitted too.
        vectors: number of vectors that the layer was fitted to.
        sequences: number of sequences that they are from.
    """

    name: str
    error_before: float
    error_after: float
    vectors: int
    sequences: int


@dataclass(frozen=True)
class OutputError:
    """Relative error of the converted model's outputs on held-back calibration batches.

    Args:
        output: name of the output; "log probabilities" for logits over classes or tokens.
        relative_error: ‖converted − dense‖/‖dense‖, padding left out; the mean over the classes is subtracted from
            log probabilities in the denominator.
        sequences: number of sequences.
    """

    output: str
    relative_error: float
    sequences: int


@dataclass(frozen=True)
class Agreement:
    """What of the dense model's results stays in the converted model, on held-back calibration sequences.

    Nothing here knows the right answers: it is agreement with the dense model, or, for a language model, perplexity.

    Args:
        kind: "nearest texts", "classes", "labels" (several of a row), "scores", "labels of tokens", "answers", "next
            tokens" or "masked tokens".
        sequences: number of held-back sequences, without random tokens.
        numbers: the figures by their names. `…_stay` is a share from 0 to 1. "nearest texts": `nearest_stay`, with
            all texts embedded by the converted model, and `nearest_stay_in_dense_index`, with only the queries, both
            among `texts` texts. "classes" and "labels": `classes_stay` or `labels_stay`, and `probability_change`,
            the mean absolute one. "scores": `correlation` (Pearson's; left out for fewer than ten rows or equal
            scores), `score_change`, the mean absolute one, and `score_deviation`, the standard deviation of the
            dense scores. "labels of tokens": `labels_stay` of `tokens`. "answers": `answers_stay`, start and end.
            "next tokens" and "masked tokens": `perplexity` and `dense_perplexity`, of `tokens` predicted tokens.
        finding: these in one line.
        meaning: one sentence of what follows.
    """

    kind: str
    sequences: int
    numbers: Mapping[str, float]
    finding: str
    meaning: str


@dataclass(frozen=True)
class Report:
    """Report of `compress`.

    Args:
        parts: the converted parts: queries and keys of all modules, then values, then feed-forward blocks.
        parameters_before: of the whole model, before this conversion.
        parameters_after: of the whole model, converted.
        length: tokens T for which multiply-accumulates are counted.
        output_error: relative error of the outputs, or None without calibration data.
        seconds: time of the conversion, calibration included.
        threads: CPU threads of PyTorch's operations in it.
        sequences: number of calibration sequences, without those held back.
        warnings: texts that were cut or left out, modules that saw few vectors, solvers that broke down, and others.
        compression: as passed, or with the widths that `keep` chose.
        choice: which widths `keep` chose, and why; empty without `keep`.
        refits: refitted layers, in the order of the forward pass.
        removed_layers: paths in the dense model of the layers that were removed. All other paths are those in the
            converted model.
        agreement: what of the dense model's results stays; None where that cannot be told: of other kinds of models,
            of random tokens, and of too few sequences.
    """

    parts: tuple[PartReport, ...]
    parameters_before: int
    parameters_after: int
    length: int
    output_error: OutputError | None
    seconds: float
    threads: int
    sequences: int = 0
    warnings: tuple[str, ...] = ()
    compression: Compression | None = None
    choice: str = ""
    refits: tuple[RefitReport, ...] = ()
    removed_layers: tuple[str, ...] = ()
    agreement: Agreement | None = None

    def of(self, part: Part) -> list[PartReport]:
        """Return the reports of one kind of part: "dk", "dv" or "dff"."""
        return [report for report in self.parts if report.part == part]

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        data = asdict(self)
        del data["compression"]
        return data

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each part of each module: width, errors, parameters and MACs."""
        columns = ["part", "width", "weight_error", "data_error"]
        columns += [f"{what}_{when}" for what in ("parameters", "macs") for when in ("before", "after")]
        values = [{column: getattr(report, column) for column in columns} for report in self.parts]
        return to_frame([{"module": report.name, **row} for report, row in zip(self.parts, values, strict=True)])

    def __str__(self) -> str:
        before, after = self.parameters_before, self.parameters_after
        lines = [f"{before:,} → {after:,} parameters ({after / before - 1:+.1%})"]
        if self.agreement is not None:
            lines += [self.agreement.finding, self.agreement.meaning]
        elif self.output_error is not None:
            output_error = self.output_error
            moved = f"outputs ({output_error.output}) move by {output_error.relative_error:.1%}"
            lines.append(f"{moved} on {output_error.sequences} held-back sequences")
        if self.removed_layers:
            removed = ", ".join(self.removed_layers)
            lines.append(f"without {removed}; adapters of the dense model no longer fit, though they load")
        for part in get_args(Part):
            if reports := self.of(part):
                widths = width_range(report.width or 0 for report in reports)
                lines.append(f"{part}={widths} in {len(reports)} modules")
        return "\n".join([*lines, *self.warnings])
