"""Which tokens of a batch are real: read from what a model's forward is called with."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from collab_compress.architectures.sites import Kind
from collab_compress.errors import HeadError


class RealTokens(NamedTuple):
    """Masks (True = real) of one attention kind; None where all tokens are.

    Args:
        query: (B, T).
        key: (B, S).
    """

    query: Tensor | None
    key: Tensor | None


def forward_arguments(model: nn.Module) -> list[str]:
    """Names of the arguments of `model.forward`, in order."""
    return list(inspect.signature(model.forward).parameters)


def real_tokens(
    model: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Kind, RealTokens]:
    """Say for each kind of attention which queries and keys are real in one call of `model`.

    Without a mask every token counts as real. A decoder of an encoder–decoder that has none takes
    `decoder_input_ids`, where the pad token marks padding (but for the first, which starts it), or else `labels`, of
    which the decoder reads those before: -100 marks padding.

    Args:
        model: a Transformers model.
        names: `forward_arguments(model)`.
        args: positional arguments of the call.
        kwargs: named arguments of the call.

    Raises:
        HeadError: a mask is not (B, T), so padding cannot be told from it.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def mask(name: str) -> Tensor | None:
        found = given.get(name)
        if found is not None and (not isinstance(found, Tensor) or found.dim() != 2):
            got = f"has shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"is a {type(found).__name__}"
            raise HeadError(f"{name} {got}; padding can be told only from a mask (batch, tokens)")
        return None if found is None else found != 0

    own = mask("attention_mask")
    if not model.config.is_encoder_decoder:
        return {
            "encoder": RealTokens(own, own),
            "decoder": RealTokens(own, own),
            "cross": RealTokens(own, mask("encoder_attention_mask")),
        }
    target = mask("decoder_attention_mask")
    target = _from_targets(model, given) if target is None else target
    return {
        "encoder": RealTokens(own, own),
        "decoder": RealTokens(target, target),
        "cross": RealTokens(target, own),
    }


def _from_targets(model: Any, given: Mapping[str, Any]) -> Tensor | None:
    labels, ids = given.get("labels"), given.get("decoder_input_ids")
    if ids is not None and model.config.pad_token_id is not None:
        real: Tensor = ids != model.config.pad_token_id
    elif ids is None and labels is not None and labels.dim() == 2:
        real = (labels != -100).roll(1, dims=1)
    else:
        return None
    real[:, 0] = True
    return real
