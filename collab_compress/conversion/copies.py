"""Copies of a model that share its tensors, on which a conversion runs, and which nothing else uses."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from collab_compress.checkpoint import models_in
from collab_compress.errors import CompressionError, UnsupportedModelError

_converting: WeakSet[PreTrainedModel] = WeakSet()
_lock = threading.Lock()  # of `_converting`


@contextmanager
def conversion_of(model: PreTrainedModel) -> Iterator[None]:
    """Hold a model, and the models inside it, for one conversion.

    Raises:
        CompressionError: another thread is converting it.
    """
    parts = models_in(model)
    with _lock:
        if any(part in _converting for part in parts):
            raise CompressionError(
                f"{type(model).__name__} is being converted by another thread; wait until that has returned"
            )
        _converting.update(parts)
    try:
        yield
    finally:
        with _lock:
            _converting.difference_update(parts)


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its tensors, and hooks and attributes that cannot be copied.

    A compiled forward pass is not compiled in the copy.

    Raises:
        UnsupportedModelError: the forward pass of a module was replaced by a function.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    try:
        copied = copy.deepcopy(model, memo.copy())
    except Exception:  # whatever an attribute raises
        for module in model.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            for value in (*hooks, *vars(module).values()):
                if not _can_be_copied(value, memo):
                    memo[id(value)] = value
        copied = copy.deepcopy(model, memo)
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


def _can_be_copied(value: object, memo: dict[int, Any]) -> bool:
    if isinstance(value, dict):  # as the modules inside, which have attributes of their own
        return True
    try:
        copy.deepcopy(value, memo.copy())
    except Exception:
        return False
    return True
