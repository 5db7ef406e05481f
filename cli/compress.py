"""`collab-compress`: convert a pretrained model's attention into collaborative form, or let its heads mix."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from collab_compress import Compression, Report, alphas_of, compress, mix_heads_
from collab_compress.distributed import process_state

from .arguments import Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .options import Made, bar, begin, finish, output_of
from .recover import STEPS, recover, recovery_lines, recovery_note
from .source import Source, device_of, load_model
from .table import mixing_lines, report_lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-compress"):
        run(parse(Arguments, "collab-compress", with_steps(sys.argv[1:] if argv is None else argv)))


def with_steps(argv: Sequence[str]) -> list[str]:
    """Put the usual number of steps behind a bare `--recover`."""
    given = list(argv)
    for place in reversed([place for place, word in enumerate(given) if word == "--recover"]):
        if not "".join(given[place + 1 : place + 2]).lstrip("-").isdecimal():
            given.insert(place + 1, str(STEPS))
    return given


def run(arguments: Arguments) -> Report | None:
    """Load, convert or mix or both, save and print; returns the report of the conversion."""
    silence_libraries()
    saving = arguments.saving
    output = output_of(arguments.output, arguments.model, arguments.suffix)
    source = begin(arguments.model, output, saving, arguments.compression.device)
    device = device_of(arguments.compression.device)
    arguments = replace(arguments, compression=replace(arguments.compression, device=device))
    report = _convert(source, arguments) if arguments.compression.asked else None
    recovery = None if arguments.recover is None else _recover(source, arguments)
    if arguments.mix:
        mix_heads_(source.model)
    lines = [] if report is None else report_lines(report, arguments.calibration)
    if recovery is not None:
        lines += recovery_lines(recovery, arguments.calibration)
    finish(source, output, saving, _made(source, arguments, report, recovery), lines + mixing_lines(_mixed(source)))
    return report


def _convert(source: Source, arguments: Arguments) -> Report:
    compression = Compression(**asdict(arguments.compression))
    with bar("calibrating", "module", arguments.saving.quiet) as show:
        return compress(
            source.model, compression, arguments.calibration, tokenizer=source.tokenizer,
            progress=lambda name, done, total: show(done, total, name or "done"),
            distributed=process_state().num_processes > 1,
        )  # fmt: skip


def _recover(source: Source, arguments: Arguments) -> dict[str, Any]:
    dense = load_model(source.directory)
    steps = STEPS if arguments.recover is None else arguments.recover
    return recover(
        source, dense, arguments.calibration, steps, arguments.compression.length, arguments.compression.seed,
        arguments.compression.device, arguments.saving.quiet,
    )  # fmt: skip


def _mixed(source: Source) -> dict[str, int]:
    """Attention modules whose heads mix → number of heads."""
    return {name: len(alphas) for name, alphas in alphas_of(source.model).items()}


def _made(source: Source, arguments: Arguments, report: Report | None, recovery: dict[str, Any] | None) -> Made:
    record = {
        "model": arguments.model,
        "class": type(source.model).__name__,
        "compression": None if report is None else asdict(arguments.compression),
        "calibration": None if report is None else arguments.calibration,
        "report": None if report is None else report.to_dict(),
        "mixed_heads": _mixed(source),
        **({} if recovery is None else {"recovery": recovery}),
    }
    notes = [] if recovery is None else [recovery_note(recovery)]
    if report is None:
        return Made(record, notes, standalone=arguments.standalone)
    compression = Compression(**asdict(arguments.compression))
    calibration = {"synthetic": "random tokens", "none": None}.get(arguments.calibration, "texts")
    return Made(record, notes, compression, calibration, report, arguments.standalone)


if __name__ == "__main__":
    main()
