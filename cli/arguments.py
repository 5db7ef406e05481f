"""Arguments of the commands; importing them takes no time, so that `--help` is printed at once."""

import os
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import tyro

from collab_compress_options.errors import CheckpointError, CollabCompressError, DataError
from collab_compress_options.options import (
    KEEP,
    LARGEST_SEED,
    SECTION_NAMES,
    CalibrationOptions,
    Compression,
    ReportOptions,
    check_counts,
)

from .progress import progress

AUTO = "auto"
CALIBRATIONS = "auto|builtin|synthetic|generated|none|FILE[:COLUMN] ..."
MODEL = "minilm (embedded), a model directory, or a name on the hub (bert-base, org/name)."
TEACHER = "The dense model that MODEL was made from: a directory, or a name on the hub."
DEVICE = "Where to run models, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help=MODEL)]
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE", help=DEVICE)]
Directory = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]


@dataclass(frozen=True)
class Common:
    """Where the model is from, and how results are reported."""

    json: File = None
    """Also write the report as JSON."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="REV")] = None
    """Branch, tag or commit of MODEL on the hub."""

    quiet: bool = False
    """Print only warnings and errors."""

    def say(self, *lines: str) -> None:
        """Print lines, unless quiet."""
        progress.clear()
        for line in () if self.quiet else lines:
            print(line)


@dataclass(frozen=True)
class Saving(Common):
    """Where the model is from, and what becomes of the result."""

    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Also upload the result to the hub, with its model card: org/name, or a name in your own account."""


@dataclass(frozen=True, kw_only=True)
class EditArguments:
    """Arguments of every command that edits a model."""

    model: Model

    output: Directory = None
    """Where to save; by default MODEL and what was done (as MODEL-dense) in the current directory."""

    device: Device = AUTO

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)


@dataclass(frozen=True)
class Inputs:
    """Data that the model is run on."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE[:COLUMN]")] = None
    """A text file with one sentence a line, or a source and a target with a tab between them for an encoder–decoder;
    FILE:COLUMN of a .csv, .tsv or .jsonl file; by default random tokens. Models of images and
    sounds are studied in Python."""

    task: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A classification task (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, trec): its validation data are read,
    and heads are scored by its metric, which takes one pass over the data for each head."""

    data_dir: Directory = None
    """Folder with the task's files; by default the hub."""

    sentences: Count = 2000
    """Most sentences, drawn at random; or sequences of random tokens, up to 256."""

    length: Annotated[int, tyro.conf.arg(metavar="T")] = 128
    """Most tokens of a sequence; of random tokens, at most 64."""

    @property
    def files(self) -> list[Path]:
        """File or folder that is read, if any."""
        return [path for path in (self.data, self.data_dir) if path is not None]

    def __post_init__(self) -> None:
        if self.data is not None and self.task is not None:
            raise DataError("--data and --task both say what to read; give one of them")
        if self.data_dir is not None and self.task is None:
            raise DataError("--data-dir belongs to a task; give --task NAME too")
        check_counts(self, DataError, "sentences", "length")


@dataclass(frozen=True)
class AnalyzeArguments:
    """Measure the heads of a model: what they share, how important each is, what they cost.

    Examples:
      collab-analyze minilm --data sentences.txt
      collab-analyze minilm-dk128 --against minilm --output before-and-after
      collab-analyze ./my-classifier --task mrpc --data-dir glue/MRPC --output heads
      collab-analyze bert-base --sections widths cost --output bert-cost
    """

    model: Model

    data: tyro.conf.OmitArgPrefixes[Inputs]

    report: tyro.conf.OmitArgPrefixes[ReportOptions]

    output: Directory = None
    """Where to write index.html and numbers.json, a new folder; by default MODEL-heads in the current directory."""

    sentence: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Text whose attention maps are drawn; by default one of the data."""

    against: Annotated[str | None, tyro.conf.arg(metavar="OTHER")] = None
    """A model to compare with, such as MODEL before conversion; it must read the same tokens."""

    sections: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(SECTION_NAMES)}}} ...")] = SECTION_NAMES
    """What to measure."""

    device: Device = AUTO

    common: tyro.conf.OmitArgPrefixes[Common] = field(default_factory=Common)


@dataclass(frozen=True)
class Conversion(Compression):
    """How to convert, if at all."""

    def __post_init__(self) -> None:
        if self.converts:
            super().__post_init__()

    @property
    def converts(self) -> bool:
        """Whether a width or a number of layers is given, so that something is converted."""
        return any(width is not None for width in (self.dk, self.dv, self.dff, self.layers, self.keep))


def _changed(options: Any, *names: str) -> list[str]:
    """Return the flags of options that are not at their defaults: of the named ones, or of all."""
    changed = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    return [f"--{name.replace('_', '-')}" for name in changed if name in names or not names]


@dataclass(frozen=True, kw_only=True)
class CompressArguments(EditArguments):
    """Make attention, feed-forward blocks, depth or vocabulary of a pretrained model smaller, or let its heads mix.

    Without widths, half of the layers' operations are kept, as by --keep 0.5.

    Examples:
      collab-compress minilm
      collab-compress minilm --dk 128
      collab-compress minilm --dff 768 --calibration builtin texts.txt
      collab-compress minilm --layers 5 --dff 768 --calibration texts.txt
      collab-compress minilm --dk 192 --dv 252
      collab-compress minilm --keep 0.5 --calibration texts.txt
      collab-compress minilm --plan --calibration texts.txt
      collab-compress bert-base --dk 384 --output bert-base-384
      collab-compress ./my-classifier --dk 256 --calibration sentences.txt --json report.json
      collab-compress minilm --dk 128 --head-dim 128
      collab-compress ./my-classifier --mix
      collab-compress ./my-multilingual-model --vocabulary 60000 --calibration texts.txt
    """

    compression: tyro.conf.OmitArgPrefixes[Conversion]

    plan: bool = False
    """Convert nothing: print what several widths of each part cost and lose."""

    mix: bool = False
    """Add head mixing (alphas), to be trained; alone, or after conversion."""

    vocabulary: Annotated[str | None, tyro.conf.arg(metavar="N|FILE")] = None
    """Keep N tokens of the vocabulary, those that --calibration texts (or the built-in ones) have most often, or the
    tokens of a file, one a line, as tokenizer.json writes them; special tokens and single characters or bytes always
    stay. The tokenizer is saved with the model, which is a plain one. Alone, or before conversion."""

    calibration: Annotated[tuple[str, ...], tyro.conf.arg(metavar=CALIBRATIONS)] = (AUTO,)
    """Data to calibrate on. builtin: English texts that come with the package; a model with a head also reads pairs
    of them, and random tokens. synthetic: random tokens alone. auto: builtin if the model reads English, else
    synthetic. generated: texts that a model with a language-model head writes itself. none: the bare weights. Or a
    file with one text a line (or two, with a tab between: text pairs, or source and target of an encoder–decoder);
    a folder whose .txt and .md files are one text each; FILE:COLUMN or FILE:FIRST,SECOND of a .csv, .tsv or .jsonl
    file; NAME:COLUMN or NAME:CONFIGURATION:COLUMN of the training rows of a data set on the hub. Several are used
    together, as `MODEL --calibration builtin docs.txt`: texts of one narrow kind alone harm all others. Models of
    images and sounds need batches of their processor, in Python, or none."""

    calibration_options: tyro.conf.OmitArgPrefixes[CalibrationOptions] = field(default_factory=CalibrationOptions)

    stock: bool = False
    """Write a plain model, which loads without this package: with narrower feed-forward blocks (--dff), with fewer
    layers (--layers), or with narrower heads in families whose config allows that (T5, ViT, DeiT): --dk and --dv,
    with heads as wide as those of the values if --head-dim is not given."""

    def __post_init__(self) -> None:
        if self.plan:
            self._check_plan()
            return
        if self.stock:
            self._check_stock()
        if self.compression.converts:
            return
        if self.mix or self.vocabulary is not None:
            self._check_alone()
        elif self.compression.head_dim is not None:
            raise CollabCompressError(
                f"--head-dim {self.compression.head_dim} is a width of queries and keys, which without widths are "
                "chosen; pass --dk N too, or leave it out"
            )
        else:
            object.__setattr__(self, "compression", replace(self.compression, keep=KEEP))

    def _check_plan(self) -> None:
        unused = [
            *self._conversion_flags(),
            *_changed(self, "mix", "stock", "vocabulary", "output"),
            *_changed(self.saving, "push_to_hub"),
        ]
        if unused:
            raise CollabCompressError(f"--plan converts nothing; leave out {unused[0]}")

    def _check_stock(self) -> None:
        compression = self.compression
        without_heads = compression.dff is not None or compression.layers is not None
        with_dk, with_dv = compression.dk is not None, compression.dv is not None
        if self.mix or with_dk != with_dv or not (with_dk or without_heads):
            raise CollabCompressError(
                "--stock takes --dff N or --layers N, or --dk N and --dv N together, and neither --keep nor --mix"
            )

    def _check_alone(self) -> None:
        unused = [*self._conversion_flags(), *_changed(self.calibration_options)]
        unused += _changed(self, "calibration") if self.vocabulary is None else []
        if unused:
            raise CollabCompressError(
                f"{unused[0]} belongs to a conversion; pass --dk, --dv, --dff or --layers too, or leave it out"
            )

    def _conversion_flags(self) -> list[str]:
        return [*_changed(self.compression.solver), *_changed(self.compression)]

    @property
    def suffix(self) -> str:
        """Suffix of the model's name in the default name of the output."""
        widths = {name: getattr(self.compression, name) for name in ("layers", "keep", "dk", "dv", "dff")}
        converted = "".join(f"-{name}{width}" for name, width in widths.items() if width is not None)
        if self.vocabulary is not None:
            converted = f"-vocabulary{self.vocabulary if self.vocabulary.isdecimal() else ''}{converted}"
        return converted + ("-stock" if self.stock else "") + ("-mixed" if self.mix else "")


@dataclass(frozen=True, kw_only=True)
class ExpandArguments(EditArguments):
    """Turn converted attention back into dense heads that compute the same, and load without this package.

    Heads that are wider than the dense ones, as a larger --head-dim makes them, are refused.

    Examples:
      collab-expand minilm-dk384
      collab-expand my-tuned-dk256 --output my-tuned-dense --json expansion.json
    """


@dataclass(frozen=True, kw_only=True)
class MergeArguments(EditArguments):
    """Fold the mixing of heads (alphas) into the output projections: the same outputs at no further cost.

    A model without other edits is then a stock one, and loads without this package.

    Examples:
      collab-merge my-classifier-mixed
      collab-merge my-tuned-dk256-mixed --output my-tuned-dk256
    """


@dataclass(frozen=True, kw_only=True)
class PruneArguments(EditArguments):
    """Remove attention heads for good: named ones, or the least important share of all.

    For a share, heads are ranked by data. With --task, on labelled validation data: by the gradient of the loss in a
    mask on each head. With --data, on texts without labels: by how much of its attention a head gives to a single
    token (confidence), which does not depend on a task. Each attention module keeps at least one head. Fine-tune
    afterwards.

    Examples:
      collab-prune ./my-classifier --share 0.3 --task mrpc --data-dir glue/MRPC
      collab-prune minilm --share 0.2 --data sentences.txt --output minilm-pruned
      collab-prune minilm --heads encoder.layer.0.attention.self=0,3 encoder.layer.5.attention.self=7
    """

    inputs: tyro.conf.OmitArgPrefixes[Inputs]

    share: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of all heads to remove, above 0 and below 1; the least important ones."""

    heads: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODULE=H,H ...")] = ()
    """Heads to remove, counted from 0; collab-analyze names modules and shows their heads."""

    seed: int = 0
    """Seed of the rows that are drawn, if there are more than --sentences."""

    def __post_init__(self) -> None:
        check_counts(self, CollabCompressError, "seed", least=0, most=LARGEST_SEED)
        if (self.share is None) == (not self.heads):
            raise CollabCompressError("say which heads to remove: --share SHARE of all, or --heads MODULE=H,H")
        measured = self.inputs.data is not None or self.inputs.task is not None
        if self.share is not None and not 0 < self.share < 1:
            raise CollabCompressError(f"--share is {self.share}; expected a number above 0 and below 1")
        if self.share is not None and not measured:
            raise CollabCompressError(
                "--share ranks heads by data: give --task NAME (labels) or --data FILE (texts), or name --heads"
            )
        if self.heads and measured:
            raise CollabCompressError("--heads names the heads, so no data are needed; leave the data out")


@dataclass(frozen=True)
class DistillationOptions:
    """How to train. The learning rate rises to its value in the first 6 % of the steps, and then falls to 0."""

    epochs: Annotated[float, tyro.conf.arg(metavar="N")] = 2.0
    """How often each text is read."""

    learning_rate: Annotated[float, tyro.conf.arg(metavar="RATE")] = 5e-5
    """Highest learning rate, of AdamW."""

    batch_size: Count = 32
    """Texts of one step; fewer, but at least one, where they have more than 4,096 tokens together."""

    bf16: bool = False
    """Multiply in bfloat16, in mixed precision: faster on GPUs and on processors with instructions for it
    (AVX512-BF16, AMX). Processors that only emulate it (x86 without AVX-512) go on in float32."""

    seed: int = 0
    """Seed of the order of the texts, and of which are held back."""

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise CollabCompressError(f"--{name.replace('_', '-')} is {value}; expected a number above 0")
        check_counts(self, CollabCompressError, "batch_size")
        check_counts(self, CollabCompressError, "seed", least=0, most=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class DistillArguments(EditArguments):
    """Train a converted model towards the dense one, on texts without labels, to repair part of its loss.

    An eighth of the texts, at most 64, is held back to compare both models before and after. All weights are
    trained, in float32, but for those of heads; a head that predicts the next token is trained too. If it is
    interrupted, the same command goes on from the last checkpoint in OUTPUT.checkpoints.

    Examples:
      collab-distill my-classifier-keep0.5 ./my-classifier --texts train.tsv:sentence1,sentence2
      collab-distill my-embedder-keep0.5 ./my-embedder --texts documents/ queries.txt --epochs 4
      collab-distill my-llama-dff4096 org/llama --texts documents/ --length 256
    """

    teacher: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEACHER", help=TEACHER)]

    texts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE[:COLUMN] ...")]
    """Texts like those that the model will read, best the ones that it was calibrated on: all that
    collab-compress --calibration takes."""

    training: tyro.conf.OmitArgPrefixes[DistillationOptions] = field(default_factory=DistillationOptions)

    calibration_options: tyro.conf.OmitArgPrefixes[CalibrationOptions] = field(default_factory=CalibrationOptions)


def check_places(arguments: Any) -> None:
    """Refuse a model directory that does not exist and an output that does, before large libraries are imported."""
    output = getattr(arguments, "output", None)
    for model in (getattr(arguments, name, "") for name in ("model", "teacher")):
        if model.startswith((".", "/", "~")) and not os.path.isdir(os.path.expanduser(model)):
            raise CheckpointError(f"{model} is not a directory; pass a model directory or a hub name")
    if output is not None and os.path.lexists(output):
        raise CheckpointError(f"{output} exists; choose another output or remove it")
