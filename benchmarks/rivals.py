"""Rivals without training: simple, exact forms of three known ways to make attention smaller.

Each changes a dense model of the BERT family in place into a dense model that computes what the smaller one would,
with zeros where channels are gone; what the smaller one would have, `gains.py` counts. All get what a conversion
of ours gets: the moments of the same random tokens, damped alike, and means folded into biases.

* `per_head_`: every head by itself, all of equal width: the weighted singular value decomposition of its scores and
  of its values and outputs ("A3: an Analytical Low-Rank Approximation Framework for Attention", and CLOVER with
  data).
* `low_rank_`: each of the four projections by itself, as the product of two (SVD-LLM's whitening).
* `without_heads_`: the least important heads removed (Michel et al., "Are Sixteen Heads Really Better than One?").
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, find_dense_attention, find_dense_values
from collab_compress.architectures.sites import DenseSite, ValueSite
from collab_compress.calibration import Batch
from collab_compress.calibration.gather import gather_moments
from collab_compress.factorization import Moments
from collab_compress.heads import head_importance, least_important, prune_heads_


@dataclass(frozen=True)
class Layer:
    """An attention module, and the moments of what its projections read.

    Args:
        scores: its queries and keys.
        values: its values and its output projection.
        inputs: moments of what queries, keys and values read, D wide.
        outputs: moments of what the output projection reads, heads side by side.
    """

    scores: DenseSite
    values: ValueSite
    inputs: Moments
    outputs: Moments


def layers_of(model: PreTrainedModel, batches: Iterable[Batch]) -> list[Layer]:
    """Run the model on calibration batches and gather the moments of every attention module."""
    scores, values = find_dense_attention(model, FAMILIES), find_dense_values(model, FAMILIES)
    found = gather_moments(model, [*scores, *values], batches)
    count = len(scores)
    return [
        Layer(scores[i], values[i], found[i][0], found[count + i][0])  # queries and keys read the same
        for i in range(count)
    ]


def root_of(covariance: Tensor, damping: float) -> Tensor:
    """Upper triangular S with SᵀS = the damped covariance."""
    damped = covariance.double().clone()
    damped.diagonal().add_(damping * covariance.diagonal().mean())
    return torch.linalg.cholesky(damped, upper=True)


def even(total: int, heads: int) -> list[int]:
    """Share out channels evenly; heads differ by one where their number does not divide them."""
    return [total // heads + (head < total % heads) for head in range(heads)]


@torch.no_grad()
def per_head_(layer: Layer, dk: int | None, dv: int | None, damping: float = 1e-3) -> None:
    """Narrow queries and keys to dk and values to dv, each head by itself; None keeps a map dense.

    A head of fewer than all its query/key channels needs one more for its content bias, which the dense layout must
    have room for.
    """
    if dk is not None:
        _scores_(layer, even(dk, layer.scores.heads), damping)
    if dv is not None:
        _values_(layer, even(dv, layer.values.heads), damping)


def _scores_(layer: Layer, sizes: list[int], damping: float) -> None:
    site, width = layer.scores, layer.scores.head_width
    root, mean = root_of(layer.inputs.covariance(), damping), layer.inputs.mean.double()
    queries, keys, biases = (each.double() for each in (site.query_heads(), site.key_heads(), site.query_bias()))
    for head, size in enumerate(sizes):
        wq, wk, rows = queries[head], keys[head], slice(head * width, (head + 1) * width)
        if size == width:
            continue
        if size > width - 1:
            raise ValueError(f"{size} channels and a content bias do not fit into a head of {width}")
        left, values, right = torch.linalg.svd((root @ wq) @ (root @ wk).T, full_matrices=False)
        scale = values[:size].sqrt()
        fewer_q = torch.linalg.solve_triangular(root, left[:, :size] * scale, upper=True)
        fewer_k = torch.linalg.solve_triangular(root, right[:size].T * scale, upper=True)
        content = wk @ (wq.T @ mean + biases[head]) - fewer_k @ (fewer_q.T @ mean)  # (D,)
        query, key, bias = wq.new_zeros(width, len(wq)), wq.new_zeros(width, len(wq)), wq.new_zeros(width)
        query[:size], key[:size], key[size], bias[size] = fewer_q.T, fewer_k.T, content, 1.0
        site.query.weight[rows], site.key.weight[rows] = query.float(), key.float()
        site.query.bias[rows], site.key.bias[rows] = bias.float(), 0.0


def _values_(layer: Layer, sizes: list[int], damping: float) -> None:
    site, width = layer.values, layer.values.head_width
    covariance, mean = layer.outputs.covariance().double(), layer.outputs.mean.double()
    maps, values, biases = (each.double() for each in (site.output_heads(), site.value_heads(), site.value_bias()))
    diagonal = damping * covariance.diagonal().mean()
    for head, size in enumerate(sizes):
        if size == width:
            continue
        rows = slice(head * width, (head + 1) * width)
        root = torch.linalg.cholesky(covariance[rows, rows] + diagonal * torch.eye(width), upper=True)
        left, found, right = torch.linalg.svd(root @ maps[head], full_matrices=False)
        kept = torch.linalg.solve_triangular(root, left[:, :size], upper=True)  # (d, s)
        output = found[:size, None] * right[:size]  # (s, D)
        weight, bias = values.new_zeros(width, values.shape[1]), values.new_zeros(width)
        weight[:size], bias[:size] = (values[head] @ kept).T, biases[head] @ kept
        site.output.bias += (mean[rows] @ (maps[head] - kept @ output)).float()
        site.value.weight[rows], site.value.bias[rows] = weight.float(), bias.float()
        site.output.weight[:, rows] = 0.0
        site.output.weight[:, rows.start : rows.start + size] = output.T.float()


@torch.no_grad()
def low_rank_(layer: Layer, rank: int, damping: float = 1e-3) -> None:
    """Make each of the four projections a product of two with so many channels between."""
    projections: list[tuple[Any, Moments]] = [
        (layer.scores.query, layer.inputs),
        (layer.scores.key, layer.inputs),
        (layer.values.value, layer.inputs),
        (layer.values.output, layer.outputs),
    ]
    for projection, moments in projections:
        dense = projection.weight.double()  # (out, in)
        root = root_of(moments.covariance(), damping)
        right = torch.linalg.svd(root @ dense.T, full_matrices=False)[2][:rank]
        smaller = right.T @ (right @ dense)
        projection.bias += (moments.mean.double() @ (dense - smaller).T).float()
        projection.weight.copy_(smaller.float())


def without_heads_(
    model: PreTrainedModel,
    keep: int,
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
) -> None:
    """Remove all but the most important heads of the whole model, at least one a layer, by the loss on labelled data.

    Args:
        model: changed in place; smaller afterwards.
        keep: heads that remain.
        batches: of training data, with labels.
        loss: as for `head_importance`.
    """
    importance = head_importance(model, batches, loss)
    heads = sum(len(each) for each in importance.values())
    prune_heads_(model, least_important(importance, 1 - keep / heads, keep_one=True))
