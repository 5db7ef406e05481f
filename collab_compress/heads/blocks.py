"""Which slices of which parameters belong to one attention head."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from collab_compress.architectures import AttentionSite, FusedSlice
from collab_compress.architectures.sites import read
from collab_compress.attention import is_collaborative
from collab_compress.attention.per_head import PerHeadSpec
from collab_compress.errors import HeadError
from collab_compress.heads.sharding import refuse_pieces


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
    value = _linear(site, site.family.value)
    blocks = _collaborative(site, head) if is_collaborative(site.module) else _dense(site, head)
    blocks += _rows(value, head, value.out_features // site.heads)
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


def _collaborative(site: AttentionSite, head: int) -> list[HeadBlock]:
    module: Any = site.module
    spec, key = module.collaborative, site.part(site.family.key).proj.weight
    if isinstance(spec, PerHeadSpec):
        start, stop = sum(spec.sizes[:head]), sum(spec.sizes[: head + 1])
        query = site.part(site.family.query).proj.weight
        blocks = [HeadBlock(query, 0, start, stop), HeadBlock(key, 0, start, stop)]
    else:
        blocks = [HeadBlock(module.mixing, 0, head, head + 1)]
    if spec.content_bias:
        row = spec.rank + head
        blocks.append(HeadBlock(key, 0, row, row + 1))  # content biases lie behind the R shared channels
    return blocks


def _linear(site: AttentionSite, path: str) -> nn.Linear | FusedSlice:
    linear: nn.Linear | FusedSlice = read(site.name, site.module, site.family, path, nn.Linear)
    return linear


def _rows(linear: nn.Linear | FusedSlice, head: int, width: int) -> list[HeadBlock]:
    """Where a projection's weight (H·width, D) and bias (H·width,) compute one head's part."""
    start, stop = head * width, (head + 1) * width
    if isinstance(linear, FusedSlice):  # weight (D, 3·H·width)
        start, stop = linear.start + start, linear.start + stop
        return [HeadBlock(linear.whole.weight, 1, start, stop), HeadBlock(linear.whole.bias, 0, start, stop)]
    parameters: list[Any] = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    return [HeadBlock(parameter, 0, start, stop) for parameter in parameters]
