"""Rivals for rotary models' caches: dropped pairs of channels, and heads pooled for grouped queries.

What is dropped is zero on both sides of its product, so that it stays so in training, and the smaller model computes
the same. All get what a conversion of ours gets: the moments of the same batches.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, find_dense_attention, find_dense_values
from collab_compress.attention import RotaryScores
from collab_compress.calibration import gather_moments

Batches = list[dict[str, Tensor]]


def root_of(second: Tensor) -> Tensor:
    """Upper triangular S with SᵀS = the damped moments."""
    return torch.linalg.cholesky(second + 1e-3 * second.diagonal().mean() * torch.eye(len(second)), upper=True)


@torch.no_grad()
def dropped(
    dense: PreTrainedModel, share: float, values: bool, batches: Batches, alike: bool = False
) -> PreTrainedModel:
    """Zero the weakest channel pairs of each layer; with `values`, also the channels that each head's values lose.

    With `alike` every head keeps equally many pairs; otherwise heads differ, and a cache of theirs would be ragged.
    """
    model = copy.deepcopy(dense)
    pairs = list(zip(find_dense_attention(model, FAMILIES), find_dense_values(model, FAMILIES), strict=True))
    found = gather_moments(model, [site for pair in pairs for site in pair], batches)
    for (site, value_site), inputs, outputs in zip(pairs, found[::2], found[1::2], strict=True):
        width = site.head_width
        form = RotaryScores.of(site, width, content_bias=False)
        root = root_of(inputs[0].second).to(torch.complex128)
        query, key = (root @ form.channels_of(each, None) for each in (site.query_heads(), site.key_heads()))
        strength = query.norm(dim=1) * key.norm(dim=1)  # (H, d/2)
        strength = strength if alike else strength.view(1, -1)
        least = strength.sort(-1, descending=True).values[:, int(share * strength.shape[1]) - 1, None]
        gone = (strength < least).view(site.heads, -1).repeat(1, 2).flatten()  # both channels of a pair
        site.query.weight[gone] = 0
        site.key.weight[gone] = 0
        for head in range(site.heads if values else 0):
            narrow_head_(value_site, slice(head * width, (head + 1) * width), int(share * width), outputs[0].second)
    return model


def narrow_head_(site: Any, rows: slice, size: int, second: Tensor) -> None:
    """Narrow each head's values by the singular value decomposition of its output, in place."""
    root, value, output = root_of(second[rows, rows]), site.value.weight[rows].double(), site.output.weight[:, rows]
    left, found, right = torch.linalg.svd(root @ output.double().mT, full_matrices=False)
    kept = torch.linalg.solve_triangular(root, left[:, :size], upper=True)  # (d, s)
    narrow, back = torch.zeros_like(value), torch.zeros_like(output)
    narrow[:size], back[:, :size] = kept.mT @ value, (found[:size, None] * right[:size]).mT
    site.value.weight[rows], site.output.weight[:, rows] = narrow.to(output.dtype), back


@torch.no_grad()
def pooled(dense: PreTrainedModel, share: float, values: bool) -> PreTrainedModel:
    """Make a model with fewer heads of keys, and of values where `values` says so: averages of groups."""
    heads = dense.config.num_attention_heads
    state, groups = dense.state_dict(), int(share * heads)
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


def taught_(model: PreTrainedModel, dense: PreTrainedModel, batches: Batches, rate: float = 1e-3) -> PreTrainedModel:
    """Train a rival's attention on what the dense model predicts; channels that are zero on both sides stay so."""
    trained = [p for name, p in model.named_parameters() if "attn" in name and "norm" not in name]
    optimizer = torch.optim.Adam(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, len(batches), pct_start=1 / 8)
    for batch in batches:
        with torch.no_grad():
            wanted = dense(**batch).logits.log_softmax(-1).flatten(0, 1)
        here = model(**batch).logits.log_softmax(-1).flatten(0, 1)
        optimizer.zero_grad()
        kl_div(here, wanted, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        schedule.step()
    return model
