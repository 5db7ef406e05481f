"""The Transformers model in what a user passes."""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.errors import UnsupportedModelError


def transformers_model(model: Any) -> PreTrainedModel:
    """Give the Transformers model itself.

    Args:
        model: a Transformers model; a SentenceTransformer, whose first module holds one; or something that passes
            on the attributes of one, as a PEFT model does.

    Raises:
        UnsupportedModelError: it is none of these.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, nn.Sequential) and len(model):
        inner = getattr(next(iter(model)), "auto_model", None)
        if isinstance(inner, nn.Module):
            return transformers_model(inner)
    if isinstance(model, nn.Module) and isinstance(getattr(model, "config", None), PretrainedConfig):
        return model
    inside = next((name for name in ("module", "_orig_mod") if hasattr(getattr(model, name, None), "config")), None)
    hint = (
        f"pass the model inside, model.{inside}"
        if inside
        else "pass a transformers.PreTrainedModel, or a SentenceTransformer that holds one"
    )
    raise UnsupportedModelError(f"{type(model).__name__} is no Transformers model; {hint}")
