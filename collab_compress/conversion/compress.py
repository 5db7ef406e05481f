"""Convert the attention of a pretrained model into collaborative form."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import (
    FAMILIES,
    DenseSite,
    find_attention,
    find_dense_attention,
    transformers_model,
)
from collab_compress.attention import install_, is_collaborative, uninstall_
from collab_compress.attention.edit import CollaborativeEdit
from collab_compress.attention.per_head import PerHeadEdit
from collab_compress.calibration import Calibration
from collab_compress.calibration.batches import Batch, noted_batches
from collab_compress.checkpoint import edits_of, path_in_base, record_edit_
from collab_compress.conversion.drift import measure, split_held_back
from collab_compress.conversion.options import Compression
from collab_compress.conversion.plan import (
    REPORT_LENGTH,
    Planned,
    Progress,
    gets_content_bias,
    plan,
    shared_spec,
)
from collab_compress.conversion.report import Report
from collab_compress.conversion.spread import plan_together
from collab_compress.errors import CompressionError
from collab_compress.factorization import has_float64
from collab_compress.processes import processes

_logger = logging.getLogger(__name__)
FEW = 4  # vectors for each dimension of the inputs: with fewer, a covariance is mostly chance


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
    sites = _validated(model, compression, calibration is not None and calibration != "none")
    compression = replace(compression, device=_device(compression.device, sites))
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
    warnings = (*notes, *_few_vectors(planned), *_breakdowns(planned))
    if not spread or processes().is_main_process:
        for warning in warnings:
            _logger.warning(warning)
    return Report(
        tuple(item.report for item in planned), parameters_before, model.num_parameters(), REPORT_LENGTH, drift,
        perf_counter() - started, _sequences(used), warnings,
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


def _sequences(batches: Sequence[Batch]) -> int:
    """Count the sequences, or images, of some batches."""
    return sum(next((len(value) for value in batch.values() if isinstance(value, Tensor)), 0) for batch in batches)


def _few_vectors(planned: Sequence[Planned]) -> list[str]:
    """Say so where modules saw too few vectors for what is made of them."""
    few = [
        (vectors, width, item.site.name)
        for item in planned
        for vectors, width in (
            (item.report.query_vectors, item.site.query.in_features),
            (item.report.key_vectors, item.site.key.in_features),
        )
        if 0 < vectors < FEW * width
    ]
    if not few:
        return []
    vectors, width, name = min(few, key=lambda seen: seen[0] / seen[1])
    others = len({name for _, _, name in few}) - 1
    return [
        f"{name}{f' and {others} more modules' if others else ''} saw few calibration vectors: {vectors} of width "
        f"{width}, where {FEW} times the width would be {FEW * width}; pass more data, or more sequences of it"
    ]


def _breakdowns(planned: Sequence[Planned]) -> list[str]:
    """Say so where a solver met systems that it could not solve."""
    return [
        f"{item.site.name}: {item.report.breakdowns} sweeps of the solver met a singular system; "
        + ("it went on with a shifted one" if item.report.sweeps else "it kept its start")
        + "; look at the module's error, or raise the damping"
        for item in planned
        if item.report.breakdowns
    ]


def _validated(model: PreTrainedModel, compression: Compression, calibrated: bool) -> list[DenseSite]:
    """Find the modules to convert and check that every one can be."""
    if getattr(model.config, "quantization_config", None) is not None and not edits_of(model):
        raise CompressionError(f"{type(model).__name__} is quantized; convert the unquantized checkpoint instead")
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise CompressionError(
            f"collaborative attention runs as 'eager' or 'sdpa', the model is set to {implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )
    for chosen in find_attention(model, FAMILIES, compression.modules, compression.kinds):
        if is_collaborative(chosen.module):
            raise CompressionError(
                f"{chosen.name} is already converted; leave it out by modules or kinds, expand the model first, or "
                "start from the dense checkpoint"
            )
    sites = find_dense_attention(model, FAMILIES, compression.modules, compression.kinds)
    for site in sites:
        if compression.rank > site.width:
            raise CompressionError(
                f"{site.name}: dk is {compression.rank}, but {site.heads} heads × {site.head_width} = {site.width} "
                f"is exact already; pass dk between 1 and {site.width}"
            )
        _ = shared_spec(site, compression.rank, gets_content_bias(site, compression, calibrated)).multiple  # room?
        for path, projection in ((site.family.query, site.query), (site.family.key, site.key)):
            for name, parameter in projection.named_parameters():
                if parameter.is_meta:
                    raise CompressionError(f"{site.name}.{path}.{name} is offloaded; load the model into memory")
                if not bool(torch.isfinite(parameter).all()):
                    raise CompressionError(
                        f"{site.name}.{path}.{name} holds NaN or infinite values; the checkpoint is damaged"
                    )
    return sites


def _device(device: str | None, sites: Sequence[DenseSite]) -> str | None:
    """Say where to decompose: on a device that exists and computes in float64; None is where the weights are.

    Of the processes that a launcher started on one machine each has a GPU of its own, which "cuda" is.
    """
    if device is None:
        without = {str(site.query.weight.device) for site in sites if not has_float64(site.query.weight.device)}
        if without:
            _logger.info("%s has no float64, so modules are decomposed on the CPU", ", ".join(sorted(without)))
        return "cpu" if without else None
    place = os.environ.get("LOCAL_RANK", "")
    if device == "cuda" and place.isdecimal() and int(place) < torch.cuda.device_count():
        device = f"cuda:{place}"
    try:
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CompressionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
