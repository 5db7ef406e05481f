"""`collab-evaluate`: score a model on MTEB or on the LM evaluation harness."""

import io
import logging
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import tyro

from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import MODULES, atomic_file, to_json
from collab_compress.errors import CheckpointError, DataError
from collab_compress.external_evaluation import Score, lm_eval_scores, mteb_scores

from .command import parse, silence_libraries, stopping_in_one_line, table
from .model import AUTO, Common, Device, Model, check_json, device_of, load_source, put_on
from .outputs import check_outputs


@dataclass(frozen=True)
class Arguments:
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-evaluate"):
        run(parse(Arguments, "collab-evaluate", argv))


def run(arguments: Arguments) -> list[Score]:
    """Load, score, print."""
    silence_libraries()
    common, package = arguments.common, arguments.package
    __import__(package)  # before anything takes long
    directory = pretrained.find_directory(arguments.model, common.revision)
    check_json(common.json)
    check_outputs({"--json": common.json}, directory, arguments.include)
    record: dict[str, Any] = {"model": arguments.model, package: None}
    with suppress(PackageNotFoundError):
        record[package] = version(package)
    score = _mteb if arguments.mteb else _lm_eval
    for name in ("lm_eval", "mteb"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()) if common.quiet else nullcontext():  # their bars
        scores = score(arguments, directory, record)
    record["scores"] = [asdict(score) for score in scores]
    if common.json is not None:
        with atomic_file(common.json) as file:
            file.write_text(to_json(record), encoding="utf-8")
    rows = [
        [each.task, each.metric, f"{each.value:.4f}", "" if each.error is None else f"{each.error:.4f}"]
        for each in scores
    ]
    common.say(*table(["task", "metric", "score", "± (standard error)"], rows))
    return scores


def _mteb(arguments: Arguments, directory: Path, record: dict[str, Any]) -> list[Score]:
    from sentence_transformers import SentenceTransformer

    if not (directory / MODULES).is_file():
        raise CheckpointError(
            f"{directory} has no {MODULES}, so how it pools is not known; save it by sentence-transformers"
        )
    model = SentenceTransformer(
        str(directory), device=device_of(arguments.device), trust_remote_code=False, local_files_only=True
    )
    return mteb_scores(model, arguments.mteb, batch_size=arguments.batch_size, progress=not arguments.common.quiet)


def _lm_eval(arguments: Arguments, directory: Path, record: dict[str, Any]) -> list[Score]:
    source = load_source(arguments.model, edited=True, revision=arguments.common.revision)
    put_on(source.model, arguments.device)
    record |= {"shots": arguments.shots, "limit": arguments.limit}
    return lm_eval_scores(
        source.model, source.tokenizer, arguments.lm_eval, batch_size=arguments.batch_size, shots=arguments.shots,
        limit=arguments.limit, include=arguments.include,
    )  # fmt: skip


if __name__ == "__main__":
    main()
