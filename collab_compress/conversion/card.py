"""The model card of an edited model: what it was made from, how, what that cost, and how to load it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from statistics import mean
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from collab_compress.attention import FORM_KINDS, FORMS, RotaryScores
from collab_compress.checkpoint import edits_of
from collab_compress.conversion.report import FeedForwardReport, ModuleReport, Report, ValueReport
from collab_compress.options import Compression

CARD = "README.md"
TAGS = ("collab_compress", "collaborative-attention")
EDITED = {
    **{form.kind: form.title for form in FORM_KINDS.values()},
    "alphas": "mixed heads",
    "pruned": "fewer heads",
}
NEEDS = (
    "The environment that loads this model needs the package: `pip install collab-compress`, and `import "
    "collab_compress` before loading. Checkpoints written with `--standalone` need `trust_remote_code=True` instead."
)
TAKEN = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name", "datasets")


@dataclass(frozen=True)
class Origin:
    """Origin of an edited model.

    Args:
        name: as people know it.
        directory: its files, whose card says licence, languages and task.
        repository: its name on the hub, if it is there.
    """

    name: str
    directory: Path | None = None
    repository: str | None = None


def model_card(
    model: PreTrainedModel,
    title: str,
    origin: Origin,
    compression: Compression | None = None,
    calibration: str | None = None,
    report: Report | None = None,
    notes: Sequence[str] = (),
) -> ModelCard:
    """Write the card of an edited model, or of one that was edited and is stock again.

    Licence, languages, task and library are those of the source's card, where it has one that can be read.

    Args:
        model: edited.
        title: heading of the card, and what stands for the model's place in the lines that load it.
        origin: what it was made from.
        compression: how it was converted, if it was.
        calibration: what it was calibrated on, in words.
        report: of the conversion.
        notes: what else was done to it, a paragraph each.
    """
    source = _source_card(origin.directory)
    taken = {name: source[name] for name in TAKEN if _is_text(source.get(name))}
    tags = source.get("tags")
    base = origin.repository or source.get("base_model")
    data = ModelCardData(
        base_model=base if _is_text(base) else None,
        tags=list(dict.fromkeys([*(tags if _is_text(tags) and isinstance(tags, list) else []), *TAGS])),
        **{"library_name": "transformers", **taken},
    )
    text = [
        f"# {title}",
        f"`{type(model).__name__}`{f' with {words}' if (words := edited_words(model)) else ''}, made from "
        f"`{origin.repository or origin.name}` with collab-compress.",
        "## Use",
        *([NEEDS] if edited_words(model) else []),
        "```python\n" + "\n".join(loading_lines(model, title)) + "\n```",
        "## How it was made",
        *_made(model, compression, calibration, report),
        *notes,
        *_figures(report),
        "## Licence",
        _licence(taken),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n")


def loading_lines(model: PreTrainedModel, path: str | Path) -> list[str]:
    """Return the lines that load an edited model, or a stock one."""
    name, words = type(model).__name__, edited_words(model)
    return [
        *([f"import collab_compress  # lets Transformers rebuild the {words}"] if words else []),
        f"from transformers import {name}",
        f'model = {name}.from_pretrained("{path}")',
    ]


def edited_words(model: PreTrainedModel) -> str:
    """Describe how an edited model differs from its stock model."""
    kinds = {edit.kind for edit in edits_of(model)}
    return " and ".join(words for kind, words in EDITED.items() if kind in kinds)


def _made(
    model: PreTrainedModel, compression: Compression | None, calibration: str | None, report: Report | None
) -> list[str]:
    lines = []
    if compression is not None:
        turned = any(edit.kind == RotaryScores.kind for edit in edits_of(model))
        lines.append(" ".join(_converted(compression, calibration, report, turned)))
    if any(edit.kind == "alphas" for edit in edits_of(model)):
        lines.append("Heads mix before the output projection; the mixture is the identity until it is trained.")
    return lines


def _converted(
    compression: Compression, calibration: str | None, report: Report | None, turned: bool
) -> Iterator[str]:
    """Describe the forms of queries and keys and of values."""
    of_scores, of_values = (
        f" of {len(modules)} attention modules" if modules else ""
        for modules in (report and report.modules, report and report.values)
    )
    how = f"damping {compression.solver.damping:g}, seed {compression.solver.seed}"
    how += "" if calibration is None else f", calibrated on {calibration}"
    option = "per-head" if report and any(module.sizes for module in report.modules) else compression.form
    form = RotaryScores if turned else FORMS[option]
    dk = [module.dk for module in report.modules] if report else [compression.dk]
    dv = [module.dv for module in report.values] if report else [compression.dv]
    if report and compression.keep is not None:
        how = f"--keep {compression.keep:g}, {how}"
    if dk in ([], [None]):
        yield "Queries and keys are the source's own."
    else:
        yield (
            f"Queries and keys{of_scores} were decomposed into {form.space} of R = {_widths(dk)} (`{option}`, "
            f"solver `{compression.solver.method}`, {how}), without retraining."
        )
    if dv in ([], [None]):
        yield "Values and outputs are the source's own."
    else:
        yield (
            f"Values{of_values} were narrowed to dv = {_widths(dv)} channels, all heads together, and the output "
            f"projections fitted to them ({how}), without retraining."
        )
    if report and report.feed_forward:
        yield (
            f"{len(report.feed_forward)} feed-forward blocks keep {compression.dff} neurons each, chosen by what "
            f"leaving them out would cost ({how})."
        )
    if report and report.refits:
        yield (
            f"{len(report.refits)} layers that write to the hidden states were refitted towards the source's, in "
            "closed form."
        )


def _widths(widths: Sequence[int | None]) -> str:
    """Write one width, or the least and the greatest."""
    found = sorted(width for width in set(widths) if width is not None)
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _figures(report: Report | None) -> list[str]:
    if report is None:
        return []
    rows = {}
    if report.modules:
        rows["query/key parameters"] = _parameters(report.modules)
    if report.values:
        rows["value/output parameters"] = _parameters(report.values)
    if report.feed_forward:
        rows["feed-forward parameters"] = _parameters(report.feed_forward)
    rows["parameters"] = f"{report.parameters_before:,} → {report.parameters_after:,}"
    if report.modules:
        lengths = min(each.break_even_length for each in report.modules)
        rows["relative error of scores, mean over modules"] = _error(report.modules)
        rows["scores take fewer operations"] = "at any length" if isinf(lengths) else f"up to {lengths:.0f} tokens"
    if report.values:
        rows["relative error of what heads add, mean over modules"] = _error(report.values)
        rows["values take fewer operations"] = "at any length"
    if report.refits:
        last = report.refits[-1]
        before = "" if report.feed_forward else f"{last.error_before:.2%} → "  # there is none with fewer neurons
        rows["error of the last layer's hidden states, refitted"] = f"{before}{last.error_after:.2%}"
    if report.drift is not None:
        rows[f"drift of {report.drift.output} on held-back sequences"] = f"{report.drift.relative_error:.2%}"
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    return ["## Figures", table]


def _parameters(maps: Sequence[ModuleReport | ValueReport | FeedForwardReport]) -> str:
    return f"{sum(each.parameters_before for each in maps):,} → {sum(each.parameters_after for each in maps):,}"


def _error(maps: Sequence[ModuleReport | ValueReport]) -> str:
    return f"{mean(each.weight_error if each.data_error is None else each.data_error for each in maps):.4f}"


def _licence(taken: dict[str, Any]) -> str:
    if "license" not in taken:
        return "The source's card names none."
    name = taken["license"] if isinstance(taken["license"], str) else ", ".join(taken["license"])
    named = taken.get("license_name")
    return f"That of the source: {name}{f' ({named})' if isinstance(named, str) else ''}."


def _source_card(directory: Path | None) -> dict[str, Any]:
    """Read the head of the source's card; empty where it has none, or none that can be read."""
    if directory is None or not (directory / CARD).is_file():
        return {}
    try:
        text = (directory / CARD).read_text(encoding="utf-8")
        data: Any = ModelCard(text, ignore_metadata_errors=True).data
        return dict(data.to_dict())
    except Exception:  # a card is written by hand, and nothing depends on it
        return {}


def _is_text(value: Any) -> bool:
    """Return whether a field of a model card is a text or a list of texts."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
    )
