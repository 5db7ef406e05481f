"""Print a conversion's report for people."""

from math import isinf

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
            f"{module.name:<{width}}  {module.rank:>4}  {score:>11}  {module.weight_error:>12.4f}  {sizes:>18}  "
            f"{macs:>17}  {_length(module.break_even_length):>5}"
        )
    return [*lines, "", *_summary(report, calibrated_on)]


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
    ]
    if report.drift is not None:
        lines.append(
            f"Drift of {report.drift.output} on {report.drift.sequences} held-back sequences ({calibrated_on}): "
            f"{report.drift.relative_error:.2%} of its norm."
        )
    lines.append(f"Converted in {report.seconds:.1f} s.")
    return lines


def _length(tokens: float) -> str:
    return "any" if isinf(tokens) else f"{tokens:.0f}"
