"""`collab-evaluate`: score a model on MTEB or on the LM evaluation harness."""

import io
import logging
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from collab_compress.checkpoint import pretrained
from collab_compress.checkpoint.directory import MODULES, atomic_file, to_json
from collab_compress.errors import CheckpointError
from collab_compress.external_evaluation import Score, lm_eval_scores, mteb_scores

from .arguments import EvaluateArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line, table
from .model import check_json, device_of, load_source, put_on
from .outputs import check_outputs


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
