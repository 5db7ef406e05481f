"""Gather and write sharded parameters; refuse models whose parameters cannot be changed or saved."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from collab_compress.errors import CollabCompressError, HeadError, UnsupportedModelError


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, differentiable. For a sharded tensor every process must call it."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def write_(tensor: Tensor, full: Tensor) -> None:
    """Write the full tensor, the same in every process, into a tensor that may be sharded."""
    if full is tensor:
        return
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        full = copies.redistribute(placements=tensor.placements)
    tensor.copy_(full)


def reshard_(model: nn.Module) -> None:
    """Reshard what a forward pass under FSDP2 left gathered: writes there would be lost to the optimizer."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _holder(parameter: Tensor) -> str | None:
    """Return what keeps a parameter in a flat buffer, or away between passes: FSDP1, DeepSpeed ZeRO-3 or nothing."""
    flat = getattr(parameter, "_fsdp_flattened", False)  # with use_orig_params
    view = getattr(getattr(parameter, "_base", None), "_fsdp_flattened", False)  # without
    return "FSDP1" if flat or view else "DeepSpeed ZeRO-3" if hasattr(parameter, "ds_id") else None


def refuse_split(where: str, parameter: Tensor) -> None:
    """Raise a HeadError if FSDP1 or ZeRO-3 holds a parameter of the module named `where`."""
    if holder := _holder(parameter):
        raise HeadError(
            f"{where}: {holder} splits weights across head boundaries; shard the model with FSDP2 "
            "instead (fully_shard, or fsdp_version=2 in Accelerate)"
        )


def refuse_computed(name: str, layer: nn.Module) -> None:
    """Raise UnsupportedModelError if the weight of the layer at path `name` is no parameter of it."""
    if "weight" not in layer._parameters:
        raise UnsupportedModelError(
            f"the weight of {name} is computed from others; make it plain first, by torch.nn.utils.prune.remove, "
            "remove_weight_norm or parametrize.remove_parametrizations"
        )


def refuse_unwritable(model: nn.Module, what: str, kind: type[CollabCompressError] = HeadError) -> None:
    """Raise `kind` in the call named `what` if a model cannot be changed or saved: sharded, or of inference mode."""
    reshard_(model)
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise kind(
                f"{what}: {name} of {type(model).__name__} was made inside torch.inference_mode(), so it cannot be "
                "changed; make or load the model outside of it"
            )
        if isinstance(parameter, DTensor) or _holder(parameter) or name.endswith("_flat_param"):
            raise kind(
                f"{what}: {name} of {type(model).__name__} is sharded, and new parameters would not be; call it "
                "before the model is sharded, or on the full model that a checkpoint loads"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            refuse_computed(name, module)
