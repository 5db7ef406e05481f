"""`collab-analyze`: look at the heads of a model, and write numbers and a page of pictures."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from collab_compress.checkpoint.directory import atomic_file
from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.report import Findings, Study, look_at, to_json, write_findings

from .arguments import AnalyzeArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .data import load_data
from .model import Source, check_json, load_source, put_on
from .outputs import check_outputs


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-analyze"):
        run(parse(Arguments, "collab-analyze", argv))


def run(arguments: Arguments) -> Findings:
    """Load, look, write and say the most telling numbers."""
    silence_libraries()
    common, against = arguments.common, arguments.against
    read = [find_directory(arguments.model, common.revision)] + ([] if against is None else [find_directory(against)])
    check_json(common.json)
    check_outputs({"--output": arguments.output, "--json": common.json}, *read, *arguments.data.files)
    source = load_source(arguments.model, edited=True, revision=common.revision)
    other = None if against is None else load_source(against, edited=True)
    for each in (source, other):
        if each is not None:
            put_on(each.model, arguments.device)
    with Bars(common.quiet) as bars:
        findings = look_at(_study(arguments, source, other, bars), arguments.sections)
    with ExitStack() as both:
        if common.json is not None:
            numbers = both.enter_context(atomic_file(common.json))
            numbers.write_text(json.dumps(to_json(findings), allow_nan=False, indent=1) + "\n", encoding="utf-8")
        write_findings(findings, arguments.output)
    common.say(*findings.actions, *([""] if findings.actions else []), *findings.highlights)
    common.say(*(f"Not shown: {name}: {reason}." for name, reason in findings.omitted.items()))
    common.say(f"\nPage: {arguments.output / 'index.html'}")
    return findings


def _study(arguments: Arguments, source: Source, other: Source | None, bars: "Bars") -> Study:
    loaded = load_data(arguments.data, source.model, source.tokenizer, arguments.look.seed)
    names = source.name, "baseline" if other is None else other.name
    if len(set(names)) == 1:  # as the models of one experiment, each in a folder `model`
        names = arguments.model, str(arguments.against)
    return Study(
        source.model,
        loaded.batches,
        names[0],
        loaded.words,
        None if other is None else other.model,
        names[1],
        source.tokenizer,
        loaded.sentence,
        loaded.score,
        arguments.look,
        bars,
    )


class Bars:
    """A progress bar on standard error for what is being measured; it goes away when that is done."""

    def __init__(self, hidden: bool = False) -> None:
        self._disabled = hidden or None  # None: where there is no terminal
        self._bar: tqdm[Any] | None = None
        self._label = ""

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """Show how much is done."""
        if self._bar is None or label != self._label:
            self.close()
            self._bar, self._label = tqdm(desc=label, total=total, disable=self._disabled, leave=False), label
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Bars":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the progress bar."""
        self.close()


if __name__ == "__main__":
    main()
