"""Arguments of the commands; importing them takes no time, so that `--help` is printed at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from collab_compress_cli.arguments import AUTO, Common, Count, Device, Directory, File, Model

from collab_compress.errors import DataError


@dataclass(frozen=True)
class EvaluateArguments:
    """Score a stock or converted model on tasks of MTEB or of the LM evaluation harness.

    Both are installed by pip install 'collab-compress[eval]'. Task data are downloaded from the hub, or read from its
    cache.

    Examples:
      collab-evaluate minilm-dk128 --mteb STSBenchmark SICK-R
      collab-evaluate gpt2-dk384 --lm-eval lambada_openai piqa --batch-size 4 --json gpt2-dk384.json
    """

    model: Model

    mteb: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")] = ()
    """Tasks of MTEB, for a model with the files of Sentence Transformers: STSBenchmark, SciFact, …"""

    lm_eval: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")] = ()
    """Tasks or groups of tasks of the LM evaluation harness, for a decoder: piqa, hellaswag, wikitext, …"""

    shots: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Examples in a prompt (--lm-eval); by default the task's own number."""

    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Most questions of each task (--lm-eval), to try a task out."""

    include: Directory = None
    """A folder of further tasks, as YAML files of the harness (--lm-eval)."""

    batch_size: Count = 16
    """Texts in a batch."""

    device: Device = AUTO

    common: tyro.conf.OmitArgPrefixes[Common] = field(default_factory=Common)

    def __post_init__(self) -> None:
        if bool(self.mteb) == bool(self.lm_eval):
            raise DataError("give one of --mteb TASK and --lm-eval TASK")
        for name in ("shots", "limit", "include"):
            if getattr(self, name) is not None and not self.lm_eval:
                raise DataError(f"--{name} is for --lm-eval; leave it out")
        for name, least in (("shots", 0), ("limit", 1), ("batch_size", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise DataError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
        if self.include is not None and not self.include.is_dir():
            raise DataError(f"--include {self.include}: expected a folder of the harness's YAML files")


@dataclass(frozen=True)
class ResultsArguments:
    """Tabulate the results of experiments: means over seeds, and paired differences with t-intervals.

    Examples:
      collab-results outputs/glue
      collab-results outputs/glue --papers --output RESULTS.md
      collab-results outputs/glue --against drophead/tuned --format csv
      collab-results outputs/glue --records glue.jsonl --json numbers.json --quiet
      collab-results glue.jsonl
      collab-results outputs/glue --paper collaborate --table 2
      collab-results --paper diversity
      collab-results glue.jsonl outputs/trec --pages papers --quiet
      collab-results records/*.jsonl --markdown RESULTS.md --quiet
    """

    records_in: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")] = ()
    """Folders with the outputs of experiments, at any depth, and files of records; without any, the papers' tables
    are printed."""

    against: Annotated[str | None, tyro.conf.arg(metavar="METHOD/STAGE")] = None
    """Baseline of the comparison; by default plain/tuned, or plain/given if nothing was tuned."""

    papers: bool = False
    """Show the papers' numbers on the same tasks."""

    paper: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """Only this paper: collaborate, rotation, diversity, bhattacharyya or drophead."""

    table: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """Only this table of the paper: 2, or "Figure 3"."""

    format: Literal["markdown", "csv"] = "markdown"
    """Tables to read, or one line for each number."""

    output: File = None
    """Write there instead of printing; must not exist."""

    json: File = None
    """Also write each number as JSON, with the fields of the CSV; must not exist."""

    records: File = None
    """Also write the records there, one a line, in a form that this command reads, and the outcomes of their examples
    beside it, as NAME.examples.npz; neither may exist."""

    pages: Directory = None
    """Write a page for each paper there: verdicts on its claims, its tables beside ours, and its figures, drawn or
    with what they still need; must not exist."""

    markdown: File = None
    """Rewrite the generated parts of this Markdown file: each stands between <!-- records: … --> or
    <!-- claims: … --> (findings, forest) and <!-- end -->; forest plots are drawn into images/ beside it."""

    quiet: bool = False
    """Print only errors."""
