"""Convert the attention of a pretrained model into collaborative form."""

from collections.abc import Sequence
from contextlib import closing
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import FAMILIES, DenseSite, find_dense_attention
from collab_compress.attention import install_, uninstall_
from collab_compress.attention.edit import CollaborativeEdit
from collab_compress.attention.per_head import PerHeadEdit
from collab_compress.calibration import Calibration, calibration_batches
from collab_compress.checkpoint import edits_of, is_quantized, path_in_base, record_edit_
from collab_compress.conversion.drift import compare, outputs, split_held_back
from collab_compress.conversion.options import Compression
from collab_compress.conversion.plan import REPORT_LENGTH, Planned, Progress, plan, shared_spec
from collab_compress.conversion.report import Report
from collab_compress.conversion.spread import plan_together
from collab_compress.errors import CompressionError


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
        spread: whether the processes that `accelerate launch` started share the modules between them. All of them
            must call this with the same arguments; each gets the whole conversion.

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

    def work(chosen: Sequence[DenseSite]) -> list[Planned]:
        return plan(model, chosen, compression, used, progress)

    planned = plan_together(sites, work) if spread else work(sites)
    before = list(outputs(model, held_back))
    parameters_before = model.num_parameters()
    try:
        for item in planned:
            install_(item.site.module, item.spec, item.parts)
        with closing(outputs(model, held_back)) as after:
            drift = compare(before, after, held_back)
    except BaseException:
        for item in planned:
            uninstall_(item.site.module, item.site.query, item.site.key)
        raise
    edit = PerHeadEdit if compression.form == "per-head" else CollaborativeEdit
    record_edit_(model, edit({paths[item.site.name]: item.spec for item in planned}))
    return Report(
        tuple(item.report for item in planned), parameters_before, model.num_parameters(), REPORT_LENGTH, drift,
        perf_counter() - started,
    )  # fmt: skip


def _validated(model: PreTrainedModel, compression: Compression) -> list[DenseSite]:
    """Find the modules to convert and check that every one can be."""
    if any(isinstance(edit, CollaborativeEdit) for edit in edits_of(model)):
        raise CompressionError(
            f"{type(model).__name__} is already converted; expand it first, or start from the dense checkpoint"
        )
    if is_quantized(model):
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
        _ = shared_spec(site, compression.rank, site.query.bias is not None).multiple  # is there room for it?
        for path, projection in ((site.family.query, site.query), (site.family.key, site.key)):
            for name, parameter in projection.named_parameters():
                if parameter.is_meta:
                    raise CompressionError(f"{site.name}.{path}.{name} is offloaded; load the model into memory")
                if not bool(torch.isfinite(parameter).all()):
                    raise CompressionError(
                        f"{site.name}.{path}.{name} holds NaN or infinite values; the checkpoint is damaged"
                    )
    return sites


def _check_device(device: str | None) -> None:
    """Refuse a device that does not exist, or cannot compute in float64."""
    if device is not None:
        try:
            torch.zeros(1, device=device, dtype=torch.float64).item()
        except (RuntimeError, AssertionError, TypeError) as error:
            raise CompressionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
