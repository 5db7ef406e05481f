"""`collab-analyze`: look at the heads of a model, and write numbers and a page of pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from collab_compress.checkpoint.directory import refuse_place
from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.report import SECTIONS, Findings, Look, Study, look_at, write_findings

from .analyze_data import Data, load_data
from .command import parse, silence_libraries, stopping_in_one_line
from .source import Source, load_source, put_on


@dataclass(frozen=True)
class Arguments:
    """Look at the heads of a model: what they share, what each is worth, what they cost.

    Examples:
      collab-analyze minilm --data sentences.txt --output minilm-heads
      collab-analyze minilm-dk128 --against minilm --output before-and-after
      collab-analyze ./my-classifier --task mrpc --data-dir glue/MRPC --output heads
      collab-analyze bert-base --sections energy cost --output bert-cost
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """minilm (embedded), a model directory, stock or converted, or a name on the hub (bert-base, org/name)."""

    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Where to write: index.html, numbers.json, and a CSV file for each table. Must not exist."""

    data: tyro.conf.OmitArgPrefixes[Data]

    look: tyro.conf.OmitArgPrefixes[Look]

    against: Annotated[str | None, tyro.conf.arg(metavar="OTHER")] = None
    """A model to compare with, as MODEL before conversion; it must read the same tokens."""

    sections: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = tuple(SECTIONS)
    """What to look at."""

    device: str | None = None
    """Where to run the models, as torch names it (cpu, cuda:0); the CPU if not given."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-analyze"):
        run(parse(Arguments, "collab-analyze", argv))


def run(arguments: Arguments) -> Findings:
    """Load, look, write and say the most telling numbers."""
    silence_libraries()
    compared = [arguments.model, *([] if arguments.against is None else [arguments.against])]
    refuse_place(arguments.output, *map(find_directory, compared))
    sources = [load_source(name, edited=True) for name in compared]
    for each in sources:
        put_on(each.model, arguments.device)
    source, other = sources[0], sources[1] if len(sources) > 1 else None
    with Bars() as bars:
        findings = look_at(_study(arguments, source, other, bars), arguments.sections)
    write_findings(findings, arguments.output)
    for line in findings.highlights:
        print(line)
    for name, reason in findings.omitted.items():
        print(f"Not shown: {name}: {reason}.")
    print(f"\nPage: {arguments.output / 'index.html'}")
    return findings


def _study(arguments: Arguments, source: Source, other: Source | None, bars: "Bars") -> Study:
    loaded = load_data(arguments.data, source.model, source.tokenizer, arguments.look.seed)
    return Study(
        source.model,
        loaded.batches,
        source.name,
        loaded.words,
        None if other is None else other.model,
        "baseline" if other is None else other.name,
        source.tokenizer,
        loaded.sentence,
        loaded.score,
        arguments.look,
        bars,
    )


class Bars:
    """A progress bar on standard error for what is being measured; it goes away when that is done."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._label = ""

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """Show how much is done."""
        if self._bar is None or label != self._label:
            self.close()
            self._bar, self._label = tqdm(desc=label, total=total, disable=None, leave=False), label
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Bars":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.close()


if __name__ == "__main__":
    main()
