"""A plan of widths as a page: how far the outputs move, and what each width costs."""

from collections.abc import Mapping, Sequence

from collab_compress.analysis import Plan, Trial
from collab_compress.report.result import ReportResult
from collab_compress.report.section import Curve, Curves, Panel, Section, Table

OURS = "this package (docs/guides/embedding_model.md)"  # the source of the measure


def plan_report(plan: Plan, name: str, data: str) -> ReportResult:
    """Return a plan as a report, which a notebook shows and `write_report` writes.

    Args:
        plan: what was tried.
        name: of the model, for the title.
        data: calibration data, in words.
    """
    parts = {trial.part: [other for other in plan.trials if other.part == trial.part] for trial in plan.trials}
    knees = [f"The knee of {part} is at {width}." for part, width in plan.knees.items()]
    section = Section(
        "plan",
        "What widths cost and lose",
        "Each part at several widths, all else dense. Drift is measured on sequences that were held back. The knee "
        "is the width beyond which the same saving costs more; it does not show what a task loses.",
        OURS,
        tables=[Table.of("trials", "Every width that was tried", list(map(_record, plan.trials)))] if parts else [],
        pictures=_pictures(parts, plan.length) if parts else [],
        highlights=knees or ["No part has a knee: each further narrowing costs no more than the one before."],
    )
    facts = {"data": data, "tokens": str(plan.length)}
    return ReportResult(f"Widths of {name}", facts, (section,), plan.left_out)


def _pictures(parts: Mapping[str, Sequence[Trial]], length: int) -> list[Curves]:
    return [
        Curves(
            "Drift",
            "Relative change of the outputs; a dense part has none. The line marks the knee.",
            OURS,
            [Panel(part, _drift_curves(trials)) for part, trials in parts.items()],
            x_label="width",
            y_label="drift [%]",
            bottom=0.0,
        ),
        Curves(
            "Cost",
            f"Operations of the part, parameters and measured time of the model, over dense, at {length} tokens.",
            OURS,
            [Panel(part, _cost_curves(trials)) for part, trials in parts.items()],
            x_label="width",
            y_label="share of dense",
            bottom=0.0,
            top=1.0,
        ),
    ]


def _record(trial: Trial) -> dict[str, str | float | None]:
    return {
        "part": trial.part,
        "width": trial.width,
        "drift [%]": 100 * trial.drift,
        "operations of the part, of dense": trial.operations,
        "parameters of the model, of dense": trial.parameters,
        "time of the model, of dense": trial.time,
        "knee": "knee" if trial.knee else "",
    }


def _drift_curves(trials: Sequence[Trial]) -> list[Curve]:
    points = [(trial.width, 100 * trial.drift) for trial in reversed(trials)]
    dense = (round(trials[0].width / trials[0].share), 0.0)
    widths, drifts = zip(*points, dense, strict=True)
    return [
        Curve("drift", widths, drifts),
        *(Curve("knee", [trial.width] * 2, [0, 100 * trial.drift], "bold") for trial in trials if trial.knee),
    ]


def _cost_curves(trials: Sequence[Trial]) -> list[Curve]:
    narrowest_first = trials[::-1]
    widths = [trial.width for trial in narrowest_first]
    return [
        Curve("operations", widths, [trial.operations for trial in narrowest_first]),
        Curve("parameters", widths, [trial.parameters for trial in narrowest_first]),
        Curve("time", widths, [trial.time for trial in narrowest_first]),
    ]
