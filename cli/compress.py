"""`collab-compress`: make layers of a pretrained model smaller, or let its heads mix."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from collab_compress import (
    CollabCompressError,
    Compression,
    Report,
    alphas_of,
    compress,
    mix_heads_,
    trim_vocabulary_,
)
from collab_compress.analysis import Latency, model_latency, plan
from collab_compress.architectures import find_attention
from collab_compress.calibration.source import resolve, text_files
from collab_compress.checkpoint.files import to_json, write_new
from collab_compress.checkpoint.quantizer import LAYER_NUMBER
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.cost import Part
from collab_compress.conversion.expand import refuse_stock, to_stock
from collab_compress.conversion.report import PartReport, RefitReport
from collab_compress.errors import one_line

from .arguments import AUTO
from .arguments import CompressArguments as Arguments
from .command import table
from .model import Source, begin, check_outputs, finish, load_source
from .pretrained import find_directory
from .progress import progress

NOT_REFITTED = (
    "Converted on random inputs alone. With data like yours (--calibration FILE of texts, one a line, or generated, "
    "for a model with a language-model head; in Python, batches) the layers that write to the hidden states are "
    "refitted too, which repairs part of the loss."
)
MEANING = "Less is better on the same data, but it does not say what a task loses: score yours."
CHANGED = "Embeddings have changed: score searches before you keep an index of the dense model."
TIMED_BATCH = 8  # sequences in the batch that is timed


def run(arguments: Arguments) -> Report | None:
    """Load, convert or mix or both, save and print; return the report of the conversion, if any."""
    if arguments.plan:
        _plan(arguments)
        return None
    tokens = None if arguments.vocabulary is None else _tokens(arguments)
    source, output = begin(arguments, arguments.suffix, edited=False, inputs=text_files(arguments.calibration))
    if arguments.stock and arguments.compression.dk is not None:
        refuse_stock(source.model)
        arguments = _with_stock_heads(arguments, source)
    lines: list[str] = []
    trimming, report, words = None, None, None
    if tokens is not None:
        texts = _texts(arguments) or ("builtin",)
        progress("counting tokens")
        trimming = trim_vocabulary_(source.model, source.tokenizer, texts, tokens=tokens)
        lines += [*str(trimming).splitlines(), ""]
    if arguments.compression.converts:
        report, latency = _convert(source, arguments)
        words = _calibration_words(source, arguments)
        lines += _report_lines(report, words, latency, _embeds(source.model))
        lines += _training(arguments, output, source.model, report) if trimming is None else []
    if arguments.mix:
        mix_heads_(source.model)
    if arguments.stock and report is not None and report.of("dk"):
        source = replace(source, model=to_stock(source.model))
    mixed = {name: len(alphas) for name, alphas in alphas_of(source.model).items()}
    record: dict[str, Any] = {"model": arguments.model, "class": type(source.model).__name__}
    record |= {**_conversion_record(arguments, report), "mixed_heads": mixed}
    if arguments.saving.revision is not None:
        record["revision"] = arguments.saving.revision
    if trimming is not None:
        record["vocabulary"] = asdict(trimming)
    finish(
        source,
        output,
        arguments.saving,
        record,
        lines + _mixing_lines(mixed),
        notes=[] if trimming is None else [str(trimming)],
        new_tokens=trimming is not None,
        compression=None if report is None else _compression(arguments, report),
        calibration=words,
        report=report,
    )
    return report


def _texts(arguments: Arguments) -> tuple[str, ...]:
    """Return the sources of calibration data that are texts, by whose tokens a vocabulary is chosen."""
    names = ["builtin" if name == AUTO else name for name in arguments.calibration]
    return tuple(name for name in names if name == "builtin" or text_files((name,)))


def _tokens(arguments: Arguments) -> int | list[str]:
    """Return how many tokens stay, or which."""
    words = arguments.vocabulary or ""
    if words.isdecimal():
        if not _texts(arguments):
            raise CollabCompressError(
                f"--vocabulary {words} counts tokens in texts, and --calibration {' '.join(arguments.calibration)} "
                "has none; pass a file of texts, or name the tokens in a file: --vocabulary FILE"
            )
        return int(words)
    path = Path(words).expanduser()
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise ValueError("not a file")
        tokens = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line]
        if not tokens:
            raise ValueError("the file holds no token")
    except (OSError, ValueError) as error:
        raise CollabCompressError(
            f"--vocabulary {words}: {one_line(error)}; expected a number of tokens, or a file with one a line"
        ) from error
    return tokens


def _plan(arguments: Arguments) -> None:
    """Print what several widths of each part cost and lose; convert nothing."""
    saving = arguments.saving
    directory = find_directory(arguments.model, saving.revision)
    check_outputs({"--json": saving.json}, directory, *text_files(arguments.calibration))
    source = load_source(arguments.model, directory, arguments.device)
    table = plan(
        source.model,
        arguments.calibration,
        source.tokenizer,
        progress,
        calibration_options=arguments.calibration_options,
    )
    saving.say(str(table), "\nThe loss is of a part by itself, before refitting. --keep SHARE chooses all widths.")
    if saving.json is not None:
        write_new(saving.json, to_json(asdict(table)))


def _convert(source: Source, arguments: Arguments) -> tuple[Report, Latency | None]:
    """Convert the model, and time it beside the dense one if it reads tokens."""
    compression = Compression(**vars(arguments.compression))
    dense = None if arguments.saving.quiet else sharing_copy(source.model)  # holds no weight twice
    report = compress(
        source.model,
        compression,
        arguments.calibration,
        tokenizer=source.tokenizer,
        progress=progress,
        calibration_options=arguments.calibration_options,
    )
    if dense is None:
        return report, None
    progress("timing both models")
    try:
        return report, model_latency(dense, source.model, report.length, batch_size=TIMED_BATCH)
    except CollabCompressError:  # the model reads no tokens, or fewer than that
        return report, None


def _compression(arguments: Arguments, report: Report) -> Compression:
    """Return the options of the conversion, with the widths and the form that --keep chose."""
    return (report.compression or arguments.compression).with_solver(device=arguments.device)


def _conversion_record(arguments: Arguments, report: Report | None) -> dict[str, Any]:
    """Return the part of the record that describes the conversion, if any."""
    if report is None:
        return dict.fromkeys(("compression", "calibration", "calibration_options", "report"))
    return {
        "compression": asdict(_compression(arguments, report)),
        "calibration": arguments.calibration,
        "calibration_options": asdict(arguments.calibration_options),
        "report": report.to_dict(),
    }


def _calibration_words(source: Source, arguments: Arguments) -> str | None:
    """Return the calibration data in the words of a report and a card; None without any."""
    sources = resolve(arguments.calibration, source.model, source.tokenizer, arguments.calibration_options)
    return " and ".join(dict.fromkeys(part.words for part in sources)) or None


def _with_stock_heads(arguments: Arguments, source: Source) -> Arguments:
    """Return the arguments with heads of queries and keys as wide as those of the values, if no width is given."""
    compression = arguments.compression
    if compression.head_dim is not None or compression.dv is None:
        return arguments
    widest = -(-compression.dv // find_attention(source.model)[0].key_value_heads)
    return replace(arguments, compression=replace(compression, head_dim=widest))


def _training(arguments: Arguments, output: Path, model: PreTrainedModel, report: Report) -> list[str]:
    """Return lines that say how to train the result on the same texts, if it is calibrated on files of them.

    Not where nobody measured what that gives, and a teacher is of the hub's main revision.
    """
    kind = report.agreement and report.agreement.kind
    unmeasured = kind == "masked tokens" or (kind == "next tokens" and model.config.is_encoder_decoder)
    if unmeasured or not text_files(arguments.calibration) or arguments.saving.revision is not None:
        return []
    words = ["collab-distill", str(output), arguments.model, "--texts", *arguments.calibration]
    options = asdict(arguments.calibration_options).items()
    words += [word for name, number in options if number is not None for word in (f"--{name}", str(number))]
    return ["", f"To lose less, train it towards the dense model, without labels: {shlex.join(words)}"]


def _embeds(model: PreTrainedModel) -> bool:
    """Return whether a model may embed texts: it reads them and has no head, nor both an encoder and a decoder."""
    reads_texts = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    return reads_texts and model.base_model is model


def _report_lines(report: Report, calibration: str | None, latency: Latency | None, embeds: bool) -> list[str]:
    """Return the lines to print about a conversion: the whole model, then attention, then tables of modules."""
    lines = [*_whole_model(report, calibration, latency, embeds), ""]
    lines += [report.choice] if report.choice else []
    lines += [*_parts(report), "", *_calibration(report), ""]
    tables: dict[Part, tuple[str, str]] = {
        "dk": ("Queries and keys", "score error"),
        "dv": ("Values and outputs", "output error"),
    }
    for part, (what, error) in tables.items():
        header = ["layer", part, error, "weight error", "parameters", f"MMACs at T={report.length}"]
        by_path: dict[str, list[PartReport]] = {}
        for module in report.of(part):
            by_path.setdefault(LAYER_NUMBER.sub("*", module.name), []).append(module)
        for path, modules in by_path.items():
            lines += [f"{what} of {path}:", *table(header, map(_row, modules)), ""]
    return lines[:-1]


def _row(module: PartReport) -> list[str]:
    """Return the row of a module in the table of scores or of values."""
    return [
        ".".join(LAYER_NUMBER.findall(module.name)),
        str(module.width),
        "–" if module.data_error is None else f"{module.data_error:.4f}",
        f"{module.weight_error:.4f}",
        f"{module.parameters_before:,} → {module.parameters_after:,}",
        f"{module.macs_before / 1e6:.1f} → {module.macs_after / 1e6:.1f}",
    ]


def _whole_model(report: Report, calibration: str | None, latency: Latency | None, embeds: bool) -> list[str]:
    """Return size and time of the whole model and what of the dense one's results stays, or else the output error."""
    lines = [
        f"Whole model: {report.parameters_before:,} → {report.parameters_after:,} parameters "
        f"({report.parameters_after / report.parameters_before - 1:+.1%})."
    ]
    if latency is not None:
        lines.append(f"Time at {latency.length} tokens, batch of {TIMED_BATCH}: {latency}.")
    if report.agreement is not None:
        agreement = report.agreement
        lines.append(f"{agreement.finding.removesuffix('.')} (calibrated on {calibration}). {agreement.meaning}")
    elif report.output_error is not None:
        error = report.output_error
        lines.append(
            f"Output error: its {error.output} move by {error.relative_error:.1%} of their size on {error.sequences} "
            f"held-back sequences ({calibration}). {MEANING}{f' {CHANGED}' * embeds}"
        )
    if report.refits:
        lines.append(refit_line(report.refits))
    if calibration == "random tokens" and not report.refits:
        lines.append(NOT_REFITTED)
    return lines


def refit_line(refits: Sequence[RefitReport]) -> str:
    """Return the error of the hidden states after the last of some refitted layers."""
    last = refits[-1]
    return (
        f"Refitted {len(refits)} layers towards the dense model's hidden states: error after the last of them "
        f"{last.error_after:.1%}."
    )


def _parts(report: Report) -> list[str]:
    """Return the size of each part."""
    scores, values, blocks = report.of("dk"), report.of("dv"), report.of("dff")
    parts = {"Query/key": scores, "Value/output": values}
    if values and len(scores) == len(values):
        parts = {"Attention": [*scores, *values], **parts}
    lines = []
    for name, modules in {**parts, "Feed-forward": blocks}.items():
        before = sum(module.parameters_before for module in modules)
        after = sum(module.parameters_after for module in modules)
        if modules:
            lines.append(f"{name} parameters {before:,} → {after:,} ({after / before - 1:+.0%}).")
    if report.removed_layers:
        lines.append(f"Without {', '.join(report.removed_layers)}; other paths are those of the new model.")
        lines.append("Adapters (LoRA) of the dense model no longer fit, though they load: layers are numbered anew.")
    if blocks:
        lines.append(f"{len(blocks)} feed-forward blocks have {blocks[0].width} neurons each.")
    return lines


def _calibration(report: Report) -> list[str]:
    """Return how much data the conversion was calibrated on, and how long it took."""
    counts = [min(part.vectors) for part in report.parts if part.vectors]
    counts += [refit.vectors for refit in report.refits]
    vectors = min(filter(None, counts), default=0)  # none where a map keeps its full width
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    lines = [f"Calibrated on {report.sequences:,} sequences; each module saw at least {vectors:,} vectors."]
    return [*(lines if vectors else []), f"Converted in {report.seconds:.1f} s on {threads}."]


def _mixing_lines(heads: dict[str, int]) -> list[str]:
    """Return the lines to print about head mixing, given module → number of heads."""
    if not heads:
        return []
    shapes = " and ".join(f"{h}×{h}" for h in sorted(set(heads.values())))
    return [
        f"Heads mix in {len(heads)} attention module{'s' if len(heads) > 1 else ''}: alphas {shapes}, "
        f"{sum(h * h for h in heads.values()):,} parameters more.",
        "They are the identity until they are trained, so outputs stay the same; merge_alphas_(model) folds them in.",
    ]
