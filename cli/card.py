"""The model card of an edited model: what it was made from, how, what that cost, and how to load it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from collab_compress.attention import MAP_KINDS, RotaryConfig, SharedConfig
from collab_compress.checkpoint import edits_of
from collab_compress.conversion.cost import Part
from collab_compress.conversion.report import PartReport, Report, width_range
from collab_compress.errors import install
from collab_compress.options import Compression

CARD = "README.md"
TAG, EDITED_TAG = "collab_compress", "collaborative-attention"
MIXING = "Heads mix before the output projection; the mixture is the identity until it is trained."
EDITED = {
    **{config.kind: config.title for config in MAP_KINDS.values()},
    "alphas": "mixed heads",
    "pruned": "fewer heads",
}
NEEDS = (
    f"The environment that loads this model needs the package collab-compress ({install()}), and `import "
    "collab_compress` before loading."
)


def model_card(
    model: PreTrainedModel,
    title: str,
    source: str,
    compression: Compression | None = None,
    calibration: str | None = None,
    report: Report | None = None,
    notes: Sequence[str] = (),
    loaded_by: str | None = None,
) -> ModelCard:
    """Return the card of an edited model, or of one that is stock again.

    `notes` are paragraphs on other changes; `loaded_by` is the class of Sentence Transformers around it, if any.
    """
    words = edited_words(model)
    data = ModelCardData(
        library_name="sentence-transformers" if loaded_by else "transformers",
        tags=[TAG, *([EDITED_TAG] if words else [])],
    )
    described = f"`{type(model).__name__}` with {words}" if words else f"`{type(model).__name__}`"
    text = [
        f"# {title}",
        f"{described}, made from `{source}` with collab-compress.",
        "## Use",
        *([NEEDS] if words else []),
        "```python\n" + "\n".join(loading_lines(model, title, loaded_by)) + "\n```",
        "## How it was made",
    ]
    kinds = {edit.kind for edit in edits_of(model)}
    if compression is not None:
        text.append(" ".join(_conversion(compression, calibration, report, RotaryConfig.kind in kinds)))
    if "alphas" in kinds:
        text.append(MIXING)
    text += notes
    if report is not None:
        rows = [f"| {name} | {value} |" for name, value in _figures(report)]
        text += ["## Figures", "\n".join(["| | |", "|---|---|", *rows])]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n")


def loading_lines(model: PreTrainedModel, path: str | Path, loaded_by: str | None = None) -> list[str]:
    """Return the lines of code that load an edited or stock model, or the class around it."""
    name, words = type(model).__name__, edited_words(model)
    loading = [f"from transformers import {name}", f'model = {name}.from_pretrained("{path}")']
    if loaded_by:
        loading = [f"from sentence_transformers import {loaded_by}", f'model = {loaded_by}("{path}")']
    return [*([f"import collab_compress  # lets Transformers rebuild the {words}"] if words else []), *loading]


def edited_words(model: PreTrainedModel) -> str:
    """Return how an edited model differs from its stock model, in words."""
    kinds = {edit.kind for edit in edits_of(model)}
    return " and ".join(words for kind, words in EDITED.items() if kind in kinds)


def _conversion(
    compression: Compression, calibration: str | None, report: Report | None, rotary: bool
) -> Iterator[str]:
    """Yield sentences on what was converted, and how."""
    how = f"damping {compression.solver.damping:g}, seed {compression.solver.seed}"
    how += "" if calibration is None else f", calibrated on {calibration}"
    if report and report.choice:
        yield f"Widths were chosen by `--keep`. {report.choice}"
    scores, values, blocks = (report.of("dk"), report.of("dv"), report.of("dff")) if report else ([], [], [])
    dk = [module.width or 0 for module in scores] if report else [compression.dk] if compression.dk else []
    dv = [module.width or 0 for module in values] if report else [compression.dv] if compression.dv else []
    if dk:
        config = RotaryConfig if rotary else SharedConfig
        heads = f" with heads {width_range(module.head_dim or 0 for module in scores)} wide" if scores else ""
        yield (
            f"Queries and keys{_count(scores)} were decomposed into {config.space} of R = {width_range(dk)}{heads} "
            f"(solver `{compression.solver.method}`, {how}), without retraining."
        )
    else:
        yield "Queries and keys are the source's own."
    if dv:
        yield (
            f"Values{_count(values)} were narrowed to dv = {width_range(dv)} channels, all heads together, and the "
            f"output projections fitted to them ({how}), without retraining."
        )
    else:
        yield f"Values{'' if report and report.refits else ' and outputs'} are the source's own."
    if report and report.removed_layers:
        yield f"Layers of the source that were removed: {', '.join(report.removed_layers)} ({how})."
        yield "Adapters (LoRA) of the source do not fit, though they load: the layers are numbered anew."
    if blocks:
        yield (
            f"{len(blocks)} feed-forward blocks keep {blocks[0].width} neurons each, chosen "
            f"by what leaving them out would cost ({how})."
        )
    if report and report.refits:
        yield (
            f"{len(report.refits)} layers that write to the hidden states were refitted towards the source's, in "
            "closed form."
        )


def _count(modules: Sequence[PartReport]) -> str:
    return f" of {len(modules)} attention modules" if modules else ""


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of figures."""
    names: dict[Part, str] = {"dk": "query/key", "dv": "value/output", "dff": "feed-forward"}
    for part, name in names.items():
        if parts := report.of(part):
            before, after = (
                sum(part.parameters_before for part in parts),
                sum(part.parameters_after for part in parts),
            )
            yield f"{name} parameters", f"{before:,} → {after:,}"
    yield "parameters", f"{report.parameters_before:,} → {report.parameters_after:,}"
    if report.of("dk"):
        yield "relative error of scores, mean over modules", _error(report.of("dk"))
    if report.of("dv"):
        yield "relative error of what heads add, mean over modules", _error(report.of("dv"))
    if report.refits:
        yield "error of the last layer's hidden states, refitted", f"{report.refits[-1].error_after:.2%}"
    if report.agreement is not None:
        yield "agreement with the source on held-back sequences", report.agreement.finding
    elif report.output_error is not None:
        yield (
            f"output error of {report.output_error.output} on held-back sequences",
            f"{report.output_error.relative_error:.2%}",
        )


def _error(parts: Sequence[PartReport]) -> str:
    return f"{mean((part.weight_error if part.data_error is None else part.data_error) or 0 for part in parts):.4f}"
