"""`collab-compress`: convert a pretrained model's attention into collaborative form, or let its heads mix."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isinf
from pathlib import Path
from typing import Any

from collab_compress import (
    CollabCompressError,
    Compression,
    ModuleReport,
    Report,
    alphas_of,
    compress,
    mix_heads_,
)
from collab_compress.analysis import Latency, model_latency, plan
from collab_compress.calibration.batches import BESIDE, text_file
from collab_compress.checkpoint.directory import atomic_file, to_json
from collab_compress.conversion.compress import sharing_copy
from collab_compress.conversion.expand import refuse_stock, to_stock
from collab_compress.conversion.recovery import attention_digest
from collab_compress.conversion.report import RefitReport, ValueReport
from collab_compress.distributed import process_state

from .arguments import STEPS
from .arguments import CompressArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line, table
from .model import Made, Source, bar, begin, check_json, finish, load_model, load_source, output_of, put_on
from .recover import recover, recovery_lines, recovery_note

NEURONS_ON_RANDOM = (
    "Neurons were chosen on random tokens alone, which loses more than texts like yours would: pass --calibration "
    "FILE, one a line, or --calibration generated for a decoder with a language-model head."
)
NOT_REFITTED = (
    "Converted on random tokens alone. Texts like yours (--calibration FILE, one a line, or --calibration generated "
    "for a decoder with a language-model head) also refit the layers that write to the hidden states, so that they "
    "repair part of what is lost."
)
TIMED_TOGETHER = 8  # sequences in the batch that is timed


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-compress"):
        run(parse(Arguments, "collab-compress", with_steps(sys.argv[1:] if argv is None else argv)))


def with_steps(argv: Sequence[str]) -> list[str]:
    """Insert the default number of steps after a bare `--recover`."""
    given = list(argv)
    for place in reversed([place for place, word in enumerate(given) if word == "--recover"]):
        if not "".join(given[place + 1 : place + 2]).lstrip("-").isdecimal():
            given.insert(place + 1, str(STEPS))
    return given


def run(arguments: Arguments) -> Report | None:
    """Load, convert or mix or both, save and print; returns the report of the conversion."""
    silence_libraries()
    saving = arguments.saving
    if arguments.plan:
        _plan(arguments)
        return None
    output = output_of(arguments.output, arguments.model, arguments.suffix)
    data = text_file(arguments.calibration)
    inputs = [] if data is None else [data]
    source = begin(arguments.model, output, saving, arguments.device, inputs=inputs)
    narrow_heads = arguments.stock and arguments.compression.dk is not None
    if narrow_heads:
        refuse_stock(source.model)
    digest = attention_digest(source.model)
    report, latency = _convert(source, arguments) if arguments.compression.asked else (None, None)
    refitted = report is not None and bool(report.refits)
    recovery = None if arguments.recover is None else _recover(source, arguments, refit=not refitted)
    if arguments.mix:
        mix_heads_(source.model)
    if narrow_heads:
        source = replace(source, model=to_stock(source.model))
    lines = [] if report is None else _report_lines(report, arguments.calibration, latency)
    if recovery is not None:
        lines += recovery_lines(recovery, arguments.calibration)
    made = _made(source, arguments, report, recovery)
    made.record["source_digest"] = digest
    finish(source, output, saving, made, lines + _mixing_lines(_mixed(source)))
    return report


def _plan(arguments: Arguments) -> None:
    """Print what several widths of each part cost and lose, and the command that converts to those at the knees."""
    saving = arguments.saving
    check_json(saving.json)
    source = load_source(arguments.model, revision=saving.revision)
    put_on(source.model, arguments.device)
    with bar("planning", "trial", saving.quiet) as show:
        found = plan(
            source.model,
            arguments.calibration,
            source.tokenizer,
            lambda name, done, total: show(done, total, f"trying {name}" if name else "done"),
            calibration_options=arguments.calibration_options,
            form=arguments.compression.form,
        )
    if saving.json is not None:
        with atomic_file(saving.json) as described:
            described.write_text(to_json(asdict(found)), encoding="utf-8")
    options = " ".join(f"--{part} {width}" for part, width in found.knees.items())
    data = "" if arguments.calibration == "synthetic" else f" --calibration {arguments.calibration}"
    saving.say(
        str(found),
        "\nEach part was tried by itself, on a part of the data. --keep SHARE chooses widths of all parts together.",
        *([f"At the knees: collab-compress {arguments.model} {options}{data}"] if options else []),
    )


def _convert(source: Source, arguments: Arguments) -> tuple[Report, Latency | None]:
    """Convert the model, and time it beside the dense one where it reads tokens and works alone."""
    compression = Compression(**vars(arguments.compression))
    together = process_state().num_processes > 1
    dense = None
    if not together and not arguments.saving.quiet:
        dense = sharing_copy(source.model)  # no weight twice
    with bar("calibrating", "module", arguments.saving.quiet) as show:
        show(0, 0, "running the model to see the inputs of attention")
        report = compress(
            source.model,
            compression,
            arguments.calibration,
            tokenizer=source.tokenizer,
            progress=lambda name, done, total: show(done, total, f"fitting {name}" if name else "done"),
            calibration_options=arguments.calibration_options,
            distributed=together,
        )
    if dense is None:
        return report, None
    try:
        return report, model_latency(dense, source.model, report.length, batch_size=TIMED_TOGETHER)
    except CollabCompressError:  # the model reads no tokens, or fewer than that
        return report, None


def _recover(source: Source, arguments: Arguments, refit: bool) -> dict[str, Any]:
    dense = load_model(source.directory)
    steps = STEPS if arguments.recover is None else arguments.recover
    return recover(
        source,
        dense,
        arguments.calibration,
        steps=steps,
        length=arguments.calibration_options.length,
        seed=arguments.compression.solver.seed,
        device=arguments.device,
        quiet=arguments.saving.quiet,
        refit=refit,
    )


def _mixed(source: Source) -> dict[str, int]:
    """Attention modules whose heads mix → number of heads."""
    return {name: len(alphas) for name, alphas in alphas_of(source.model).items()}


def _made(source: Source, arguments: Arguments, report: Report | None, recovery: dict[str, Any] | None) -> Made:
    record = {
        "model": arguments.model,
        **({} if arguments.saving.revision is None else {"revision": arguments.saving.revision}),
        "class": type(source.model).__name__,
        "compression": None if report is None else asdict(_compression(arguments, report)),
        "calibration": None if report is None else arguments.calibration,
        "calibration_options": None if report is None else asdict(arguments.calibration_options),
        "report": None if report is None else report.to_dict(),
        "mixed_heads": _mixed(source),
        **({} if recovery is None else {"recovery": recovery}),
    }
    notes = [] if recovery is None else [recovery_note(recovery)]
    if report is None:
        return Made(record, notes, standalone=arguments.standalone)
    compression = _compression(arguments, report)
    drawn = "random tokens" if source.model.main_input_name == "input_ids" else "noise"
    kind = "files" if Path(arguments.calibration).is_dir() else "texts"
    kind = f"texts and {drawn}" if arguments.calibration.startswith(BESIDE) else kind
    calibration = {"synthetic": drawn, "generated": "texts of its own", "none": None}.get(arguments.calibration, kind)
    return Made(record, notes, compression, calibration, report, arguments.standalone)


def _compression(arguments: Arguments, report: Report) -> Compression:
    """How the model was converted, with what was chosen where a share to keep was asked for."""
    return (report.compression or arguments.compression).with_solver(device=arguments.device)


def _report_lines(report: Report, calibrated_on: str, latency: Latency | None = None) -> list[str]:
    """Return what a conversion did: the whole model first, then attention, then a table of modules."""
    lines = [*([report.choice, ""] if report.choice else []), *_whole_model(report, calibrated_on, latency), ""]
    lines += [*_parts(report), "", *_calibration(report), ""]
    length = f"MMACs at T={report.length}"
    scores = [
        [
            module.name,
            str(module.dk),
            *_errors_and_sizes(module),
            "any" if isinf(module.break_even_length) else f"{module.break_even_length:.0f}",
        ]
        for module in report.modules
    ]
    values = [[module.name, str(module.dv), *_errors_and_sizes(module)] for module in report.values]
    if scores:
        header = ["module", "dk", "score error", "weight error", "parameters", length, "T*"]
        lines += [*table(header, scores), ""]
    if values:
        lines += [*table(["module", "dv", "output error", "weight error", "parameters", length], values), ""]
    channels = [f"  {module.name}: {' '.join(map(str, module.sizes))}" for module in report.modules if module.sizes]
    return [*lines, "Channels of each head:", *channels] if channels else lines[:-1]


def _errors_and_sizes(module: ModuleReport | ValueReport) -> list[str]:
    """Columns that tables of scores and of values have in common."""
    return [
        "–" if module.data_error is None else f"{module.data_error:.4f}",
        f"{module.weight_error:.4f}",
        f"{module.parameters_before:,} → {module.parameters_after:,}",
        f"{module.macs_before / 1e6:.1f} → {module.macs_after / 1e6:.1f}",
    ]


def _whole_model(report: Report, calibrated_on: str, latency: Latency | None) -> list[str]:
    """Return size, time and drift of the whole model beside the dense one's."""
    lines = [
        f"Whole model: {report.parameters_before:,} → {report.parameters_after:,} parameters "
        f"({report.parameters_after / report.parameters_before - 1:+.1%})."
    ]
    if latency is not None:
        start = f"Time at {latency.length} tokens, batch of {TIMED_TOGETHER}"
        rounds = f"half of {latency.rounds} rounds between {latency.low:.2f} and {latency.high:.2f} of dense"
        if not latency.is_steady:
            lines.append(f"{start}: cannot be told while this machine does other work ({rounds}).")
        else:
            lines.append(f"{start}: {latency.ratio:.2f} of dense (measured here, {rounds}).")
    if report.refits:
        lines.append(refit_line(report.refits, narrower=bool(report.feed_forward)))
    if calibrated_on == "synthetic":
        lines.append(NEURONS_ON_RANDOM if report.feed_forward else NOT_REFITTED)
    if report.drift is not None:
        lines.append(
            f"Drift of {report.drift.output}: {report.drift.relative_error:.2%} of its norm, on "
            f"{report.drift.sequences} held-back sequences ({calibrated_on})."
        )
    return lines


def refit_line(refits: Sequence[RefitReport], narrower: bool = False) -> str:
    """Return what refitting did to the last hidden states that a layer writes to.

    Args:
        refits: one or more.
        narrower: whether feed-forward blocks are narrower too, so that there is no error without refitting.
    """
    last = refits[-1]
    before = "" if narrower else f"{last.error_before:.1%} → "
    return (
        f"Refitted {len(refits)} layers towards the dense model's hidden states: error behind the last of them "
        f"{before}{last.error_after:.1%}."
    )


def _parts(report: Report) -> list[str]:
    """Return the size of each part, and the length up to which scores take fewer operations."""
    parts: dict[str, Any] = {"Query/key": report.modules, "Value/output": report.values}
    sizes = {
        name: [sum(getattr(module, f"parameters_{when}") for module in modules) for when in ("before", "after")]
        for name, modules in parts.items()
        if modules
    }
    if len(sizes) == 2 and len(report.modules) == len(report.values):
        sizes = {"Attention": [sum(column) for column in zip(*sizes.values(), strict=True)], **sizes}
    if report.feed_forward:
        blocks = report.feed_forward
        sizes["Feed-forward"] = [
            sum(block.parameters_before for block in blocks),
            sum(block.parameters_after for block in blocks),
        ]
    lines = [
        f"{name} parameters {before:,} → {after:,} ({after / before - 1:+.0%})."
        for name, (before, after) in sizes.items()
    ]
    if report.feed_forward:
        lines.append(
            f"{len(report.feed_forward)} feed-forward blocks have {report.feed_forward[0].dff} neurons each."
        )
    if not report.modules:
        return lines
    shortest = min(module.break_even_length for module in report.modules)
    if isinf(shortest):
        return [*lines, "Scores take fewer operations at any length."]
    line = f"Scores take fewer operations up to T* = {shortest:.0f} tokens, and more beyond."
    if shortest < report.length:
        line += f" Your inputs have {report.length}: --keep chooses a form that is cheaper there."
    return [*lines, line]


def _calibration(report: Report) -> list[str]:
    """Return what the conversion was calibrated on, and how long it took."""
    vectors = [module.vectors for module in report.modules] + [module.vectors for module in report.values]
    seen = min(map(min, vectors), default=0)
    took = f"Converted in {report.seconds:.1f} s"
    if not report.sequences or not seen:
        return [f"{took}."]
    return [
        f"Calibrated on {report.sequences:,} sequences; each module saw {seen:,} vectors or more.",
        f"{took}, of which the model ran for {report.calibrating:.1f} s to see its inputs.",
    ]


def _mixing_lines(heads: dict[str, int]) -> list[str]:
    """Return a line about added head mixing: module → number of heads; empty without mixing."""
    if not heads:
        return []
    shapes = " and ".join(f"{h}×{h}" for h in sorted(set(heads.values())))
    return [
        f"Heads mix in {len(heads)} attention module{'s' if len(heads) > 1 else ''}: alphas {shapes}, "
        f"{sum(h * h for h in heads.values()):,} parameters more.",
        "They are the identity until trained, so outputs are as without them; merge_alphas_(model) folds them in.",
    ]


if __name__ == "__main__":
    main()
