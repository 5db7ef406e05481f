"""Convert the attention of a pretrained model into collaborative form."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import FAMILIES, DenseSite, find_dense_attention
from collab_compress.attention import (
    CollaborativeParts,
    CollaborativeSpec,
    build_parts,
    install_,
    load_parts_,
    uninstall_,
)
from collab_compress.attention.edit import CollaborativeEdit
from collab_compress.attention.per_head import PerHeadEdit, PerHeadSpec, build_per_head_parts
from collab_compress.calibration import Calibration, calibration_batches, gather_moments
from collab_compress.checkpoint import edits_of, path_in_base, record_edit_
from collab_compress.conversion.drift import compare, outputs, split_held_back
from collab_compress.conversion.options import Compression
from collab_compress.conversion.report import ModuleReport, Report, module_report
from collab_compress.errors import CompressionError
from collab_compress.factorization import Moments, factorize

Progress = Callable[[str, int, int], None]
REPORT_LENGTH = 128


@dataclass(frozen=True)
class _Planned:
    """A module whose replacement is ready."""

    site: DenseSite
    spec: CollaborativeSpec
    parts: CollaborativeParts
    report: ModuleReport
    path: str


def compress(
    model: PreTrainedModel,
    compression: Compression,
    calibration: Calibration = "synthetic",
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> Report:
    """Convert the attention modules of `model` into collaborative form, in place and all or nothing.

    Every module is decomposed before any is replaced, so an error or an interrupt leaves the model as it was.
    The query and key projections of each module give way to shared ones of width R, a mixing matrix and, where
    queries have a bias, content biases ("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7–13).
    In the per-head form each head keeps projections of its own, as wide as pays, and there is no mixing matrix.
    Values, output projection and the scale of the scores stay the model's own.

    Args:
        model: a dense Transformers model; its dtype and device are kept.
        compression: rank, solver and the rest.
        calibration: data that says which input directions matter: "synthetic" (random tokens), None, a file of
            texts, texts or text pairs, or batches. An eighth of it is held back to measure drift.
        tokenizer: of the model; needed unless `calibration` is None or batches.
        progress: called with a module's name, how many are done, and how many there are.

    Returns:
        Errors, costs and drift.

    Raises:
        UnsupportedModelError: the model, or a module of it, cannot be converted.
        CompressionError: rank beyond H·d, weights that are not finite, an already converted or quantized model.
        CalibrationError: calibration data is missing or unusable.
    """
    started = perf_counter()
    sites = _validated(model, compression)
    paths = {site.name: path_in_base(model, site.module) for site in sites}
    batches = calibration_batches(calibration, model, tokenizer, seed=compression.seed)
    used, held_back = split_held_back(batches)
    exact = all(compression.rank == site.width for site in sites)
    moments = {} if exact else gather_moments(model, sites, used) if used else {}
    planned = []
    for done, site in enumerate(sites):
        if progress is not None:
            progress(site.name, done, len(sites))
        planned.append(_plan(site, compression, moments.get(site.name), paths[site.name]))
    if progress is not None:
        progress("", len(sites), len(sites))
    before = outputs(model, held_back)
    parameters_before = model.num_parameters()
    try:
        for plan in planned:
            install_(plan.site.module, plan.spec, plan.parts)
        drift = compare(before, outputs(model, held_back), held_back)
    except BaseException:
        for plan in planned:
            uninstall_(plan.site.module, plan.site.query, plan.site.key)
        raise
    edit = PerHeadEdit if compression.form == "per-head" else CollaborativeEdit
    record_edit_(model, edit({plan.path: plan.spec for plan in planned}))
    return Report(
        tuple(plan.report for plan in planned), parameters_before, model.num_parameters(), REPORT_LENGTH, drift,
        perf_counter() - started,
    )  # fmt: skip


def _validated(model: PreTrainedModel, compression: Compression) -> list[DenseSite]:
    """Find the modules to convert and check that every one can be."""
    if any(isinstance(edit, CollaborativeEdit) for edit in edits_of(model)):
        raise CompressionError(
            f"{type(model).__name__} is already converted; expand it first, or start from the dense checkpoint"
        )
    if getattr(model.config, "quantization_config", None) is not None and not edits_of(model):
        raise CompressionError(f"{type(model).__name__} is quantized; convert the unquantized checkpoint instead")
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise CompressionError(
            f"collaborative attention runs as 'eager' or 'sdpa', the model is set to {implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )
    _check_device(compression.device)
    sites = find_dense_attention(model, FAMILIES, compression.modules, compression.kinds)
    for site in sites:
        if compression.rank > site.width:
            raise CompressionError(
                f"{site.name}: dk is {compression.rank}, but {site.heads} heads × {site.head_width} = {site.width} "
                f"is exact already; pass dk between 1 and {site.width}"
            )
        for path, projection in ((site.family.query, site.query), (site.family.key, site.key)):
            for name, parameter in projection.named_parameters():
                if parameter.is_meta:
                    raise CompressionError(f"{site.name}.{path}.{name} is offloaded; load the model into memory")
                if not bool(torch.isfinite(parameter).all()):
                    raise CompressionError(
                        f"{site.name}.{path}.{name} holds NaN or infinite values; the checkpoint is damaged"
                    )
    return sites


def _plan(site: DenseSite, compression: Compression, moments: tuple[Moments, Moments] | None, path: str) -> _Planned:
    """Decompose one module and build what will replace its projections."""
    query_moments, key_moments = moments or (None, None)
    started = perf_counter()
    try:
        result = factorize(
            site.query_heads(), site.key_heads(), compression.rank, query_bias=site.query_bias(),
            query_moments=query_moments, key_moments=key_moments, form=compression.form, solver=compression.solver,
            seed=compression.seed, sweeps=compression.sweeps, tolerance=compression.tolerance,
            damping=compression.damping, centre=compression.centre, device=compression.device,
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        raise CompressionError(f"{site.name}: {error}") from error
    spec = CollaborativeSpec(
        query=site.family.query, key=site.family.key, heads=site.heads, head_width=site.head_width,
        rank=compression.rank, content_bias=result.factors.content_bias is not None,
        fixed_heads=site.family.fixed_heads,
    )  # fmt: skip
    if result.sizes is None:
        parts = build_parts(site.module, spec)
    else:
        spec = PerHeadSpec(**{**vars(spec), "train_mixing": False}, sizes=result.sizes)
        parts = build_per_head_parts(site.module, spec)
    found = result.factors
    load_parts_(parts, found.query, found.mixing, found.key, found.content_bias)
    report = module_report(site, spec, result, REPORT_LENGTH, perf_counter() - started)
    return _Planned(site, spec, parts, report, path)


def _check_device(device: str | None) -> None:
    """Refuse a device that does not exist, or cannot compute in float64."""
    if device is not None:
        try:
            torch.zeros(1, device=device, dtype=torch.float64).item()
        except (RuntimeError, AssertionError, TypeError) as error:
            raise CompressionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
