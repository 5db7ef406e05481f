"""Arguments of the commands; importing them takes no time, so that `--help` is printed at once."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from collab_compress.errors import CollabCompressError, DataError
from collab_compress.options import SECTION_NAMES, CalibrationOptions, Compression, Look

AUTO = "auto"
CALIBRATIONS = "synthetic|generated|none|FILE[:COLUMN]|synthetic+FILE|DIR"
RECOVERY_CALIBRATIONS = "synthetic|generated|FILE[:COLUMN]|synthetic+FILE"
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE")]
STEPS = 150  # of 16 sequences, as were tried


@dataclass(frozen=True)
class Common:
    """Where the model is from, and what is told of the result."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report as JSON as well."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="REV")] = None
    """Branch, tag or commit of MODEL on the hub."""

    quiet: bool = False
    """Print only warnings and errors."""

    def say(self, *lines: str) -> None:
        """Print lines, unless that is not wanted."""
        for line in () if self.quiet else lines:
            print(line)


@dataclass(frozen=True)
class Saving(Common):
    """Where the model is from, and what becomes of the result."""

    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Upload the result to the hub too, with its model card; org/name, or a name of your own."""


@dataclass(frozen=True)
class Inputs:
    """Data that the model is run on."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None
    """A text file with one sentence a line, or a source and a target with a tab between them for an encoder–decoder;
    FILE:COLUMN of a .csv, .tsv or .jsonl file; random tokens (noise, for images) if not given."""

    task: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A task of classification (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, imdb, yelp, yelp_full, ag_news,
    dbpedia, yahoo, trec, snli): its validation data are read, and heads are scored by its metric, at a pass over them
    for each head."""

    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder with the task's files; the hub if not given."""

    sentences: Annotated[int, tyro.conf.arg(metavar="N")] = 2000
    """Sentences at most, drawn at random; as many sequences of random tokens, up to 256."""

    length: Annotated[int, tyro.conf.arg(metavar="T")] = 128
    """Tokens of a sequence at most."""

    @property
    def files(self) -> list[Path]:
        """File or folder that is read, if any."""
        return [path for path in (self.data, self.data_dir) if path is not None]

    def __post_init__(self) -> None:
        if self.data is not None and self.task is not None:
            raise DataError("--data and --task both say what to read; give one of them")
        if self.data_dir is not None and self.task is None:
            raise DataError("--data-dir belongs to a task; give --task NAME too")
        if self.sentences < 1 or self.length < 1:
            raise DataError(f"got {self.sentences} sentences of {self.length} tokens; expected at least 1")


@dataclass(frozen=True)
class Data(Inputs):
    """Data that the model is run on."""

    sentence: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Whose attention maps are drawn; one of the data if not given."""


@dataclass(frozen=True)
class AnalyzeArguments:
    """Measure the heads of a model: what they share, what each is worth, what they cost.

    Examples:
      collab-analyze minilm --data sentences.txt --output minilm-heads
      collab-analyze minilm-dk128 --against minilm --output before-and-after
      collab-analyze ./my-classifier --task mrpc --data-dir glue/MRPC --output heads
      collab-analyze bert-base --sections energy cost --output bert-cost
    """

    model: Model
    """minilm (embedded), a model directory, stock or converted, or a name on the hub (bert-base, org/name)."""

    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Where to write: index.html, numbers.json, and a CSV file for each table. Must not exist."""

    data: tyro.conf.OmitArgPrefixes[Data]

    look: tyro.conf.OmitArgPrefixes[Look]

    against: Annotated[str | None, tyro.conf.arg(metavar="OTHER")] = None
    """A model to compare with, as MODEL before conversion; it must read the same tokens."""

    sections: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(SECTION_NAMES)}}} ...")] = SECTION_NAMES
    """What to measure."""

    device: Device = AUTO
    """Where to run the models, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    common: tyro.conf.OmitArgPrefixes[Common] = field(default_factory=Common)


@dataclass(frozen=True)
class Conversion(Compression):
    """How to convert, if at all."""

    def __post_init__(self) -> None:
        if self.asked:
            super().__post_init__()

    @property
    def asked(self) -> bool:
        """Whether anything is to be converted."""
        return any(width is not None for width in (self.dk, self.dv, self.dff, self.keep))


def _changed(options: Any) -> list[str]:
    """Return the flags of the options that are not at their defaults, without dashes in front."""
    names = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    return ["solver" if name == "method" else name.replace("_", "-") for name in names]


@dataclass(frozen=True)
class CompressArguments:
    """Convert a pretrained model's attention into collaborative form, without retraining, or let its heads mix.

    Examples:
      collab-compress minilm --dk 128
      collab-compress minilm --dk 192 --dv 252
      collab-compress minilm --keep 0.5 --calibration texts.txt
      collab-compress bert-base --dk 384 --output bert-base-384
      collab-compress ./my-classifier --dk 256 --calibration sentences.txt --json report.json
      collab-compress minilm --dk 192 --form per-head
      collab-compress minilm --dk 128 --recover
      collab-compress ./my-classifier --mix
      collab-compress minilm --plan --calibration texts.txt
    """

    model: Model
    """minilm (embedded), a model directory, or a name on the hub (bert-base, distilbert, albert-base, org/name)."""

    compression: tyro.conf.OmitArgPrefixes[Conversion]

    device: Device = AUTO
    """Where to convert, as torch names it (cpu, cuda:0; cuda is each process's own GPU); auto: the accelerator, if
    there is one. Modules are decomposed on the CPU if the device has no float64."""

    recover: Annotated[int | None, tyro.conf.arg(metavar="[STEPS]")] = None
    """Then bring the converted attention nearer to the dense model's by a short distillation without labels, on the
    same kind of data; 150 steps if no number is given."""

    plan: bool = False
    """Convert nothing: try several widths of each part by itself, and print what they cost and lose."""

    mix: bool = False
    """Add head mixing (alphas), to be trained; alone, or after conversion."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-dkN-dvN, with -per-head, -recovered, -stock and -mixed where that was asked for, in the
    current directory if not given."""

    calibration: Annotated[str, tyro.conf.arg(metavar=CALIBRATIONS)] = "synthetic"
    """Data that says which input directions matter: random tokens (noise for images and sounds), texts that a decoder
    with a language-model head writes itself, none, a file with one text a line (or two, with a tab between, as a
    classifier of pairs reads them), FILE:COLUMN or FILE:FIRST,SECOND of a .csv, .tsv or .jsonl file, NAME:COLUMN or
    NAME:CONFIGURATION:COLUMN of a data set's training rows, random tokens beside any of these, or a folder of images
    or of 16-bit .wav files, which takes the processor beside the model."""

    calibration_options: tyro.conf.OmitArgPrefixes[CalibrationOptions] = field(default_factory=CalibrationOptions)

    stock: bool = False
    """Write a plain model, which needs no package: with narrower feed-forward blocks (--dff), or with narrower heads
    where the family's config has room for them (T5, ViT, DeiT); --dk and --dv are then --form per-head with
    --equal-heads."""

    standalone: bool = False
    """Ship the modelling code too: people without this package load it with trust_remote_code=True."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)

    def __post_init__(self) -> None:
        if self.plan:
            self._check_plan()
            return
        if self.stock:
            self._check_stock()
        if self.compression.asked:
            if self.recover is not None and self.calibration == "none":
                raise CollabCompressError("--recover trains on calibration data; leave --calibration none out")
            if self.recover is not None and self.compression.keeps_attention:
                raise CollabCompressError("--recover trains converted attention; pass --dk or --dv too")
            return
        if not self.mix:
            raise CollabCompressError(
                "nothing to do: pass --dk, --dv or --dff N, or --keep SHARE, to convert, --mix to mix heads, or "
                "--plan to see what widths cost"
            )
        unused = [
            *_changed(self.compression.solver),
            *_changed(self.compression),
            *_changed(self.calibration_options),
            *(["calibration"] if self.calibration != "synthetic" else []),
            *([] if self.recover is None else ["recover"]),
        ]
        if unused:
            raise CollabCompressError(
                f"--{unused[0]} belongs to a conversion; pass --dk, --dv or --dff too, or leave it out"
            )

    def _check_plan(self) -> None:
        unused = {
            "dk, --dv, --dff or --keep": self.compression.asked,
            "mix": self.mix,
            "recover": self.recover is not None,
            "stock": self.stock,
            "output": self.output is not None,
        }
        if any(unused.values()):
            name = next(name for name, given in unused.items() if given)
            raise CollabCompressError(f"--plan converts nothing; leave out --{name}")

    def _check_stock(self) -> None:
        asked = self.compression
        heads = asked.dk is not None and asked.dv is not None
        blocks = asked.dff is not None and asked.dk is None and asked.dv is None
        if not (heads or blocks) or self.mix or self.standalone:
            raise CollabCompressError(
                "--stock takes --dff N, or --dk N and --dv N together, and neither --mix nor --standalone"
            )
        if heads:
            compression = replace(asked, form="per-head", equal_heads=True)
            object.__setattr__(self, "compression", compression)

    @property
    def suffix(self) -> str:
        """Suffix of the model's name in the default name of the output."""
        widths = {name: getattr(self.compression, name) for name in ("keep", "dk", "dv", "dff")}
        converted = "".join(f"-{name}{width}" for name, width in widths.items() if width is not None)
        recovered = "" if self.recover is None else "-recovered"
        if self.stock:
            return f"{converted}{recovered}-stock"
        form = "" if self.compression.form == "shared" else f"-{self.compression.form}"
        return converted + form + recovered + ("-mixed" if self.mix else "")


@dataclass(frozen=True)
class EvaluateArguments:
    """Score a model, converted or not, on tasks of MTEB or of the LM evaluation harness.

    Both come with pip install 'collab-compress[eval]'. Data of tasks are fetched from the hub, or from its cache.

    Examples:
      collab-evaluate minilm-dk128 --mteb STSBenchmark SICK-R
      collab-evaluate gpt2-dk384 --lm-eval lambada_openai piqa --batch-size 4 --json gpt2-dk384.json
    """

    model: Model
    """minilm (embedded), a model directory, stock or converted, or a name on the hub (bert-base, org/name)."""

    mteb: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")] = ()
    """Tasks of MTEB, for a model in the form of Sentence Transformers: STSBenchmark, SciFact, …"""

    lm_eval: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")] = ()
    """Tasks, or groups of them, of the LM evaluation harness, for a decoder: piqa, hellaswag, wikitext, …"""

    shots: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Examples in a prompt (--lm-eval); the task's own number if not given."""

    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Questions of each task at most (--lm-eval), for trying out."""

    include: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A folder of further tasks, as the harness's YAML files (--lm-eval)."""

    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Texts in a batch."""

    device: Device = AUTO
    """Where to run the model, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

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

    @property
    def package(self) -> str:
        """The package that scores."""
        return "mteb" if self.mteb else "lm_eval"


@dataclass(frozen=True)
class ExpandArguments:
    """Turn collaborative attention back into dense per-head attention, which loads without this package.

    Where a head's scores have a rank above its width the dense form is the nearest one, and the error is said.

    Examples:
      collab-expand minilm-dk384
      collab-expand my-tuned-dk256 --output my-tuned-dense --json expansion.json
    """

    model: Model
    """A converted model: its directory, or its name on the hub."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-dense in the current directory if not given."""

    device: Device = AUTO
    """Where to compute, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)


@dataclass(frozen=True)
class MergeArguments:
    """Fold the mixing of heads (alphas) into the output projections: the same outputs, no further cost.

    A model that is edited in no other way is a stock one afterwards, and loads without this package.

    Examples:
      collab-merge my-classifier-mixed
      collab-merge my-tuned-dk256-mixed --output my-tuned-dk256
    """

    model: Model
    """A model whose heads mix (collab-compress MODEL --mix): its directory, or its name on the hub."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-merged in the current directory if not given."""

    device: Device = AUTO
    """Where to compute, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)


@dataclass(frozen=True)
class PruneArguments:
    """Remove attention heads for good: named ones, or the least important share of all.

    What a share goes by must be measured, and the data say how. With --task, on labelled validation data: how much
    the loss changes as a head is weighed less (the gradient of the loss in the heads). With --data, on texts without
    labels: how much of its attention a head gives to a single token (confidence), which knows nothing of a task.
    Each attention module keeps a head at least. Fine-tune afterwards.

    Examples:
      collab-prune ./my-classifier --share 0.3 --task mrpc --data-dir glue/MRPC
      collab-prune minilm --share 0.2 --data sentences.txt --output minilm-pruned
      collab-prune minilm --heads encoder.layer.0.attention.self=0,3 encoder.layer.5.attention.self=7
    """

    model: Model
    """minilm (embedded), a model directory, stock or converted, or a name on the hub (bert-base, org/name)."""

    inputs: tyro.conf.OmitArgPrefixes[Inputs]

    share: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """How many of all heads to remove, above 0 and below 1; the least important ones."""

    heads: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODULE=H,H ...")] = ()
    """Which heads to remove, counted from 0; collab-analyze names modules and shows their heads."""

    seed: int = 0
    """Seed of the rows that are drawn, where there are more than --sentences."""

    device: Device = AUTO
    """Where to measure, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-pruned in the current directory if not given."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)

    def __post_init__(self) -> None:
        if (self.share is None) == (not self.heads):
            raise CollabCompressError("say which heads go: --share SHARE of all, or --heads MODULE=H,H")
        measured = self.inputs.data is not None or self.inputs.task is not None
        if self.share is not None and not 0 < self.share < 1:
            raise CollabCompressError(f"--share is {self.share}; expected a number above 0 and below 1")
        if self.share is not None and not measured:
            raise CollabCompressError(
                "--share ranks heads by data: give --task NAME (labels) or --data FILE (texts), or name --heads"
            )
        if self.heads and measured:
            raise CollabCompressError("--heads says which heads go, so nothing is measured; leave the data out")


@dataclass(frozen=True)
class RecoverArguments:
    """Bring a converted model nearer to the dense one, without labels.

    Given texts, the layers that write to the hidden states are refitted to them by least squares. Then attention is
    trained for some steps towards the dense model's; `--steps 0` leaves that out.

    `collab-compress MODEL --dk N --recover` converts and does the same in one go.

    Examples:
      collab-recover minilm-dk128
      collab-recover my-classifier-dk256 --dense ./my-classifier --steps 0 --calibration sentences.txt
    """

    model: Model
    """A converted model: its directory, or its name on the hub."""

    dense: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """The model it was converted from; what collab_compress.json beside it says if not given."""

    steps: Annotated[int, tyro.conf.arg(metavar="N")] = STEPS
    """Steps of 16 sequences at most; of texts there may be fewer."""

    calibration: Annotated[str, tyro.conf.arg(metavar=RECOVERY_CALIBRATIONS)] = "synthetic"
    """Texts that both models read: random tokens, texts that the dense one writes, a file with one text a line,
    FILE:COLUMN of a .csv, .tsv or .jsonl file, or random tokens beside either."""

    learning_rate: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None
    """At its highest, 1e-3 if not given, or 2e-4 where values are converted; it rises over the first eighth of the
    steps and falls along a cosine."""

    length: Annotated[int | None, tyro.conf.arg(metavar="T")] = None
    """Tokens of a random sequence (64 if not given), or where texts are cut (the model's limit if not given)."""

    seed: int = 0
    """Seed of random tokens and of the order of texts."""

    device: Device = AUTO
    """Where to train, as torch names it: cpu, or cuda for each process's own GPU; auto: the accelerator, if there is
    one."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-recovered in the current directory if not given."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)


@dataclass(frozen=True)
class ResultsArguments:
    """Tabulate the results of experiments: means over seeds, and paired differences with t-intervals.

    Examples:
      collab-results outputs/glue
      collab-results outputs/glue --papers --output RESULTS.md
      collab-results outputs/glue --against drophead/tuned --format csv
      collab-results outputs/glue --records glue.jsonl --json numbers.json --quiet
      collab-results glue.jsonl
      collab-results outputs/multi30k --significance
      collab-results outputs/glue --paper collaborate --table 2
      collab-results --paper diversity
      collab-results glue.jsonl outputs/trec --pages papers --quiet
      collab-results records/*.jsonl --markdown RESULTS.md --quiet
    """

    records_in: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH")] = ()
    """Folders with the outputs of experiments, at any depth, and files of records; without them the papers' tables
    are printed as they are."""

    against: Annotated[str | None, tyro.conf.arg(metavar="METHOD/STAGE")] = None
    """Baseline of the comparison; by default plain/tuned, or plain/given if nothing was tuned."""

    papers: bool = False
    """Show the papers' numbers on the same tasks."""

    paper: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """Of this paper only: collaborate, rotation, diversity, bhattacharyya or drophead."""

    table: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """Of this table only: 2, or "Figure 3"."""

    format: Literal["markdown", "csv"] = "markdown"
    """Tables to read, or a line for each number."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write there instead of printing; must not exist."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write each number as JSON as well, with the fields of the CSV; must not exist."""

    records: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the records there, one a line, to be read in the folders' place; must not exist."""

    pages: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write a page for each paper there, of all records: verdicts on its claims, its tables with ours beside them,
    and its figures, drawn or with what they still need; must not exist."""

    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the parts of this Markdown file anew that are made of records, each between <!-- records: … --> or
    <!-- claims: … --> and <!-- end -->."""

    significance: bool = False
    """Also compare translations sentence by sentence, by sacreBLEU's paired bootstrap; in tables to read only."""

    quiet: bool = False
    """Print no tables, only errors."""
