"""Rivals: simple, exact forms of known ways to make attention, or a rotary model's cache, smaller.

All get what our conversion gets: the moments of the same batches, with the same damping. Those for the BERT family
change a dense model in place into one that computes what the smaller one would, with zeros in place of removed
channels, and fold means into biases:

* `svd_`: each head separately, all of equal width: the weighted singular value decomposition of its scores and
  of its values and outputs ("A3: an Analytical Low-Rank Approximation Framework for Attention", and CLOVER with
  data).
* `low_rank_`: each of the four projections separately, as a product of two (SVD-LLM's whitening).
* `without_heads_`: the least important heads removed (Michel et al., "Are Sixteen Heads Really Better than One?").

Those for rotary models return a copy. Dropped channels are zero on both sides of their product, so that training
leaves them zero:

* `dropped`: pairs of channels of queries and keys.
* `pooled`: heads of keys and values averaged in groups, as for grouped queries.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import find_dense_attention, find_dense_values
from collab_compress.architectures.sites import DenseSite, ValueSite
from collab_compress.attention import RotaryConfig
from collab_compress.calibration import Batch
from collab_compress.calibration.gather import gather_moments
from collab_compress.factorization import Moments
from collab_compress.heads import head_importance, least_important, prune_heads_

Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Layer:
    """An attention module, and the moments of the inputs of its projections: D wide, and heads side by side."""

    scores: DenseSite
    values: ValueSite
    inputs: Moments
    outputs: Moments


def layers_of(model: PreTrainedModel, batches: Iterable[Batch]) -> list[Layer]:
    """Run the model on calibration batches and gather the moments of every attention module."""
    scores, values = find_dense_attention(model), find_dense_values(model)
    moments = gather_moments(model, [*scores, *values], batches)
    inputs, outputs = moments[: len(scores)], moments[len(scores) :]
    return [
        Layer(score_site, value_site, read[0], added[0])  # queries and keys have the same inputs
        for score_site, value_site, read, added in zip(scores, values, inputs, outputs, strict=True)
    ]


def root_of(covariance: Tensor, damping: float = 1e-3) -> Tensor:
    """Return the upper triangular S with SᵀS = the damped covariance."""
    damped = covariance.double().clone()
    damped.diagonal().add_(damping * covariance.diagonal().mean())
    return torch.linalg.cholesky(damped, upper=True)


def even(total: int, heads: int) -> list[int]:
    """Return even widths of heads; they differ by one if the number of heads does not divide the total."""
    return [total // heads + (head < total % heads) for head in range(heads)]


@torch.no_grad()
def svd_(layer: Layer, dk: int | None, dv: int | None, damping: float = 1e-3) -> None:
    """Narrow queries and keys to dk and values to dv, each head separately; None keeps them dense.

    A narrower head needs one more query/key channel, for its content bias, within the dense head width.
    """
    if dk is not None:
        _scores_(layer, even(dk, layer.scores.heads), damping)
    if dv is not None:
        _values_(layer, even(dv, layer.values.heads), damping)


def _scores_(layer: Layer, sizes: list[int], damping: float) -> None:
    site, width = layer.scores, layer.scores.head_width
    root, mean = root_of(layer.inputs.covariance(), damping), layer.inputs.mean.double()
    queries, keys, biases = (tensor.double() for tensor in (site.query_heads(), site.key_heads(), site.query_bias()))
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
    maps, values, biases = (
        tensor.double() for tensor in (site.output_heads(), site.value_heads(), site.value_bias())
    )
    diagonal = damping * covariance.diagonal().mean()
    for head, size in enumerate(sizes):
        if size == width:
            continue
        rows = slice(head * width, (head + 1) * width)
        root = torch.linalg.cholesky(covariance[rows, rows] + diagonal * torch.eye(width), upper=True)
        left, singular, right = torch.linalg.svd(root @ maps[head], full_matrices=False)
        kept = torch.linalg.solve_triangular(root, left[:, :size], upper=True)  # (d, s)
        output = singular[:size, None] * right[:size]  # (s, D)
        weight, bias = values.new_zeros(width, values.shape[1]), values.new_zeros(width)
        weight[:size], bias[:size] = (values[head] @ kept).T, biases[head] @ kept
        site.output.bias += (mean[rows] @ (maps[head] - kept @ output)).float()
        site.value.weight[rows], site.value.bias[rows] = weight.float(), bias.float()
        site.output.weight[:, rows] = 0.0
        site.output.weight[:, rows.start : rows.start + size] = output.T.float()


@torch.no_grad()
def low_rank_(layer: Layer, rank: int, damping: float = 1e-3) -> None:
    """Make each of the four projections a product of two, with `rank` channels between them."""
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
    """Keep the most important heads of the whole model, at least one in each layer, in place."""
    importance = head_importance(model, batches, loss)
    heads = sum(map(len, importance.values()))
    prune_heads_(model, least_important(importance, 1 - keep / heads, keep_one=True))


@torch.no_grad()
def dropped(
    dense: PreTrainedModel, share: float, values: bool, batches: Batches, alike: bool = False
) -> PreTrainedModel:
    """Zero the weakest channel pairs of each layer and, with `values`, narrow each head's values.

    With `alike` every head keeps equally many pairs; otherwise heads differ, and their cache would be ragged.
    """
    model = copy.deepcopy(dense)
    pairs = list(zip(find_dense_attention(model), find_dense_values(model), strict=True))
    moments = gather_moments(model, [site for pair in pairs for site in pair], batches)
    for (site, value_site), inputs, outputs in zip(pairs, moments[::2], moments[1::2], strict=True):
        width = site.head_width
        config = RotaryConfig.of(site, width)
        root = root_of(inputs[0].second).to(torch.complex128)
        query, key = (root @ config.complex_channels(heads, None) for heads in (site.query_heads(), site.key_heads()))
        read_by = query.norm(dim=1).square().unflatten(0, (site.key_value_heads, -1)).sum(1).sqrt()
        strength = read_by * key.norm(dim=1)  # (Hkv, d/2)
        strength = strength if alike else strength.view(1, -1)
        least = strength.sort(-1, descending=True).values[:, int(share * strength.shape[1]) - 1, None]
        removed = (strength < least).view(site.key_value_heads, -1).repeat(1, 2)  # both channels of a pair
        site.query.weight[removed.repeat_interleave(site.heads // len(removed), 0).flatten()] = 0
        site.key.weight[removed.flatten()] = 0
        for group in range(site.key_value_heads if values else 0):
            narrow_values_(value_site, group, int(share * width), outputs[0].second)
    return model


def narrow_values_(site: Any, group: int, size: int, second: Tensor) -> None:
    """Narrow one head of values by the singular value decomposition of what its heads add, in place."""
    width, heads = site.head_width, site.heads // site.key_value_heads
    rows = slice(group * width, (group + 1) * width)
    read = slice(rows.start * heads, rows.stop * heads)  # of the heads that share it
    blocks = second[read, read].unflatten(0, (heads, width)).unflatten(2, (heads, width)).diagonal(dim1=0, dim2=2)
    root, value, output = root_of(blocks.mean(-1)), site.value.weight[rows].double(), site.output.weight[:, read]
    maps = output.double().mT.unflatten(0, (heads, width)).transpose(0, 1).flatten(1)  # (d, heads · D)
    left, singular, right = torch.linalg.svd(root @ maps, full_matrices=False)
    kept = torch.linalg.solve_triangular(root, left[:, :size], upper=True)  # (d, s)
    narrow, back = torch.zeros_like(value), maps.new_zeros(width, heads, output.shape[0])
    narrow[:size], back[:size] = kept.mT @ value, (singular[:size, None] * right[:size]).unflatten(1, (heads, -1))
    site.value.weight[rows] = narrow.to(output.dtype)
    site.output.weight[:, read] = back.transpose(0, 1).flatten(0, 1).mT.to(output.dtype)


@torch.no_grad()
def pooled(dense: PreTrainedModel, share: float, values: bool) -> PreTrainedModel:
    """Return a model whose heads of keys, and with `values` of values, are averages of groups."""
    heads = dense.config.num_key_value_heads
    state, groups = dense.state_dict(), round(share * heads)
    for name in [name for name in state if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        mean_heads = state[name].view(groups, heads // groups, -1, state[name].shape[1]).mean(1, keepdim=True)
        if values:
            state[name] = mean_heads.flatten(0, 2)
        elif "k_proj" in name:
            state[name] = mean_heads.expand(-1, heads // groups, -1, -1).flatten(0, 2)
    config = copy.deepcopy(dense.config)
    config.num_key_value_heads = groups if values else heads
    model = type(dense)(config).eval()
    model.load_state_dict(state)
    return model
