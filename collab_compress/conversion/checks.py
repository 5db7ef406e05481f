"""What is checked before any work is done: that every module asked for can be converted, and where."""

import logging
import os
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, DenseSite, find_attention, find_dense_attention
from collab_compress.attention import is_collaborative
from collab_compress.checkpoint import is_quantized
from collab_compress.conversion.options import Compression
from collab_compress.conversion.plan import gets_content_bias, shared_spec
from collab_compress.errors import CompressionError
from collab_compress.factorization import has_float64

_logger = logging.getLogger(__name__)


def modules_to_convert(model: PreTrainedModel, compression: Compression, calibrated: bool) -> list[DenseSite]:
    """Find the modules to convert and check that every one can be.

    Args:
        model: stock or edited.
        compression: which modules, and how.
        calibrated: whether there is calibration data.

    Raises:
        UnsupportedModelError: a module cannot be converted.
        CompressionError: as `compress`.
    """
    if is_quantized(model):
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


def working_device(device: str | None, sites: Sequence[DenseSite]) -> str | None:
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
