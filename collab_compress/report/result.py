"""Make a report from its sections; write the results as a page, as JSON and as CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from posixpath import commonpath
from typing import Any

import transformers
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.analysis import with_progress
from collab_compress.architectures import find_attention
from collab_compress.attention import is_converted
from collab_compress.calibration import Batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.checkpoint.files import atomic_directory, mapped
from collab_compress.conversion.inventory import Inventory
from collab_compress.conversion.report import width_range
from collab_compress.errors import CompressionError, HeadError, UnsupportedModelError
from collab_compress.options import SECTION_NAMES, ReportOptions
from collab_compress.report.cost import cost, widths
from collab_compress.report.heads import TaskScore, attention_maps, dominance, mixing, patterns
from collab_compress.report.section import Label, Section, colours, draw_curves, draw_heatmap, short
from collab_compress.report.similarity import diversity, similarity


@dataclass(frozen=True)
class ReportResult:
    """The results of all sections of a report."""

    title: str
    facts: Mapping[str, str]  # model and data, in words
    sections: Mapping[str, Section]  # name → results, in order
    omitted: Mapping[str, str]  # name of a missing section → reason

    @property
    def highlights(self) -> list[str]:
        """The most important numbers, a sentence each."""
        return [line for section in self.sections.values() for line in section.highlights]

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps the notebook's styles out."""
        page = escape(render_page(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48rem;border:0"></iframe>'


def make_report(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    sections: Collection[str] = SECTION_NAMES,
    *,
    name: str = "model",
    data: str = "the given batches",
    baseline: PreTrainedModel | None = None,
    baseline_name: str = "baseline",
    tokenizer: PreTrainedTokenizerBase | None = None,
    sentence: str | tuple[str, str] | None = None,
    score: TaskScore | None = None,
    options: ReportOptions | None = None,
    on_progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> ReportResult:
    """Measure a model for the given sections, in the order of `SECTION_NAMES`.

    Args:
        model: stock or edited, of a known family; does not change.
        batches: keyword arguments for the model, in random order; read several times.
        sections: names of sections.
        name: of the model.
        data: description of the batches.
        baseline: a model to compare with, which reads the same batches, or None.
        baseline_name: of the baseline.
        tokenizer: of the model; required for attention maps.
        sentence: text, or pair of texts, for attention maps; (text, target) for an encoder–decoder.
        score: a task to score heads on, instead of the output error.
        options: how much to measure.
        on_progress: called with the section or measure, the number of finished items and their total (or None).

    Raises:
        HeadError: a section is unknown, none can be measured, or the models read different vocabularies.
        CalibrationError: a model does not take the batches.
        UnsupportedModelError: a model's family is not known.

    Example:
        >>> result = make_report(model, [batch], ["diversity", "mixing"], name="tiny BERT")
        >>> result.title, list(result.omitted)
        ('Heads of tiny BERT', ['mixing'])
    """
    options = options or ReportOptions()
    unknown = sorted(set(sections) - set(SECTION_NAMES))
    if unknown or not sections:
        raise HeadError(
            f"unknown section {', '.join(unknown) or 'none'}; expected some of {', '.join(SECTION_NAMES)}"
        )
    if not batches:
        raise HeadError("no batches to measure the model on; pass some")
    sizes = [getattr(each.config, "vocab_size", None) for each in (model, baseline or model)]
    if sizes[0] != sizes[1]:
        raise HeadError(
            f"{name} knows {sizes[0]} tokens and {baseline_name} {sizes[1]}; models that are compared read the same "
            "batches, so they must share a tokenizer"
        )
    label, inventory = module_labels(model), Inventory(model, batches[0])
    compared = {name: (model, label)}
    if baseline is not None:
        compared[baseline_name] = (baseline, module_labels(baseline))

    def progress(work: str) -> Callable[[int, int | None], None]:
        return partial(on_progress, work)

    def read(work: str) -> Iterable[Batch]:
        return with_progress(batches, progress(work))

    measures: dict[str, Callable[[], Section]] = {
        "widths": lambda: widths(inventory, take_sequences(batches, options.input_sequences), label, progress),
        "mixing": lambda: mixing(model, label),
        "cost": lambda: cost(inventory, options, label, progress),
        "similarity": lambda: similarity(model, baseline, read, label),
        "diversity": lambda: diversity(compared, read, tokenizer),
        "patterns": lambda: patterns(model, read, label),
        "attention_maps": lambda: attention_maps(model, tokenizer, sentence, label),
        "dominance": lambda: dominance(
            model, take_sequences(batches, options.head_sequences), score, label, progress
        ),
    }
    results, omitted = {}, {}
    for section, measure in measures.items():
        if section in sections:
            on_progress(section.replace("_", " "), 0, None)
            try:
                results[section] = measure()
            except (CompressionError, HeadError, UnsupportedModelError) as error:
                omitted[section] = str(error)
    if not results:
        raise HeadError(
            "nothing to show: " + "; ".join(f"{section}: {reason}" for section, reason in omitted.items())
        )
    sites = find_attention(model)
    form = "converted" if any(is_converted(site.module) for site in sites) else "dense"
    heads, head_widths = (width_range(getattr(site, size) for site in sites) for size in ("heads", "head_width"))
    facts = {
        "model": f"{name}, {type(model).__name__}, {form}, {model.num_parameters():,} parameters",
        "attention": f"{len(sites)} modules, {heads} heads of width {head_widths}",
        "data": f"{data}: {sum(map(sequence_count, batches)):,} sequences",
    }
    if baseline is not None:
        facts["against"] = f"{baseline_name}, {type(baseline).__name__}, {baseline.num_parameters():,} parameters"
    facts["versions"] = f"collab-compress {version('collab-compress')}, transformers {transformers.__version__}"
    return ReportResult(f"Heads of {' against '.join(compared)}", facts, results, omitted)


def take_sequences(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the first batches, with at most this many sequences in all."""
    taken: list[Batch] = []
    for batch in batches:
        if count > 0:
            taken.append(slice_batch(batch, slice(count)) if is_divisible(batch) else batch)
            count -= sequence_count(batch)
    return taken


def module_labels(model: PreTrainedModel) -> Label:
    """Return a function of a path, or use (`path[2]`), to its layer, by the attention module nearest in the tree."""
    sites = find_attention(model)
    one_kind = len({site.kind for site in sites}) == 1

    def label(module: str) -> str:
        path, _, use = module.removesuffix("]").partition("[")
        parts = [(site, [site.name.replace(".", "/"), path.replace(".", "/")]) for site in sites]
        site, _ = max(parts, key=lambda part: len(commonpath(part[1])))
        layer = use or str(site.layer)
        return layer if one_kind else f"{site.kind} {layer}"

    return label


def render_page(result: ReportResult) -> str:
    """Return the results as one HTML page, which fetches nothing.

    Example:
        >>> render_page(ReportResult("Heads of a model", {}, {}, {}))[:15]
        '<!DOCTYPE html>'
    """
    loader = PackageLoader("collab_compress.report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(short=short, draw_heatmap=draw_heatmap, draw_curves=draw_curves, colours=colours)
    return environment.get_template("page.html").render(result=result)


def write_report(result: ReportResult, directory: Path) -> None:
    """Write `index.html` and `numbers.json`; both or none.

    Args:
        result: results to write.
        directory: new folder; must not exist.

    Raises:
        CheckpointError: the folder exists or cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_report(make_report(model, [batch], ["patterns"]), Path(folder) / "heads")
        ...     print(*sorted(path.name for path in Path(folder).glob("heads/*")))
        index.html numbers.json
    """
    with atomic_directory(directory) as folder:
        (folder / "index.html").write_text(render_page(result), encoding="utf-8")
        (folder / "numbers.json").write_text(to_json(result), encoding="utf-8")


def to_json(result: ReportResult) -> str:
    """Return the results as JSON, with six significant digits, and null for numbers that are not finite.

    Example:
        >>> json.loads(to_json(ReportResult("Heads of a model", {}, {}, {})))["title"]
        'Heads of a model'
    """

    def rounded(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return float(f"{value:.6g}") if isfinite(value) else None

    return json.dumps(mapped(rounded, asdict(result)), allow_nan=False, indent=1) + "\n"
