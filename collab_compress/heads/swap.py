"""Swap attention heads, the parameter slices that belong to each, with their gradients and optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collab_compress.architectures import AttentionSite, FusedSlice, find_attention
from collab_compress.architectures.sites import read
from collab_compress.attention.run import is_converted, maps_of, prepare_
from collab_compress.errors import HeadError
from collab_compress.heads.pruning import check_heads
from collab_compress.heads.sharding import full_tensor, refuse_split, reshard_, write_

Head: TypeAlias = tuple[str, int]
"""Path of an attention module in the model, and the number of one of its heads, from 0."""

Pair: TypeAlias = tuple[Head, Head]


@dataclass(frozen=True, eq=False)
class HeadBlock:
    """A slice, `start` to `stop` along `dim`, of a parameter or buffer that belongs to one head."""

    parameter: Tensor
    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """View the same slice of a tensor shaped like the parameter: itself, its gradient, a moment of it."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


Matched: TypeAlias = tuple[HeadBlock, HeadBlock]


def head_blocks(site: AttentionSite, head: int) -> list[HeadBlock]:
    """List the parameter slices that compute a head's output, in the same order for all heads of one form.

    They are rows of query, key and value weights and biases; where heads share queries and keys, the head's mixing
    weights, channel numbers and content bias in place of the first two.
    """
    if site.key_value_heads != site.heads:
        raise HeadError(
            f"{site.name}: {site.heads} heads share {site.key_value_heads} heads of keys and values, so they "
            "cannot be swapped alone; rotate heads of a model without grouped queries"
        )
    if site.own_positions:
        raise HeadError(
            f"{site.name}: {site.own_positions}, so heads cannot be swapped; rotate those of other models"
        )
    family = site.family
    blocks = []
    for converted, dense_paths in zip(
        maps_of(site.module), ((family.paths.query, family.paths.key), (family.paths.value,)), strict=True
    ):
        if converted is not None:
            for path, start, count in converted.head_rows(site.module):
                first = start + head * count
                blocks.append(HeadBlock(site.part(path), 0, first, first + count))
            continue
        for path in dense_paths:
            projection: nn.Linear | FusedSlice = read(site.name, site.module, family, path, nn.Linear)
            if isinstance(projection, FusedSlice):
                layer, dim, channels = projection.layer, projection.dim, projection.rows(head)
            else:
                width = projection.out_features // site.heads if path == family.paths.value else site.head_width
                layer, dim, channels = projection, 0, range(head * width, (head + 1) * width)
            blocks.append(HeadBlock(layer.weight, dim, channels.start, channels.stop))
            if layer.bias is not None:
                blocks.append(HeadBlock(layer.bias, 0, channels.start, channels.stop))
    for block in blocks:
        refuse_split(site.name, block.parameter)
        shape = tuple(block.parameter.shape)
        fits = len(shape) > block.dim and shape[block.dim] >= block.stop
        # A parametrized weight is no parameter: it is computed anew in each forward pass. Whole numbers are indices.
        is_weight = isinstance(block.parameter, nn.Parameter) and block.parameter.is_floating_point()
        if not fits or not (is_weight or block.parameter.dtype == torch.int64):
            raise HeadError(
                f"{site.name}: weights of shape {shape} and type {block.parameter.dtype} do not hold head {head} at "
                f"{block.start}:{block.stop} of dimension {block.dim}; gather sharded parameters, undo quantization "
                "and remove parametrizations first"
            )
    return blocks


def swap_heads_(model: nn.Module, pairs: Sequence[Pair], optimizer: Optimizer | None = None) -> None:
    """Swap pairs of attention heads in place, with their optimizer state (Multi-Head Rotation, §3.1).

    Moves the slices of `head_blocks`, of their gradients, and of every optimizer state shaped like its parameter.
    Swapping the same pairs again restores every bit.

    Parameters may be sharded by FSDP2; then every process must make the call.

    Args:
        model: a Transformers model, stock or edited; not its `DistributedDataParallel` wrapper.
        pairs: heads to swap, each in one pair only.
        optimizer: a `torch.optim.Optimizer`, or a wrapper with its `state` and `param_groups`, as Accelerate's. It
            must step all the parameters that move and require gradients.

    Raises:
        HeadError: a module or head does not exist; a head is in two pairs or paired with itself; the two are of
            different kinds or shapes, or of different collaborative modules; FSDP1 or ZeRO-3 holds the weights; the
            optimizer steps other parameters, such as master copies; or only one head of a pair has a gradient or
            optimizer state, or one has state that is not kept weight by weight. Nothing has moved then.
        UnsupportedModelError: the model's family is not known, or a projection is no plain `nn.Linear`.

    Example:
        >>> first, last = ("encoder.layer.0.attention.self", 0), ("encoder.layer.1.attention.self", 2)
        >>> before = model.encoder.layer[0].attention.self.value.weight[:8].clone()
        >>> swap_heads_(model, [(first, last)])
        >>> torch.equal(model.encoder.layer[1].attention.self.value.weight[16:], before)
        True
    """
    matched = match_blocks(model, pairs)
    check_optimizer(optimizer, [block for blocks in matched for block in blocks])
    state = {} if optimizer is None else unwrap_optimizer(optimizer).state
    with torch.no_grad():
        swaps: list[tuple[HeadBlock, Tensor, HeadBlock, Tensor]] = []
        for one, other in matched:
            tensors, other_tensors = _head_tensors(one.parameter, state), _head_tensors(other.parameter, state)
            if differing := sorted(tensors.keys() ^ other_tensors.keys()):
                raise HeadError(
                    f"only one of two heads to swap has {', '.join(differing)}, for parameters of shape "
                    f"{tuple(one.parameter.shape)}; train or freeze both modules alike, and clear gradients "
                    "with zero_grad() before swapping"
                )
            swaps += [(one, tensor, other, other_tensors[name]) for name, tensor in tensors.items()]
        for one, tensor, other, other_tensor in swaps:
            full = full_tensor(tensor)
            other_full = full if other_tensor is tensor else full_tensor(other_tensor)
            copy = one.of(full).clone()
            one.of(full).copy_(other.of(other_full))
            other.of(other_full).copy_(copy)
            write_(tensor, full)
            write_(other_tensor, other_full)
    for name in {name for pair in as_pairs(pairs) for name, _ in pair}:
        if is_converted(module := model.get_submodule(name)):
            prepare_(module)


def as_pairs(pairs: Any) -> tuple[Pair, ...]:
    """Return pairs of heads that may be lists, as from JSON, or raise a HeadError."""

    def as_head(name: Any, number: Any) -> Head:
        if not isinstance(name, str) or not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(name, number)
        return name, int(number)

    try:
        return tuple((as_head(*one), as_head(*other)) for one, other in pairs)
    except (TypeError, ValueError) as error:
        raise HeadError(f"pairs are {pairs!r}; expected ((module, head), (module, head)) for each") from error


def match_blocks(model: nn.Module, pairs: Sequence[Pair]) -> list[Matched]:
    """Return the matched parameter slices of paired heads, or raise a HeadError if they cannot be swapped."""
    reshard_(model)
    sites = {site.name: site for site in find_attention(model)}
    seen: set[Head] = set()
    matched = []
    for one, other in as_pairs(pairs):
        for name, number in (one, other):
            check_heads(list(sites.values()), {name: [number]})
            if (name, number) in seen:
                raise HeadError(
                    f"head {number} of {name} is named twice; name each head in one pair only, so that swapping "
                    "again undoes the swap"
                )
            seen.add((name, number))
        matched += match_heads(sites[one[0]], one[1], sites[other[0]], other[1])
    return matched


def match_heads(one: AttentionSite, i: int, other: AttentionSite, j: int) -> list[Matched]:
    """Return the matched parameter slices of head i of one module and head j of another, or raise a HeadError."""
    case = f"cannot swap head {i} of {one.name} with head {j} of {other.name}"
    if one.kind != other.kind:
        raise HeadError(f"{case}: one is {one.kind} attention, the other {other.kind}; pair heads of the same kind")
    if one.module is not other.module and any(maps_of(site.module)[0] for site in (one, other)):
        raise HeadError(
            f"{case}: heads of a collaborative module share its queries and keys, and cannot move to another; "
            "pair heads of the same module, or expand the model to its dense form first"
        )
    blocks, other_blocks = head_blocks(one, i), head_blocks(other, j)
    shapes, other_shapes = (
        ", ".join(f"{str(block.parameter.dtype)[6:]}{list(block.of(block.parameter).shape)}" for block in side)
        for side in (blocks, other_blocks)
    )
    if shapes != other_shapes:
        raise HeadError(
            f"{case}: their parameters differ, {shapes} against {other_shapes}; "
            "pair heads of modules with the same widths, biases and types"
        )
    return list(zip(blocks, other_blocks, strict=True))


def unwrap_optimizer(optimizer: Optimizer | None) -> Any:
    """Return the optimizer itself, without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def stepped_by(optimizer: Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer steps."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_optimizer(optimizer: Optimizer | None, blocks: Sequence[HeadBlock]) -> None:
    """Raise a HeadError if an optimizer does not step the parameters of heads, so that it would undo a swap."""
    if optimizer is None:
        return
    inner = unwrap_optimizer(optimizer)
    if type(inner).__name__ == "ZeroRedundancyOptimizer":
        raise HeadError("ZeroRedundancyOptimizer keeps its state in other processes; shard by FSDP2 instead")
    stepped = stepped_by(optimizer)
    parameters = [block.parameter for block in blocks if block.parameter.requires_grad]
    missing = [parameter for parameter in parameters if id(parameter) not in stepped]
    if missing:
        raise HeadError(
            f"{type(inner).__name__} does not step {len(missing)} of {len(parameters)} parameters of the heads to "
            f"swap, the first of shape {tuple(missing[0].shape)}: it is another model's, or steps master copies of "
            "the weights (as DeepSpeed's do), which would undo the swap; pass the optimizer that steps the model's "
            "own parameters, and freeze those that no optimizer steps"
        )


def _head_tensors(parameter: Tensor, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the parameter, its gradient and its optimizer state, named for messages."""
    tensors = {"weights": parameter}
    if parameter.grad is not None:
        tensors["a gradient"] = parameter.grad
    for name, tensor in state.get(parameter, {}).items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            continue
        if tensor.shape != parameter.shape:
            raise HeadError(
                f"the optimizer keeps {name!r} of shape {tuple(tensor.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}, so the state of one head cannot be told apart; use one that keeps its "
                "state weight by weight, such as AdamW, or swap without passing the optimizer"
            )
        tensors[f"optimizer state {name!r}"] = tensor
    return tensors
