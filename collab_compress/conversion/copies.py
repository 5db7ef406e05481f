"""Copies of a model that share its tensors, on which a conversion runs, and which nothing else uses."""

import copy
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_compress.errors import UnsupportedModelError, one_line


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its tensors. A compiled forward pass is not compiled in the copy."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute raises
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied, and conversions run on a copy ({one_line(error)}); remove "
            "the hook or attribute that cannot be copied, and set it again afterwards"
        ) from error
    for name, module in copied.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FunctionType):  # its variables are the model's own modules, not those of the copy
            compiled = getattr(forward, "_torchdynamo_orig_callable", None)
            if getattr(compiled, "__func__", None) is not type(module).forward:
                raise UnsupportedModelError(
                    f"the forward pass of {name or type(module).__name__} was replaced by a function "
                    f"({forward.__qualname__}), which cannot be copied with the model to try a conversion; change "
                    "the class, or remove the function (del module.forward) and set it again afterwards"
                )
            del module.forward
    return copied
