"""A small module of shared heads with random inputs, and the formula, one head, position and channel at a time."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from collab_compress.architectures import FAMILIES
from collab_compress.attention import SharedConfig, SharedQK, install_
from collab_compress.attention.run import attend

MASKS = ["none", "padding", "padding, expanded", "bool", "lowest", "-inf", "position bias", "two axes"]
WIDTH, HEAD_WIDTH, SCALING = 5, 4, 0.3  # of the inputs, of dense heads, of the scores


class Attention(nn.Module):
    """Heads that read `reads` of `rank` shared channels, in float64, as an attention module holds them."""

    family = replace(FAMILIES["bert"], forward="stock")

    def __init__(self, heads: int, rank: int, reads: int, content: bool) -> None:
        super().__init__()
        self.scaling = SCALING
        self.query, self.key = (nn.Linear(WIDTH, heads * HEAD_WIDTH).double() for _ in range(2))
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        config = SharedConfig(heads, HEAD_WIDTH, rank, content, reads)
        install_(self, *SharedQK.build(config, self, None), None)
        for parameter in self.requires_grad_(False).parameters():
            nn.init.normal_(parameter)
        self.qk.channels.copy_(torch.stack([torch.randperm(rank)[:reads] for _ in range(heads)]).sort(1).values)


class Inputs(NamedTuple):
    """One call: vectors x (B, T, D) and y (B, S, D), values (B, H, S, s), a mask."""

    module: Any
    x: Tensor
    y: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool = False

    @property
    def projected(self) -> list[Tensor]:
        """What the module's projections return, as modules lay it out, (B, n, L, d)."""
        parts = (self.module.query(self.x), self.module.key(self.y))
        return [part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in parts]

    def call(self, implementation: str = "sdpa", **options: Any) -> Any:
        """Attend by an attention implementation."""
        options.update(implementation=implementation, is_causal=self.causal)
        return attend(self.module, *self.projected, self.value, self.mask, **options)

    def to(self, place: Any) -> "Inputs":
        """Move the module in place, and the rest, to a device or a dtype; a boolean mask keeps its dtype."""
        self.module.to(place)
        mask = self.mask
        if mask is not None and (mask.is_floating_point() or isinstance(place, str)):
            mask = mask.to(place)
        return self._replace(x=self.x.to(place), y=self.y.to(place), value=self.value.to(place), mask=mask)

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that gradients reach."""
        return [self.x, self.y, self.value, *self.module.parameters()]


def draw_inputs(
    batch=2, heads=3, length=4, keys=5, rank=6, reads=3, width=2, content=True, mask="none", causal=False, seed=0
) -> Inputs:
    """Return float64 inputs; a mask hides the future already, so there is none where `causal`."""
    torch.manual_seed(seed)
    module = Attention(heads, rank, min(reads, rank), content)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    visible = torch.rand(batch, 1, length, keys) > 0.4
    visible[..., 0] = True  # the output of a fully masked query is undefined
    padding = torch.arange(keys).expand(batch, 1, 1, keys) < torch.arange(1, batch + 1).view(-1, 1, 1, 1)
    zeros = torch.zeros(visible.shape, dtype=torch.float64)
    masks = {
        "none": None,
        "padding": padding,
        "padding, expanded": padding.expand(batch, 1, length, keys),
        "bool": visible,
        "lowest": zeros.masked_fill(~visible, torch.finfo().min),
        "-inf": zeros.masked_fill(~visible, -math.inf),
        "position bias": normal(1, heads, length, keys),
        "two axes": normal(length, keys),
    }
    vectors = normal(batch, length, WIDTH), normal(batch, keys, WIDTH)
    return Inputs(module, *vectors, normal(batch, heads, keys, width), masks[mask], causal and mask == "none")


inputs_strategy = st.builds(
    draw_inputs,
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    length=st.integers(1, 5),
    keys=st.integers(1, 5),
    rank=st.integers(1, 7),
    reads=st.integers(1, 7),
    width=st.integers(1, 4),
    content=st.booleans(),
    mask=st.sampled_from(MASKS),
    causal=st.booleans(),
    seed=st.integers(0, 999),
)


def oracle(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return p_i(x, ·) (B, H, T, S), and Σ_y p_i(x, y) · value_i(y), (B, T, H, s).

    score_i(x, y) = s · [Σ_{r ∈ S_i} m_ir (x · w̃q_r)(y · w̃k_r) + v_i · y]
    """
    module, mask = inputs.module, inputs.mask
    qk, rank = module.qk, module.qk.config.rank
    batch, heads, length, keys = len(inputs.x), len(qk.mixing), inputs.x.shape[1], inputs.y.shape[1]
    query, key = inputs.x @ module.query.proj.weight.T, inputs.y @ module.key.proj.weight.T  # all x · w̃q_r, y · w̃k_r
    key, content = key[..., :rank], key[..., rank:] if qk.config.content_bias else None  # and all v_i · y
    mask = query.new_zeros(()) if mask is None else mask
    mask = torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
    weights, added = qk.mixing, mask.expand(batch, heads, length, keys)
    if not any(leaf.requires_grad for leaf in inputs.leaves):  # numbers are faster than tensors
        query, key, weights = query.tolist(), key.tolist(), weights.tolist()
        content = None if content is None else content.tolist()
    rows = []
    for b, i, t in itertools.product(range(batch), range(heads), range(length)):
        scores = []
        for s in range(keys):
            score = 0.0 if content is None else content[b][s][i]
            for weight, r in zip(weights[i], qk.channels[i].tolist(), strict=True):
                score = score + weight * query[b][t][r] * key[b][s][r]
            score = score * module.scaling + added[b, i, t, s]
            is_future = inputs.causal and length > 1 and s > t  # one query stands behind all keys
            scores.append(score - math.inf if is_future else score)
        rows.append(torch.stack(scores).softmax(-1))
    probs = torch.stack(rows).view(batch, heads, length, keys)
    return probs, torch.einsum("bits,bisd->btid", probs, inputs.value)
