"""Name modules so that checkpoints with and without a head mean the same."""

from torch import nn
from transformers import PreTrainedModel

from collab_compress.errors import UnsupportedModelError


def path_in_base(model: PreTrainedModel, module: nn.Module) -> str:
    """Path of `module` inside the base model, which is the same with and without a head.

    Raises:
        UnsupportedModelError: it lies outside.
    """
    for name, candidate in model.base_model.named_modules():
        if candidate is module:
            return str(name)
    outside = next(name for name, candidate in model.named_modules() if candidate is module)
    prefix = model.base_model_prefix
    raise UnsupportedModelError(
        f"{outside} lies outside the base model {prefix!r}, where a checkpoint could not find it again; "
        f"leave it out (modules='{prefix}.*'), or pass model.{prefix} alone"
    )
