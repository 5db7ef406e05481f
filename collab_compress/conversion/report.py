"""Report of a conversion by module: errors, parameters, multiply-accumulates, break-even length.

Queries and keys are counted as in "Multi-Head Attention: Collaborate Instead of Concatenate", section 3.4; values and
the output projection apart from them. D input width, H heads, d head width, R shared width, T tokens.
"""

from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from collab_compress.architectures import DenseSite, ValueSite
from collab_compress.attention import NarrowValues, PerHeadScores, ScoreForm
from collab_compress.factorization import Factorization, Narrowing, RotaryFactorization
from collab_compress.frames import to_frame
from collab_compress.options import Compression


def dense_parameters(width: int, queries: int, keys: int, bias: bool) -> int:
    """Count parameters of dense projections, D wide, to so many channels of queries and of keys, and their biases."""
    return (queries + keys) * (width + bias)


def dense_macs(width: int, queries: int, keys: int, length: int) -> int:
    """Count multiply-accumulates of dense scores over T tokens: T·D for each channel, and T² for each of queries."""
    return length * width * (queries + keys) + length**2 * queries


@dataclass(frozen=True)
class ModuleReport:
    """One converted attention module.

    Args:
        name: path in the model.
        dk: shared width R.
        weight_error: ‖T − T̂‖/‖T‖ over the stacked Wq·Wkᵀ.
        data_error: the same for the scores on calibration data, or None without.
        parameters_before: of the query and key projections, dense.
        parameters_after: of what replaces them.
        macs_before: multiply-accumulates of the scores of one sequence of `Report.length` tokens, dense.
        macs_after: the same, converted.
        break_even_length: T*, the number of tokens beyond which the converted scores cost more.
        sweeps: passes of the solver; 0 if exact.
        converged: whether the solver stopped because it made no more progress.
        breakdowns: how many sweeps of the solver met a system that could not be solved as it was; it then goes on
            with a slightly different one or, where none helps, stops with the best factors so far.
        seconds: time the decomposition took, beside others that ran meanwhile.
        per_head_error: what the minimised error (data_error, or weight_error without data) is in the per-head form.
        per_head_macs: the multiply-accumulates of the per-head form; those of dense heads where there is none, as
            with a rotary embedding.
        sizes: channels of each head in the per-head form, else None.
        head_energy: share of the energy of each head's scores that is kept in the per-head form, else None.
        query_vectors: how many vectors the moments of the query projection's inputs were taken from; 0 without data.
        key_vectors: the same for keys.
    """

    name: str
    dk: int
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
    per_head_error: float
    per_head_macs: int
    sizes: tuple[int, ...] | None = None
    query_vectors: int = 0
    key_vectors: int = 0
    breakdowns: int = 0
    head_energy: tuple[float, ...] | None = None

    @property
    def vectors(self) -> tuple[int, ...]:
        """How many vectors were seen, of queries' and of keys' inputs."""
        return self.query_vectors, self.key_vectors


@dataclass(frozen=True)
class ValueReport:
    """The values of one converted attention module.

    Args:
        name: path in the model.
        dv: channels of values, all heads together.
        weight_error: ‖U − Û‖/‖U‖ over the stacked Wv·Wo.
        data_error: the same for what the layer adds on calibration data, or None without.
        parameters_before: of the value and output projections, dense.
        parameters_after: of what replaces them.
        macs_before: multiply-accumulates of values and outputs of one sequence of `Report.length` tokens, dense.
        macs_after: the same, converted.
        seconds: time the decomposition took, beside others that ran meanwhile.
        sizes: channels of each head.
        output_vectors: how many vectors the moments of the output projection's inputs were taken from; 0 without
            data.
    """

    name: str
    dv: int
    weight_error: float
    data_error: float | None
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int
    seconds: float
    sizes: tuple[int, ...]
    output_vectors: int = 0

    @property
    def vectors(self) -> tuple[int, ...]:
        """How many vectors were seen, of the output projection's inputs."""
        return (self.output_vectors,)


@dataclass(frozen=True)
class FeedForwardReport:
    """One feed-forward block that was made narrower.

    Args:
        name: path of the layer that reads its neurons.
        dff: number of neurons that stayed.
        parameters_before: of all its layers, dense.
        parameters_after: of what is left of them.
        macs_before: multiply-accumulates for one sequence of `Report.length` tokens, dense.
        macs_after: the same, narrower.
    """

    name: str
    dff: int
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int


@dataclass(frozen=True)
class RefitReport:
    """One refitted layer, by the residual stream behind it on held-back calibration sequences.

    Args:
        name: path of the layer in the model.
        error_before: ‖converted − dense‖ over the norm of the dense stream less its mean, without any refit.
        error_after: the same, with this layer and those below it refitted.
        vectors: how many vectors the layer was fitted to.
    """

    name: str
    error_before: float
    error_after: float
    vectors: int


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
    """Report of `compress`.

    Args:
        modules: one entry for each module whose queries and keys were converted.
        parameters_before: of the whole model, as it was given.
        parameters_after: of the whole model, converted.
        length: tokens T for which multiply-accumulates are counted.
        drift: drift of the outputs, or None without calibration data.
        seconds: time the conversion took, calibration included.
        sequences: how many sequences the conversion was calibrated on, those held back not counted.
        values: one entry for each module whose values were converted.
        compression: what was asked for, with the widths and the form that were chosen.
        choice: what was chosen and why, where a share to keep was asked for; else empty.
        warnings: what may have gone otherwise than expected: texts that were cut or left out, modules that saw few
            vectors, solvers that broke down.
        calibrating: seconds of the conversion in which the model ran to see its modules' inputs.
        refits: one entry for each layer that was refitted, in the order of the forward pass.
        feed_forward: one entry for each feed-forward block that was made narrower.
    """

    modules: tuple[ModuleReport, ...]
    parameters_before: int
    parameters_after: int
    length: int
    drift: Drift | None
    seconds: float
    sequences: int = 0
    warnings: tuple[str, ...] = ()
    values: tuple[ValueReport, ...] = ()
    compression: Compression | None = None
    choice: str = ""
    calibrating: float = 0.0
    refits: tuple[RefitReport, ...] = ()
    feed_forward: tuple[FeedForwardReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types; an infinite break-even length becomes None."""
        data = asdict(self)
        del data["compression"]
        for module in data["modules"]:
            if not isfinite(module["break_even_length"]):
                module["break_even_length"] = None
        return data

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each part of each module: width, errors, parameters and MACs."""
        rows = []
        parts = (("dk", self.modules), ("dv", self.values), ("dff", self.feed_forward))
        columns = (
            "weight_error", "data_error", "parameters_before", "parameters_after", "macs_before", "macs_after",
        )  # fmt: skip
        for part, entries in parts:
            for entry in entries:
                own = {name: getattr(entry, name, None) for name in columns}
                rows.append({"module": entry.name, "part": part, "width": getattr(entry, part), **own})
        return to_frame(rows)

    def __str__(self) -> str:
        before, after = self.parameters_before, self.parameters_after
        lines = [f"{before:,} → {after:,} parameters ({after / before - 1:+.1%})"]
        if self.drift is not None:
            lines.append(f"outputs move by {self.drift.relative_error:.1%} on held-back data")
        for part, entries in (("dk", self.modules), ("dv", self.values), ("dff", self.feed_forward)):
            widths = sorted({getattr(entry, part) for entry in entries})
            if widths:
                width = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
                lines.append(f"{part}={width} in {len(entries)} modules")
        return "\n".join([*lines, *self.warnings])


def module_report(
    site: DenseSite,
    form: ScoreForm,
    result: Factorization | RotaryFactorization,
    length: int,
    seconds: float,
    vectors: tuple[float, float] = (0, 0),
) -> ModuleReport:
    """Return the report of one converted module.

    Args:
        site: the module as it was.
        form: what it becomes.
        result: how its heads were decomposed.
        length: tokens T for which multiply-accumulates are counted.
        seconds: time it took.
        vectors: how many inputs of queries and of keys were seen.
    """
    width = site.key.in_features
    before = dense_macs(width, site.width, site.key_value_width, length)
    apart = PerHeadScores.of(site, form.rank, form.content_bias).macs(width, length)
    return ModuleReport(
        name=site.name,
        dk=form.rank,
        weight_error=result.weight_error,
        data_error=result.data_error,
        parameters_before=dense_parameters(width, site.width, site.key_value_width, site.query.bias is not None),
        parameters_after=form.parameters(width),
        macs_before=before,
        macs_after=form.macs(width, length),
        break_even_length=form.break_even(width),
        sweeps=result.sweeps,
        converged=result.converged,
        seconds=seconds,
        per_head_error=result.per_head_error,
        per_head_macs=before if site.family.rotary else apart,
        sizes=form.head_sizes,
        query_vectors=int(vectors[0]),
        key_vectors=int(vectors[1]),
        breakdowns=result.breakdowns,
    )


def value_report(
    site: ValueSite, form: NarrowValues, found: Narrowing, length: int, seconds: float, vectors: float
) -> ValueReport:
    """Return the report of one module's converted values; arguments as for `module_report`."""
    width = site.value.weight.shape[1]
    dense = replace(form, sizes=(site.head_width,) * site.key_value_heads)
    return ValueReport(
        name=site.name,
        dv=form.dv,
        weight_error=found.weight_error,
        data_error=found.data_error,
        parameters_before=dense.parameters(width),
        parameters_after=form.parameters(width),
        macs_before=dense.macs(width, length),
        macs_after=form.macs(width, length),
        seconds=seconds,
        sizes=form.sizes,
        output_vectors=int(vectors),
    )
