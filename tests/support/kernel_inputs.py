"""Random inputs of attention kernels, and the formula, one head and one position at a time."""

import itertools
import math

import torch
from hypothesis import strategies as st

from collab_compress.attention.kernels import Inputs

MASKS = ["none", "padding", "padding, expanded", "bool", "lowest", "-inf", "position bias", "two axes"]


def draw_inputs(
    batch=2, heads=3, length=4, keys=5, rank=6, width=2, content=True, mask="none", sizes=(), seed=0
) -> Inputs:
    """Return float64 inputs of heads that share channels, or have channels of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    if sizes:
        heads, rank = len(sizes), sum(sizes)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    joined = normal(batch, keys, rank + heads + 1)  # as the key projection returns it: strided parts
    value = normal(batch, keys, heads, width).transpose(1, 2)
    visible = torch.rand(batch, 1, length, keys, generator=generator) > 0.4
    visible[..., 0] = True  # the output of a fully masked query is undefined
    padding = torch.arange(keys).expand(batch, 1, 1, keys) < torch.arange(1, batch + 1).view(-1, 1, 1, 1)
    masks = {
        "none": None,
        "padding": padding,
        "padding, expanded": padding.expand(batch, 1, length, keys),
        "bool": visible,
        "lowest": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo().min),
        "-inf": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf),
        "position bias": normal(1, heads, length, keys),
        "two axes": normal(length, keys),
    }
    return Inputs(
        query=normal(batch, length, rank),
        key=joined[..., :rank],
        value=value,
        mask=masks[mask],
        scaling=0.3,
        content=joined[..., rank : rank + heads] if content else None,
        mixing=None if sizes else normal(heads, rank),
        sizes=sizes,
    )


def inputs_strategy(**options):
    """Return a Hypothesis strategy for `draw_inputs`."""
    return st.builds(
        draw_inputs,
        batch=st.integers(1, 3),
        length=st.integers(1, 6),
        keys=st.integers(1, 6),
        width=st.integers(1, 4),
        content=st.booleans(),
        mask=st.sampled_from(MASKS),
        seed=st.integers(0, 999),
        **options,
    )


def oracle_probabilities(inputs):
    """Return p_i(x, ·), one head, one query and one key at a time, (B, H, T, S)."""
    query, key, mixing = inputs.query, inputs.key, inputs.mixing
    if mixing is None:
        mixing = torch.block_diag(*(torch.ones(1, size, dtype=torch.float64) for size in inputs.sizes))
    (batch, length, rank), heads, keys = query.shape, len(mixing), key.shape[1]
    mask = None if inputs.mask is None else inputs.mask.expand(batch, heads, length, keys)
    probs = []
    for b, i, x in itertools.product(range(batch), range(heads), range(length)):
        scores = []
        for y in range(keys):
            score = sum(query[b, x, r] * mixing[i, r] * key[b, y, r] for r in range(rank))
            if inputs.content is not None:
                score = score + inputs.content[b, y, i]
            score = score * inputs.scaling
            if mask is not None:
                allowed = mask[b, i, x, y]
                score = score + ((0.0 if allowed else -math.inf) if mask.dtype == torch.bool else allowed)
            scores.append(score - math.inf if inputs.causal and y > x else score)
        top = max(score.detach() for score in scores)
        weights = [(score - top).exp() for score in scores]
        probs.append(torch.stack([weight / sum(weights) for weight in weights]))
    return torch.stack(probs).view(batch, heads, length, keys)


def oracle(inputs):
    """Return Σ_y p_i(x, y) · value_i(y), (B, H, T, dv)."""
    return torch.einsum("bixy,biyd->bixd", oracle_probabilities(inputs), inputs.value)
