"""Say what of a model is converted."""

from typing import Any

from transformers import PreTrainedModel

from collab_compress.architectures import transformers_model
from collab_compress.attention import NarrowValues, ScoreForm


def describe(model: PreTrainedModel) -> dict[str, str]:
    """Return path of each converted attention module → its forms and widths; empty for a stock model.

    Feed-forward blocks that are narrower are not among them: their width is in the model's config, as in any model.

    Args:
        model: a Transformers model, or what holds one, as for `compress`.

    Raises:
        UnsupportedModelError: it is no Transformers model.
    """
    found = {}
    for name, module in transformers_model(model).named_modules():
        scores: Any = getattr(module, ScoreForm.at, None)
        values: Any = getattr(module, NarrowValues.at, None)
        words = [] if scores is None else [f"{scores.title}, dk={scores.rank}"]
        words += [] if values is None else [f"{values.title}, dv={values.dv}"]
        if words:
            found[name] = "; ".join(words)
    return found


def is_converted(model: PreTrainedModel) -> bool:
    """Return whether any attention module of a model is converted; raises as `describe`."""
    return bool(describe(model))
