"""All measures of single heads in one table."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.dominance import dominant_heads
from collab_compress.analysis.patterns import head_patterns, induction
from collab_compress.analysis.stream import Batches
from collab_compress.architectures import find_attention, transformers_model
from collab_compress.calibration import as_batch
from collab_compress.conversion.report import to_frame
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads.importance import confidence, head_importance


def head_table(model: PreTrainedModel, batches: Batches) -> Any:
    """Return what each head of a model is worth and attends to, a row a head.

    Args:
        model: stock or edited.
        batches: keyword arguments for the model, kept in memory. Padding does not count.

    Returns:
        `pandas.DataFrame` with the columns module, kind, layer, head; `importance` (`head_importance`) of the model's
        loss if batches have labels, else of the outputs (`change_of_outputs`); `confidence`; `entropy`
        (`head_patterns`); `induction`, NaN for models that cannot be measured so; and `drift_without`, the drift of
        the outputs when the head is silenced (`dominant_heads`). Uses of a module that serves several layers (ALBERT)
        are averaged.

    Raises:
        HeadError: no batches, or a measure is not finite.
        CalibrationError: the model does not take the batches.
        UnsupportedModelError: the model's family is not known.

    Example:
        >>> table = head_table(model, [batch])
        >>> len(table), list(table.columns)
        (6, ['module', 'kind', 'layer', 'head', 'importance', 'confidence', 'entropy', 'induction', 'drift_without'])
    """
    model, listed = transformers_model(model), list(map(as_batch, batches))
    labelled = bool(listed) and all("labels" in batch for batch in listed)
    columns: dict[str, Mapping[str, Tensor]] = {
        "importance": head_importance(model, listed, None if labelled else change_of_outputs),
        "confidence": confidence(model, listed),
        "entropy": head_patterns(model, listed)["entropy"],
        "induction": {},
        "drift_without": dominant_heads(model, batches=listed).changes,
    }
    with suppress(HeadError, CalibrationError):  # the model reads no tokens, or not as many
        columns["induction"] = induction(model)
    rows = []
    for site in find_attention(model):
        for head in range(site.heads):
            row: dict[str, Any] = {"module": site.name, "kind": site.kind, "layer": site.layer, "head": head}
            for column, by_name in columns.items():
                uses = [float(values[head]) for name, values in by_name.items() if name.split("[")[0] == site.name]
                row[column] = sum(uses) / len(uses) if uses else float("nan")
            rows.append(row)
    return to_frame(rows)


def change_of_outputs(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return a loss (B,) for `head_importance` whose gradient grows with the change of the model's first output.

    It is the product with random signs, so the mean square of its gradient in ξ is ‖∂outputs/∂ξ‖², without padding.
    """
    states = outputs[0]
    signs = (torch.randint(2, states.shape, generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1).to(
        states
    )
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if mask is not None and mask.shape == states.shape[:2]:
        signs = signs * mask.to(states)[..., None]
    loss: Tensor = (states * signs).flatten(1).sum(1)
    return loss
