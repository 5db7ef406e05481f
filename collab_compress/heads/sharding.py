"""Parameters that processes hold in parts: whole ones, writing them back, and refusing parts that cannot be whole."""

from typing import Any

from torch import Tensor, distributed, nn

from collab_compress.errors import CollabCompressError, HeadError


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded over processes, as by FSDP2 (`fully_shard`) or tensor parallelism."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Any) -> Tensor:
    """Return a tensor with all its elements, differentiable. For a sharded tensor every process must call it."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def write_(tensor: Any, full: Tensor) -> None:
    """Write all elements of a tensor, in place, each process its part.

    Args:
        tensor: sharded or not.
        full: the elements, the same in every process.
    """
    if full is tensor:
        return
    if is_sharded(tensor):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = tensor.device_mesh
        copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        tensor.copy_(copies.redistribute(placements=tensor.placements))
    else:
        tensor.copy_(full)


def reshard_(model: nn.Module) -> None:
    """Reshard the parameters of FSDP2 modules that a forward pass left gathered, in place.

    What is written into a copy is lost, and an optimizer does not know it.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def refuse_pieces(where: str, parameter: Any) -> None:
    """Refuse a parameter that is a piece of a flat buffer, or away between passes.

    Args:
        where: what holds it, for the message.
        parameter: the parameter, or what a module has in its place.

    Raises:
        HeadError: FSDP1 or ZeRO-3 holds it.
    """
    flat = getattr(parameter, "_fsdp_flattened", False)  # with use_orig_params
    view = getattr(getattr(parameter, "_base", None), "_fsdp_flattened", False)  # without
    holder = "FSDP1" if flat or view else "DeepSpeed ZeRO-3" if hasattr(parameter, "ds_id") else None
    if holder is not None:
        raise HeadError(
            f"{where}: {holder} keeps its weights in pieces that do not follow heads; shard the model with FSDP2 "
            "instead (fully_shard, or fsdp_version=2 in Accelerate)"
        )


def refuse_sharded(model: nn.Module, what: str, kind: type[CollabCompressError] = HeadError) -> None:
    """Refuse a change of modules after a model was sharded.

    Args:
        model: a Transformers model.
        what: the call, for the message.
        kind: of the error.

    Raises:
        CollabCompressError: of that kind; FSDP, tensor parallelism or ZeRO-3 holds it.
    """
    reshard_(model)
    for name, parameter in model.named_parameters():
        flat = getattr(parameter, "_fsdp_flattened", False) or name.rpartition(".")[2] == "_flat_param"
        if is_sharded(parameter) or flat or hasattr(parameter, "ds_id"):
            raise kind(
                f"{what}: {name} of {type(model).__name__} is sharded, and what is put beside it would not be; call "
                "it before the model is sharded, or on the whole model that a checkpoint loads"
            )
