"""`collab-evaluate`: score a model on MTEB or on the LM evaluation harness."""

import importlib
import io
import logging
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from collab_compress_cli import pretrained
from collab_compress_cli.command import table
from collab_compress_cli.model import check_outputs, device_of, load_source

from collab_compress.checkpoint.files import to_json, write_new
from collab_compress.errors import CheckpointError

from ..external_evaluation import Score, lm_eval_scores, mteb_scores
from .arguments import EvaluateArguments as Arguments


def run(arguments: Arguments) -> list[Score]:
    """Load, score and print."""
    common, package = arguments.common, "mteb" if arguments.mteb else "lm_eval"
    importlib.import_module(package)  # before anything takes long
    directory = pretrained.find_directory(arguments.model, common.revision)
    check_outputs({"--json": common.json}, directory, arguments.include)
    record: dict[str, Any] = {"model": arguments.model, package: None}
    with suppress(PackageNotFoundError):
        record[package] = version(package)
    if arguments.lm_eval:
        record |= {"shots": arguments.shots, "limit": arguments.limit}
    logging.getLogger(package).setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()) if common.quiet else nullcontext():  # progress bars of the package
        scores = _mteb(arguments, directory) if arguments.mteb else _lm_eval(arguments, directory)
    record["scores"] = [asdict(score) for score in scores]
    if common.json is not None:
        write_new(common.json, to_json(record))
    rows = []
    for score in scores:
        error = "" if score.error is None else f"{score.error:.4f}"
        rows.append([score.task, score.metric, f"{score.value:.4f}", error])
    common.say(*table(["task", "metric", "score", "± (standard error)"], rows))
    return scores


def _mteb(arguments: Arguments, directory: Path) -> list[Score]:
    from sentence_transformers import SentenceTransformer

    kind = pretrained.sentence_class(directory)
    if kind is None:
        raise CheckpointError(
            f"{directory} has no {pretrained.MODULES}, so its pooling is unknown; save it by sentence-transformers"
        )
    if kind != "SentenceTransformer":  # which would load it all the same, with a pooling that it does not have
        raise CheckpointError(
            f"{directory} is a {kind}; --mteb scores SentenceTransformers, so score it by mteb itself"
        )
    device = device_of(arguments.device)
    model = SentenceTransformer(str(directory), device=device, trust_remote_code=False, local_files_only=True)
    return mteb_scores(model, arguments.mteb, batch_size=arguments.batch_size, progress=not arguments.common.quiet)


def _lm_eval(arguments: Arguments, directory: Path) -> list[Score]:
    source = load_source(arguments.model, directory, arguments.device, edited=True)
    return lm_eval_scores(
        source.model,
        source.tokenizer,
        arguments.lm_eval,
        batch_size=arguments.batch_size,
        shots=arguments.shots,
        limit=arguments.limit,
        include=arguments.include,
    )
