"""Arguments of the commands; importing them takes no time, so that `--help` is printed at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from collab_compress_cli.arguments import AUTO, Common, Count, Device, Directory, File, Model

from collab_compress_options.errors import DataError
from collab_compress_options.options import check_counts


@dataclass(frozen=True)
class EvaluateArguments:
    """Score a stock or converted model on tasks of MTEB or of the LM evaluation harness.

    Both come with the extra `eval` of this package. Task data are downloaded from the hub, or read from its
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
        check_counts(self, DataError, "limit", "batch_size")
        check_counts(self, DataError, "shots", least=0)
        if self.include is not None and not self.include.is_dir():
            raise DataError(f"--include {self.include}: expected a folder of the harness's YAML files")


@dataclass(frozen=True)
class ResultsArguments:
    """Tabulate the results of experiments: means over seeds, and paired differences with t-intervals.

    Examples:
      collab-results outputs/glue
      collab-results outputs/glue --output glue.md
      collab-results outputs/glue --against drophead/tuned --format csv
      collab-results outputs/glue --records glue.jsonl --json numbers.json --quiet
      collab-results glue.jsonl
    """

    records_in: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")] = ()
    """Folders with the outputs of experiments, at any depth, and files of records."""

    against: Annotated[str | None, tyro.conf.arg(metavar="METHOD/STAGE")] = None
    """Baseline of the comparison; by default plain/tuned, or plain/given if nothing was tuned."""

    format: Literal["markdown", "csv"] = "markdown"
    """Tables to read, or one line for each number."""

    output: File = None
    """Write there instead of printing; must not exist."""

    json: File = None
    """Also write each number as JSON, with the fields of the CSV; must not exist."""

    records: File = None
    """Also write the records there, one a line, in a form that this command reads; must not exist."""

    quiet: bool = False
    """Print only errors."""
