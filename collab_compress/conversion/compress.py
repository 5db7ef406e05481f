"""Convert the attention of a pretrained model into collaborative form."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import DenseSite, transformers_model
from collab_compress.attention import install_, uninstall_
from collab_compress.attention.edit import CollaborativeEdit
from collab_compress.attention.per_head import PerHeadEdit
from collab_compress.calibration import Calibration
from collab_compress.calibration.batches import noted_batches
from collab_compress.checkpoint import path_in_base, record_edit_
from collab_compress.conversion.checks import modules_to_convert, working_device
from collab_compress.conversion.drift import measure, rows_of, split_held_back
from collab_compress.conversion.options import Compression
from collab_compress.conversion.plan import (
    REPORT_LENGTH,
    Planned,
    Progress,
    breakdowns,
    few_vectors,
    plan,
)
from collab_compress.conversion.report import Report
from collab_compress.conversion.spread import plan_together
from collab_compress.processes import processes

_logger = logging.getLogger(__name__)


def compress(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    *,
    spread: bool = False,
) -> Report:
    """Convert the attention modules of `model` into collaborative form, in place and all or nothing.

    Every module is decomposed before any is replaced, so an error or an interrupt leaves the model as it was. Modules
    that are still dense can be converted by a further call, so that ranks differ by layer and kind.
    The query and key projections of each module give way to shared ones of width R, a mixing matrix and, where
    queries have a bias, content biases ("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7–13).
    In the per-head form each head keeps projections of its own, as wide as pays, and there is no mixing matrix.
    Values, output projection and the scale of the scores stay the model's own.

    Args:
        model: a Transformers model, or a SentenceTransformer, of which its Transformers model is converted; dtype and
            device are kept.
        compression: rank, solver and the rest.
        calibration: data that says which input directions matter: "synthetic" (random tokens), None, a file of
            texts, texts or text pairs, or batches. An eighth of it is held back to measure drift. How much of it is
            used is said by `sequences` and `length` of the compression.
        tokenizer: of the model; needed unless `calibration` is None or batches, or the model a SentenceTransformer.
        progress: called with a module's name, how many are done, and how many there are.
        spread: whether the processes that `accelerate launch` started share the modules between them. All of them
            must call this with the same arguments; each gets the whole conversion.

    Returns:
        Errors, costs and drift.

    Raises:
        UnsupportedModelError: the model, or a module of it, cannot be converted.
        CompressionError: rank beyond H·d, weights that are not finite, a module that is already converted, a
            quantized model.
        CalibrationError: calibration data is missing or unusable.
    """
    started = perf_counter()
    given, model = model, transformers_model(model)
    tokenizer = getattr(given, "tokenizer", None) if tokenizer is None and given is not model else tokenizer
    sites = modules_to_convert(model, compression, calibration is not None and calibration != "none")
    compression = replace(compression, device=working_device(compression.device, sites))
    paths = {site.name: path_in_base(model, site.module) for site in sites}
    batches, notes = noted_batches(
        calibration, model, tokenizer, sequences=compression.sequences, length=compression.length,
        seed=compression.seed,
    )  # fmt: skip
    used, held_back = split_held_back(batches)

    def work(chosen: Sequence[DenseSite]) -> list[Planned]:
        return plan(model, chosen, compression, used, progress)

    planned = plan_together(sites, work) if spread else work(sites)
    parameters_before = model.num_parameters()
    drift = measure(model, held_back, partial(_converted, planned))
    _install(planned)
    edit = PerHeadEdit if compression.form == "per-head" else CollaborativeEdit
    record_edit_(model, edit({paths[item.site.name]: item.spec for item in planned}))
    warnings = (*notes, *few_vectors(planned), *breakdowns(planned))
    if not spread or processes().is_main_process:
        for warning in warnings:
            _logger.warning(warning)
    return Report(
        tuple(item.report for item in planned), parameters_before, model.num_parameters(), REPORT_LENGTH, drift,
        perf_counter() - started, sum(map(rows_of, used)), warnings,
    )  # fmt: skip


def _install(planned: Sequence[Planned]) -> None:
    """Put the replacements into the model; into none of its modules where one fails."""
    try:
        for item in planned:
            install_(item.site.module, item.spec, item.parts)
    except BaseException:
        _uninstall(planned)
        raise


def _uninstall(planned: Sequence[Planned]) -> None:
    for item in planned:
        uninstall_(item.site.module, item.site.query, item.site.key)


@contextmanager
def _converted(planned: Sequence[Planned]) -> Iterator[None]:
    """Make the model the converted one for a while."""
    _install(planned)
    try:
        yield
    finally:
        _uninstall(planned)
