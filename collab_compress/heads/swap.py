"""Swap attention heads, the slices of parameters that belong to each, with what an optimizer remembers of them."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn

from collab_compress.architectures import FAMILIES, AttentionSite, FusedSlice, find_attention
from collab_compress.architectures.sites import read
from collab_compress.attention import MapForm
from collab_compress.attention.install import FORMS_AT
from collab_compress.errors import HeadError
from collab_compress.heads.sharding import refuse_pieces, reshard_, whole, write_


@dataclass(frozen=True, eq=False)
class HeadBlock:
    """A slice of a parameter that belongs to one head.

    Args:
        parameter: the whole parameter.
        dim: dimension along which heads lie: 0 in the storage layout of `nn.Linear`, 1 in a transposed one.
        start: where the head begins there.
        stop: where it ends.
    """

    parameter: nn.Parameter
    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """View the same slice of a tensor shaped like the parameter: itself, its gradient, a moment of it."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


def head_blocks(site: AttentionSite, head: int) -> list[HeadBlock]:
    """List what belongs to one head: all that it needs to compute its output, never the output projection.

    In the dense form: its rows of the query, key and value weights and of those biases that exist. In the
    collaborative form, where heads share queries and keys: its row of the mixing matrix, its content bias, and its
    rows of the value weight and bias. In the per-head form: its own rows of queries and keys instead.

    Args:
        site: the attention module.
        head: number of the head, from 0.

    Returns:
        Blocks in an order that is the same for every head of modules of the same form.

    Raises:
        HeadError: the module has no such head, or its parameters do not hold it, as in FSDP1 and ZeRO-3.
        UnsupportedModelError: a projection is no plain `nn.Linear`.
    """
    if not 0 <= head < site.heads:
        raise HeadError(f"{site.name} has no head {head}; its {site.heads} heads are 0 to {site.heads - 1}")
    if site.key_value_heads != site.heads:
        raise HeadError(
            f"{site.name}: {site.heads} heads share {site.key_value_heads} heads of keys and values, so a head has "
            "none of its own to swap; rotate heads of a model without grouped queries"
        )
    scores, values = (getattr(site.module, name, None) for name in FORMS_AT)
    blocks = _dense(site, head) if scores is None else _converted(site, scores, head)
    if values is None:
        value = _linear(site, site.family.value)
        blocks += _rows(value, head, value.out_features // site.heads)
    else:
        blocks += _converted(site, values, head)
    for block in blocks:
        refuse_pieces(site.name, block.parameter)
        shape = tuple(block.parameter.shape)
        held = len(shape) > block.dim and shape[block.dim] >= block.stop and block.parameter.is_floating_point()
        if not (
            held and isinstance(block.parameter, nn.Parameter)
        ):  # a parametrized weight is computed anew each time
            raise HeadError(
                f"{site.name}: weights of shape {shape} and type {block.parameter.dtype} do not hold head {head} at "
                f"{block.start}:{block.stop} of dimension {block.dim}; gather sharded parameters, undo quantization "
                "and remove parametrizations first"
            )
    return blocks


def _dense(site: AttentionSite, head: int) -> list[HeadBlock]:
    query, key = (_linear(site, path) for path in (site.family.query, site.family.key))
    return [*_rows(query, head, site.head_width), *_rows(key, head, site.head_width)]


def _converted(site: AttentionSite, form: MapForm, head: int) -> list[HeadBlock]:
    return [HeadBlock(site.part(path), 0, rows[head].start, rows[head].stop) for path, rows in form.head_rows()]


def _linear(site: AttentionSite, path: str) -> nn.Linear | FusedSlice:
    linear: nn.Linear | FusedSlice = read(site.name, site.module, site.family, path, nn.Linear)
    return linear


def _rows(linear: nn.Linear | FusedSlice, head: int, width: int) -> list[HeadBlock]:
    """Where a projection's weight (H·width, D) and bias (H·width,) compute one head's part."""
    rows, dim, layer = range(head * width, (head + 1) * width), 0, linear
    if isinstance(linear, FusedSlice):
        rows, dim, layer = linear.rows(head), linear.dim, linear.whole
    blocks: list[tuple[Any, int]] = [(layer.weight, dim)] + ([] if layer.bias is None else [(layer.bias, 0)])
    return [HeadBlock(parameter, along, rows.start, rows.stop) for parameter, along in blocks]


Head: TypeAlias = tuple[str, int]
"""Path of an attention module in the model, and the number of one of its heads, from 0."""

Pair: TypeAlias = tuple[Head, Head]


def swap_heads_(model: nn.Module, pairs: Sequence[Pair], optimizer: Any = None) -> None:
    """Swap pairs of attention heads in place, with what an optimizer remembers of them (Multi-Head Rotation, §3.1).

    Moves each head's part of the query, key and value weights and biases, of their gradients, and of every
    optimizer state shaped like its parameter; never the output projection. In the collaborative form a head is its
    row of the mixing matrix, its content bias and its values. Swapping the same pairs again restores every bit.

    Parameters may be sharded by FSDP2, and the optimizer may be PyTorch's `ZeroRedundancyOptimizer`; every process
    must make the call then.

    Args:
        model: a Transformers model, stock or edited; not its `DistributedDataParallel` wrapper.
        pairs: heads to swap, each named in one pair only.
        optimizer: a `torch.optim.Optimizer`, or a wrapper that shows its `state` and `param_groups`, as Accelerate's
            do. It must step all the parameters that move and require gradients.

    Raises:
        HeadError: a module or head does not exist; a head is in two pairs or paired with itself; the two are of
            different kinds or shapes, or of different collaborative modules; FSDP1 or ZeRO-3 holds the weights; the
            optimizer steps other parameters, such as master copies; or only one head of a pair has a gradient or
            optimizer state, or one has state that is not kept weight by weight. Nothing has moved then.
        UnsupportedModelError: the model's family is not known, or a projection is no plain `nn.Linear`.
    """
    matched = matched_blocks(model, pairs)
    check_optimizer(optimizer, [block for blocks in matched for block in blocks])
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    with torch.no_grad():
        if _spreads_state(inner):
            moves = [move for one, other in matched for move in _moves(one, other, {})]
            states = _gathered_states([block for blocks in matched for block in blocks], inner)
        else:
            state = {} if inner is None else inner.state
            moves, states = [move for one, other in matched for move in _moves(one, other, state)], []
        for (one, tensor), (other, other_tensor) in moves:
            full = whole(tensor)
            other_full = full if other_tensor is tensor else whole(other_tensor)
            kept = one.of(full).clone()
            one.of(full).copy_(other.of(other_full))
            other.of(other_full).copy_(kept)
            write_(tensor, full)
            write_(other_tensor, other_full)
        for own, new in states:
            own.copy_(new)


def matched_blocks(model: nn.Module, pairs: Sequence[Pair]) -> list[tuple[HeadBlock, HeadBlock]]:
    """Match the parameter slices of paired heads, and refuse pairs that cannot be swapped.

    Raises:
        HeadError: as `swap_heads_`, but for what concerns gradients and optimizers.
    """
    reshard_(model)
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
        raise HeadError(
            f"head {head[1]} of {head[0]} is named twice; name each head in one pair only, so that "
            "swapping again undoes the swap"
        )


def _matched(one: AttentionSite, i: int, other: AttentionSite, j: int) -> list[tuple[HeadBlock, HeadBlock]]:
    place = f"cannot swap head {i} of {one.name} with head {j} of {other.name}"
    if one.kind != other.kind:
        raise HeadError(f"{place}: one is {one.kind} attention, the other {other.kind}; pair heads of the same kind")
    if one.module is not other.module and any(hasattr(each.module, "score_form") for each in (one, other)):
        raise HeadError(
            f"{place}: heads of a collaborative module share its queries and keys, so they mean nothing in another; "
            "pair heads of the same module, or expand the model to its dense form first"
        )
    blocks, others = head_blocks(one, i), head_blocks(other, j)
    shapes, other_shapes = (
        [(block.of(block.parameter).shape, block.parameter.dtype) for block in side] for side in (blocks, others)
    )
    if shapes != other_shapes:
        raise HeadError(
            f"{place}: their parameters differ, {_described(shapes)} against {_described(other_shapes)}; "
            "pair heads of modules with the same widths, biases and types"
        )
    return list(zip(blocks, others, strict=True))


def _described(shapes: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)


def check_optimizer(optimizer: Any, blocks: Sequence[HeadBlock]) -> None:
    """Refuse an optimizer whose state of heads would not move with them, and whose next step would undo the move.

    Raises:
        HeadError: it does not step all parameters of the heads.
    """
    if optimizer is None:
        return
    if getattr(getattr(optimizer, "optimizer", optimizer), "_overlap_with_ddp", False):
        raise HeadError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) does not show its state; leave overlap_with_ddp out"
        )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [block.parameter for block in blocks if block.parameter.requires_grad]
    missing = [parameter for parameter in parameters if id(parameter) not in stepped]
    if missing:
        raise HeadError(
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} does not step {len(missing)} of "
            f"{len(parameters)} parameters of the heads to swap, the first of shape {tuple(missing[0].shape)}: it is "
            "another model's, or steps master copies of the weights (as DeepSpeed's do), which would undo the swap; "
            "pass the optimizer that steps the model's own parameters, and freeze what none steps"
        )


_Part: TypeAlias = tuple[HeadBlock, Tensor]


def _moves(one: HeadBlock, other: HeadBlock, state: Any) -> list[tuple[_Part, _Part]]:
    """List what to swap for one pair of slices: those of the parameter, its gradient, its moments."""
    tensors, others = (_own(block.parameter) | _remembered(block.parameter, state) for block in (one, other))
    _check_alike(one, tensors, others)
    return [((one, tensor), (other, others[name])) for name, tensor in tensors.items()]


def _check_alike(one: HeadBlock, names: Collection[str], others: Collection[str]) -> None:
    if set(names) != set(others):
        differing = ", ".join(sorted(set(names) ^ set(others)))
        raise HeadError(
            f"only one of two heads to swap has {differing}, for parameters of shape "
            f"{tuple(one.parameter.shape)}; train or freeze both modules alike, and clear gradients "
            "with zero_grad() before swapping"
        )


def _own(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Gather the parameter and its gradient, by what they are called."""
    gradient = {} if parameter.grad is None else {"a gradient": parameter.grad}
    return {"weights": parameter} | gradient


def _remembered(parameter: nn.Parameter, state: Any) -> dict[str, Tensor]:
    """Gather all optimizer state of the parameter's shape, by what it is called."""
    found = {}
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


def _spreads_state(optimizer: Any) -> bool:
    """Return whether each process keeps the state of some parameters only (PyTorch's ZeRO-1)."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # imported by who made one
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)


def _gathered_states(blocks: Sequence[HeadBlock], optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Exchange the optimizer state of heads between processes.

    Args:
        blocks: of paired heads, one after the other.
        optimizer: a `ZeroRedundancyOptimizer`.

    Returns:
        What this process remembers, as views, each with what is to be written there.

    Raises:
        HeadError: in all processes, what any of them refuses.
    """
    own: list[dict[str, Tensor]] = []
    refused: HeadError | None = None
    try:
        for block in blocks:
            remembered = _remembered(block.parameter, optimizer.optim.state)
            own.append({name: block.of(tensor) for name, tensor in remembered.items()})
    except HeadError as error:
        refused = error
    told: list[Any] = [None] * distributed.get_world_size(optimizer.process_group)
    copies = [{name: tensor.to("cpu", copy=True) for name, tensor in each.items()} for each in own]
    distributed.all_gather_object(told, refused or copies, group=optimizer.process_group)
    for each in told:
        if isinstance(each, HeadError):
            raise each
    every: list[dict[str, Tensor]] = [next(filter(None, states), {}) for states in zip(*told, strict=True)]
    moves = []
    for place in range(0, len(blocks), 2):
        _check_alike(blocks[place], every[place], every[place + 1])
        for at, other in ((place, place + 1), (place + 1, place)):
            moves += [(tensor, every[other][name]) for name, tensor in own[at].items()]
    return moves
