"""Print a conversion's report for people."""

from math import isinf
from statistics import mean

from collab_compress import Report


def report_lines(report: Report, calibrated_on: str) -> list[str]:
    """Format a report as a table of modules and a summary."""
    width = max(len("module"), *(len(module.name) for module in report.modules))
    lines = [
        f"{'module':<{width}}  {'dk':>4}  {'score error':>11}  {'weight error':>12}  {'parameters':>18}  "
        f"{f'MMACs at T={report.length}':>17}  {'T*':>5}"
    ]
    for module in report.modules:
        score = "–" if module.data_error is None else f"{module.data_error:.4f}"
        sizes = f"{module.parameters_before:,} → {module.parameters_after:,}"
        macs = f"{module.macs_before / 1e6:.1f} → {module.macs_after / 1e6:.1f}"
        lines.append(
            f"{module.name:<{width}}  {module.dk:>4}  {score:>11}  {module.weight_error:>12.4f}  {sizes:>18}  "
            f"{macs:>17}  {_length(module.break_even_length):>5}"
        )
    apart = [f"  {module.name}: {' '.join(map(str, module.sizes))}" for module in report.modules if module.sizes]
    return [*lines, "", *(["Channels of each head:", *apart, ""] if apart else []), *_summary(report, calibrated_on)]


def mixing_lines(heads: dict[str, int]) -> list[str]:
    """Say what head mixing was added: module → number of heads; nothing for none."""
    if not heads:
        return []
    shapes = " and ".join(f"{h}×{h}" for h in sorted(set(heads.values())))
    return [
        f"Heads mix in {len(heads)} attention module{'s' if len(heads) > 1 else ''}: alphas {shapes}, "
        f"{sum(h * h for h in heads.values()):,} parameters more.",
        "They are the identity until trained, so outputs are as without them; merge_alphas_(model) folds them in.",
    ]


def _summary(report: Report, calibrated_on: str) -> list[str]:
    shortest = min(module.break_even_length for module in report.modules)
    before = sum(module.parameters_before for module in report.modules)
    after = sum(module.parameters_after for module in report.modules)
    lines = [
        f"Query/key parameters {before:,} → {after:,} ({after / before - 1:+.0%}); "
        f"whole model {report.parameters_before:,} → {report.parameters_after:,} "
        f"({report.parameters_after / report.parameters_before - 1:+.1%}).",
        "Scores take fewer operations at any length."
        if isinf(shortest)
        else f"Scores take fewer operations up to T* = {shortest:.0f} tokens, and more beyond.",
        *_advice(report),
    ]
    if report.drift is not None:
        lines.append(
            f"Drift of {report.drift.output} on {report.drift.sequences} held-back sequences ({calibrated_on}): "
            f"{report.drift.relative_error:.2%} of its norm."
        )
    seen = min((min(module.query_vectors, module.key_vectors) for module in report.modules), default=0)
    if report.sequences and seen:
        lines.append(f"Calibrated on {report.sequences:,} sequences; each module saw {seen:,} vectors or more.")
    lines.append(f"Converted in {report.seconds:.1f} s.")
    return lines


def _advice(report: Report) -> list[str]:
    """Where shared channels cost more beyond T*, say what heads with channels of their own would cost instead."""
    modules = report.modules
    before, after, apart = (
        sum(getattr(module, name) for module in modules) for name in ("macs_before", "macs_after", "per_head_macs")
    )
    longer = any(module.sizes is None and not isinf(module.break_even_length) for module in modules)
    if not longer or apart >= before:
        return []
    errors = [module.weight_error if module.data_error is None else module.data_error for module in modules]
    own = mean(module.per_head_error for module in modules)
    return [
        f"--form per-head is cheaper beyond, and below too ({apart / after - 1:+.0%} at T={report.length}), but its "
        f"score error is {own:.4f} instead of {mean(errors):.4f} on average."
    ]


def _length(tokens: float) -> str:
    return "any" if isinf(tokens) else f"{tokens:.0f}"
