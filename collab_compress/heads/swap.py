"""Swap attention heads: the elementary step of Multi-Head Rotation."""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention
from collab_compress.attention import is_collaborative
from collab_compress.errors import HeadError
from collab_compress.heads.blocks import HeadBlock, head_blocks

Head: TypeAlias = tuple[str, int]
"""Path of an attention module in the model, and the number of one of its heads, from 0."""

Pair: TypeAlias = tuple[Head, Head]


def swap_heads_(model: nn.Module, pairs: Sequence[Pair], optimizer: Any = None) -> None:
    """Swap pairs of attention heads in place, with what an optimizer remembers of them (Multi-Head Rotation, §3.1).

    Moves each head's part of the query, key and value weights and biases, of their gradients, and of every
    optimizer state shaped like its parameter; never the output projection. In the collaborative form a head is its
    row of the mixing matrix, its content bias and its values. Swapping the same pairs again restores every bit.

    Args:
        model: a Transformers model, stock or edited; not its `DistributedDataParallel` wrapper.
        pairs: heads to swap, each named in one pair only.
        optimizer: a `torch.optim.Optimizer`, or a wrapper that shows its `state`, as Accelerate's do.

    Raises:
        HeadError: a module or head does not exist; a head is in two pairs or paired with itself; the two are of
            different kinds or shapes, or of different collaborative modules; or only one of them has a gradient or
            optimizer state, or one has state that is not kept weight by weight. Nothing has moved then.
        UnsupportedModelError: the model's family is not known, or a projection is no plain `nn.Linear`.
    """
    state = {} if optimizer is None else optimizer.state
    moves = [move for blocks in matched_blocks(model, pairs) for move in _moves(*blocks, state)]
    with torch.no_grad():
        for one, other in moves:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def matched_blocks(model: nn.Module, pairs: Sequence[Pair]) -> list[tuple[HeadBlock, HeadBlock]]:
    """Match the parameter slices of paired heads, and refuse pairs that cannot be swapped.

    Raises:
        HeadError: as `swap_heads_`, but for what concerns gradients and optimizers.
    """
    sites = {site.name: site for site in find_attention(model, FAMILIES)}
    seen: set[Head] = set()
    found = []
    for one, other in pairs:
        for head in (one, other):
            _check_head(head, seen, sites)
            seen.add(head)
        found += _matched(sites[one[0]], one[1], sites[other[0]], other[1])
    return found


def _check_head(head: Head, seen: Collection[Head], sites: dict[str, AttentionSite]) -> None:
    if head[0] not in sites:
        have = ", ".join(list(sites)[:3]) + (", …" if len(sites) > 3 else "")
        raise HeadError(f"{head[0]!r} is no attention module of this model; those are {have}")
    if head in seen:
        raise HeadError(f"head {head[1]} of {head[0]} is named twice; name each head in one pair only, so that "
                        "swapping again undoes the swap")  # fmt: skip


def _matched(one: AttentionSite, i: int, other: AttentionSite, j: int) -> list[tuple[HeadBlock, HeadBlock]]:
    place = f"cannot swap head {i} of {one.name} with head {j} of {other.name}"
    if one.kind != other.kind:
        raise HeadError(f"{place}: one is {one.kind} attention, the other {other.kind}; pair heads of the same kind")
    if one.module is not other.module and (is_collaborative(one.module) or is_collaborative(other.module)):
        raise HeadError(
            f"{place}: heads of a collaborative module share its queries and keys, so they mean nothing in another; "
            "pair heads of the same module, or expand the model to its dense form first"
        )
    blocks, others = head_blocks(one, i), head_blocks(other, j)
    shapes, other_shapes = ([(block.of(block.parameter).shape, block.parameter.dtype) for block in side]
                            for side in (blocks, others))  # fmt: skip
    if shapes != other_shapes:
        raise HeadError(
            f"{place}: their parameters differ, {_described(shapes)} against {_described(other_shapes)}; "
            "pair heads of modules with the same widths, biases and types"
        )
    return list(zip(blocks, others, strict=True))


def _described(shapes: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)


def _moves(one: HeadBlock, other: HeadBlock, state: Any) -> list[tuple[Tensor, Tensor]]:
    """List the pairs of views to swap for one pair of slices: of the parameter, its gradient, its moments."""
    tensors, others = (_companions(block.parameter, state) for block in (one, other))
    if tensors.keys() != others.keys():
        differing = ", ".join(sorted(map(str, tensors.keys() ^ others.keys())))
        raise HeadError(
            f"only one of two heads to swap has {differing}, for parameters of shape "
            f"{tuple(one.parameter.shape)}; train or freeze both modules alike, and clear gradients "
            "with zero_grad() before swapping"
        )
    return [(one.of(tensor), other.of(others[name])) for name, tensor in tensors.items()]


def _companions(parameter: nn.Parameter, state: Any) -> dict[str, Tensor]:
    """Gather the parameter, its gradient and all optimizer state of its shape, by what they are called."""
    found: dict[str, Tensor] = {"weights": parameter.detach()}
    if parameter.grad is not None:
        found["a gradient"] = parameter.grad
    for name, tensor in state.get(parameter, {}).items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            continue
        if tensor.shape != parameter.shape:
            raise HeadError(
                f"the optimizer keeps {name!r} of shape {tuple(tensor.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: what it remembers of one head cannot be told apart; use one that keeps "
                "its state weight by weight, such as AdamW, or swap without passing the optimizer"
            )
        found[f"optimizer state {name!r}"] = tensor
    return found
