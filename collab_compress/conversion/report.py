"""Reports of conversions: errors, parameters, multiply-accumulates, break-even length.

Queries and keys are counted as in "Multi-Head Attention: Collaborate Instead of Concatenate", section 3.4; values and
the output projection separately. H heads, d head width, R shared width, T tokens. Pairs are of queries and keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from collab_compress.architectures import DenseSite, ValueSite
from collab_compress.attention import MapConfig, NarrowConfig, QKConfig
from collab_compress.errors import CollabCompressError, install
from collab_compress.factorization import Factorization, Narrowing, RotaryFactorization
from collab_compress.options import Compression


def dense_parameters(widths: tuple[int, int], channels: tuple[int, int], biases: tuple[bool, bool]) -> int:
    """Return the parameters of dense projections from input widths to channels, with a bias or without."""
    return sum((width + bias) * count for width, count, bias in zip(widths, channels, biases, strict=True))


def dense_macs(widths: tuple[int, int], channels: tuple[int, int], length: int) -> int:
    """Return the multiply-accumulates of dense scores over T tokens: T·D a channel, and T² a query channel."""
    return length * (widths[0] * channels[0] + widths[1] * channels[1]) + length**2 * channels[0]


def width_range(widths: Iterable[int]) -> str:
    """Return one width, or the smallest and the largest, as text."""
    ordered = sorted(set(widths))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`.

    Raises:
        CollabCompressError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise CollabCompressError(f"tables need pandas: {install('data')}") from error
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class PartReport:
    """Costs of one converted part of a model.

    Args:
        name: path of the module.
        parameters_before: of its dense layers.
        parameters_after: of their replacements.
        macs_before: multiply-accumulates of one sequence of `Report.length` tokens, dense.
        macs_after: the same, converted.
    """

    name: str
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int


@dataclass(frozen=True)
class ModuleReport(PartReport):
    """Queries and keys of one converted attention module; its costs as in `PartReport`.

    Args:
        dk: shared width R.
        head_dim: width of one head, content bias included.
        weight_error: ‖T − T̂‖/‖T‖ over the stacked Wq·Wkᵀ.
        data_error: the same for the scores on calibration data, or None without.
        sweeps: passes of the solver; 0 if exact.
        converged: whether the solver stopped because it made no more progress.
        seconds: time of the decomposition.
        vectors: number of vectors in the moments, of query and of key inputs; 0 without data.
        breakdowns: sweeps of the solver that met a singular system. It continues with a shifted system or, if that
            fails, stops with the best factors so far.
    """

    dk: int
    head_dim: int
    weight_error: float
    data_error: float | None
    sweeps: int
    converged: bool
    seconds: float
    vectors: tuple[int, ...]
    breakdowns: int = 0


@dataclass(frozen=True)
class ValueReport(PartReport):
    """Values and output projection of one converted attention module; its costs as in `PartReport`.

    Args:
        dv: channels of values, all heads together.
        weight_error: ‖U − Û‖/‖U‖ over the stacked Wv·Wo.
        data_error: the same of the layer's outputs on calibration data, or None without.
        seconds: time of the decomposition.
        vectors: number of vectors in the moments, of the output projection's inputs; 0 without data.
    """

    dv: int
    weight_error: float
    data_error: float | None
    seconds: float
    vectors: tuple[int, ...]


@dataclass(frozen=True)
class FeedForwardReport(PartReport):
    """A feed-forward block with fewer neurons; its costs as in `PartReport`, its name that of the second layer.

    Args:
        dff: number of neurons kept.
    """

    dff: int


@dataclass(frozen=True)
class RefitReport:
    """One refitted layer, by the residual stream after it on held-back calibration sequences.

    Args:
        name: path of the layer.
        error_before: ‖converted − dense‖ over the norm of the dense stream less its mean, with the layers below
            refitted but not this one; None if it reads fewer neurons, which takes a refit.
        error_after: the same, with this layer refitted too.
        vectors: number of vectors that the layer was fitted to.
        sequences: number of sequences that they are from.
    """

    name: str
    error_before: float | None
    error_after: float
    vectors: int
    sequences: int


@dataclass(frozen=True)
class Drift:
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
class Report:
    """Report of `compress`.

    Args:
        modules: queries and keys of each converted module.
        parameters_before: of the whole model, before this conversion.
        parameters_after: of the whole model, converted.
        length: tokens T for which multiply-accumulates are counted.
        drift: relative error of the outputs, or None without calibration data.
        seconds: time of the conversion, calibration included.
        threads: CPU threads of PyTorch's operations in it.
        sequences: number of calibration sequences, without those held back.
        warnings: texts that were cut or left out, modules that saw few vectors, solvers that broke down, and others.
        values: values of each converted module.
        compression: as passed, or with the widths that `keep` chose.
        choice: which widths `keep` chose, and why; empty without `keep`.
        refits: refitted layers, in the order of the forward pass.
        feed_forward: feed-forward blocks with fewer neurons.
        removed_layers: paths in the dense model of the layers that were removed. All other paths are those in the
            converted model.
    """

    modules: tuple[ModuleReport, ...]
    parameters_before: int
    parameters_after: int
    length: int
    drift: Drift | None
    seconds: float
    threads: int
    sequences: int = 0
    warnings: tuple[str, ...] = ()
    values: tuple[ValueReport, ...] = ()
    compression: Compression | None = None
    choice: str = ""
    refits: tuple[RefitReport, ...] = ()
    feed_forward: tuple[FeedForwardReport, ...] = ()
    removed_layers: tuple[str, ...] = ()

    def _parts(self) -> dict[str, Sequence[PartReport]]:
        return {"dk": self.modules, "dv": self.values, "dff": self.feed_forward}

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        data = asdict(self)
        del data["compression"]
        return data

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each part of each module: width, errors, parameters and MACs."""
        columns = [f"{what}_{when}" for what in ("parameters", "macs") for when in ("before", "after")]
        rows = []
        for part, entries in self._parts().items():
            for entry in entries:
                row = {"module": entry.name, "part": part, "width": getattr(entry, part)}
                for column in ("weight_error", "data_error", *columns):
                    row[column] = getattr(entry, column, None)
                rows.append(row)
        return to_frame(rows)

    def __str__(self) -> str:
        before, after = self.parameters_before, self.parameters_after
        lines = [f"{before:,} → {after:,} parameters ({after / before - 1:+.1%})"]
        if self.drift is not None:
            drift = self.drift
            moved = f"outputs ({drift.output}) move by {drift.relative_error:.1%}"
            lines.append(f"{moved} on {drift.sequences} held-back sequences")
        if self.removed_layers:
            removed = ", ".join(self.removed_layers)
            lines.append(f"without {removed}; adapters of the dense model no longer fit, though they load")
        for part, entries in self._parts().items():
            if entries:
                widths = width_range(getattr(entry, part) for entry in entries)
                lines.append(f"{part}={widths} in {len(entries)} modules")
        return "\n".join([*lines, *self.warnings])


def score_costs(site: DenseSite, config: QKConfig, length: int) -> PartReport:
    """Return the costs of one module's queries and keys, for inputs of `length` tokens."""
    widths, channels = site.widths, (site.width, site.key_value_width)
    biases = site.query.bias is not None, site.key.bias is not None
    return PartReport(
        name=site.name,
        parameters_before=dense_parameters(widths, channels, biases),
        parameters_after=config.parameters(widths),
        macs_before=dense_macs(widths, channels, length),
        macs_after=config.macs(widths, length),
    )


def value_costs(site: ValueSite, config: NarrowConfig, length: int) -> PartReport:
    """Return the costs of one module's values and output projection, for inputs of `length` tokens."""
    dense = replace(config, size=site.head_width)
    return PartReport(
        name=site.name,
        parameters_before=dense.parameters(site.widths),
        parameters_after=config.parameters(site.widths),
        macs_before=dense.macs(site.widths, length),
        macs_after=config.macs(site.widths, length),
    )


def map_report(
    site: Any, config: MapConfig, result: Any, length: int, seconds: float, vectors: tuple[int, ...]
) -> ModuleReport | ValueReport:
    """Return the report of one converted map; `vectors` counts the inputs of its projections in the moments."""
    if isinstance(config, NarrowConfig):
        return value_report(site, config, result, length, seconds, vectors)
    assert isinstance(config, QKConfig)
    return module_report(site, config, result, length, seconds, vectors)


def module_report(
    site: DenseSite,
    config: QKConfig,
    result: Factorization | RotaryFactorization,
    length: int,
    seconds: float,
    vectors: tuple[int, ...],
) -> ModuleReport:
    """Return the report of one module's queries and keys; `vectors` counts the inputs of both in the moments."""
    sweeps, converged, breakdowns = 0, True, 0  # of an answer in closed form
    if isinstance(result, Factorization):
        sweeps, converged, breakdowns = result.sweeps, result.converged, result.breakdowns
    return ModuleReport(
        **vars(score_costs(site, config, length)),
        dk=config.rank,
        head_dim=config.width,
        weight_error=result.weight_error,
        data_error=result.data_error,
        sweeps=sweeps,
        converged=converged,
        seconds=seconds,
        vectors=vectors,
        breakdowns=breakdowns,
    )


def value_report(
    site: ValueSite, config: NarrowConfig, result: Narrowing, length: int, seconds: float, vectors: tuple[int, ...]
) -> ValueReport:
    """Return the report of one module's values; `vectors` counts the output projection's inputs in the moments."""
    return ValueReport(
        **vars(value_costs(site, config, length)),
        dv=config.dv,
        weight_error=result.weight_error,
        data_error=result.data_error,
        seconds=seconds,
        vectors=vectors,
    )
