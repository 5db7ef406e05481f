"""Values of fewer channels a head, and the output projection that reads them: the narrow form of the value map.

    layer(x) = Σ_i A_i (x Wv_i P_i) O_i

where A_i are the attention probabilities of head i, P_i (d, s_i) keeps s_i of its d channels, and O_i (s_i, D) is
their part of the output projection. Heads' channels lie side by side, dv of them in all. With grouped queries the
heads of a group share Wv and P, and each has an O of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.form import Cut, HeadRows, MapForm, padding_of, plain_weight, remaining
from collab_compress.attention.projections import Layout, PaddedProjection, dense_projection, put_back_, replace_
from collab_compress.errors import CompressionError

JOINT_WIDTH = "all_head_size"  # what some families keep beside the number of heads: H·d, or dv


@dataclass(frozen=True)
class DenseValues:
    """The value and output projections of a dense module, as they were.

    Args:
        value: values, D → H·d; where the stock model has a fused layer, what holds it as `whole`.
        output: the output projection, which stays in its place.
        weight: its weight, (D, H·d), or (H·d, D) in a transposed layer.
        bias: its bias (D,), or None.
    """

    value: Any
    output: nn.Linear | Conv1D
    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass(frozen=True)
class ValueParts:
    """The parameters of a value map in the narrow form, ready to be installed.

    Args:
        value: values, D → dv.
        output: the output projection, which gets what follows.
        weight: (D, dv·group), or (dv·group, D) in a transposed layer.
        bias: (D,), or None.
    """

    value: PaddedProjection
    output: nn.Linear | Conv1D
    weight: nn.Parameter
    bias: nn.Parameter | None

    def tensors(self) -> list[Tensor]:
        """List the memory that holds what was fitted."""
        found = [self.value.proj.weight, self.value.proj.bias, self.weight, self.bias]
        return [tensor.data for tensor in found if tensor is not None]


@dataclass(frozen=True)
class NarrowValues(MapForm):
    """The narrow form: each head has values of its own, fewer than d, and the output projection reads dv in all.

    Args:
        heads: number of heads H.
        head_width: width d of one head's values in the dense model.
        value: attribute path of the value projection in the attention module.
        output: attribute path of the output projection; a leading `..` starts at the module's parent.
        sizes: channels of each head of values.
        value_bias: whether values have a bias.
        fixed_heads: whether the module views values as exactly H heads.
        group: how many heads share one head of values.
        interleaved: whether a fused layer holds each head's queries, keys and values together.
        pieces: attribute that says how many those are, if it can be changed.
        even: whether it views queries, keys and values of a fused layer as equally many heads.
    """

    value: str
    output: str
    sizes: tuple[int, ...]
    value_bias: bool
    fixed_heads: bool = False
    group: int = 1
    interleaved: bool = False
    pieces: str = ""
    even: bool = False

    at: ClassVar[str] = "value_form"
    kind: ClassVar[str] = "narrow-values"
    option: ClassVar[str] = "narrow"
    title: ClassVar[str] = "narrow values"

    @classmethod
    def of(cls, site: Any, dv: int, value_bias: bool) -> Self:
        """Describe what is to replace the values and outputs of a module, dv channels wide.

        Args:
            site: the module, as `architectures` finds it.
            dv: channels of all heads of values together; they differ by one where it cannot be divided evenly.
            value_bias: whether values have a bias.
        """
        heads = site.key_value_heads
        sizes = tuple(dv // heads + (head < dv % heads) for head in range(heads))
        return cls(
            heads=site.heads, head_width=site.head_width, value=site.family.value, output=site.family.output,
            sizes=sizes, value_bias=value_bias, fixed_heads=site.family.fixed_heads, group=site.heads // heads,
            interleaved=site.family.interleaved, pieces=site.family.pieces, even=site.family.even,
        )  # fmt: skip

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "group", self.group > 0 and self.heads % self.group == 0, f"a divisor of the {self.heads} heads"
        yield "sizes", len(self.sizes) * self.group == self.heads, "one number for each head of values"
        yield "sizes", max(self.sizes) <= self.head_width, f"at most {self.head_width} for a head"

    @property
    def layout(self) -> Layout:
        """How a fused layer of the stock module is laid out."""
        return Layout(self.heads, self.head_width, self.interleaved, self.even)

    # How wide values are.

    @property
    def padded(self) -> tuple[str, ...]:
        """Values."""
        return (self.value,)

    @property
    def dv(self) -> int:
        """Channels of all heads of values together."""
        return sum(self.sizes)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Channels that each head hands to the output projection."""
        return tuple(size for size in self.sizes for _ in range(self.group))

    @property
    def dense_key_width(self) -> int:
        """How wide keys, and values, of all heads are in the dense model."""
        return self.heads // self.group * self.head_width

    @property
    def value_width(self) -> int:
        """How many channels values fill, zeros that make whole heads of them included."""
        return self.dv + padding_of(self.dv, self.multiple)

    @property
    def multiple(self) -> int:
        """What the width of values is padded to a multiple of, for the module to view as heads."""
        return self.dense_key_width if self.fixed_heads else self.head_width

    # Parameters: made, filled, put into a module, read.

    def build(self, module: Any, parent: Any) -> ValueParts:
        """Make uninitialised parameters; arguments as for `MapForm.build`.

        Raises:
            CompressionError: the output projection is no plain `nn.Linear` or `Conv1D`.
        """
        dense, width_in = dense_projection(module, self.value)
        like: dict[str, Any] = {"device": dense.device, "dtype": dense.dtype}
        value = PaddedProjection(width_in, self.dv, self.multiple, bias=self.value_bias, **like)
        value.requires_grad_(dense.requires_grad)
        output = self.output_of(module, parent)
        shape = list(output.weight.shape)
        shape[output_dim(output)] = self.dv * self.group
        weight = nn.Parameter(output.weight.new_empty(shape), output.weight.requires_grad)
        bias = output.bias
        own = None if bias is None else nn.Parameter(torch.empty_like(bias), bias.requires_grad)
        return ValueParts(value, output, weight, own)

    def output_of(self, module: Any, parent: Any) -> nn.Linear | Conv1D:
        """Return the output projection, also if heads are mixed before it.

        Raises:
            CompressionError: it is no plain `nn.Linear` or `Conv1D`.
        """
        path = self.output
        output = attrgetter(path[2:])(parent) if path.startswith("..") else attrgetter(path)(module)
        output = getattr(output, "proj", output)
        if type(output) not in (nn.Linear, Conv1D):
            raise CompressionError(
                f"{path}: got {type(output).__name__}, expected a plain nn.Linear; merge adapters first"
            )
        found: nn.Linear | Conv1D = output
        return found

    def load_(
        self, parts: ValueParts, value: Tensor, value_bias: Tensor | None, output: Tensor, bias: Tensor | None
    ) -> None:
        """Copy Wv·P (D, dv), its bias (dv,), O (dv·group, D) and its bias (D,) into `parts`, in place."""
        with torch.no_grad():
            parts.value.proj.weight.copy_(value.T)
            parts.weight.copy_(output.T if output_dim(parts.output) else output)
            for own, new in ((parts.value.proj.bias, value_bias), (parts.bias, bias)):
                if own is not None and new is not None:
                    own.copy_(new)

    def put_in_(self, module: Any, parts: ValueParts) -> None:
        """Replace the values of `module`, and what its output projection holds, in place."""
        replace_(module, {self.value: parts.value}, self.layout)
        fill_(parts.output, parts.weight, parts.bias)
        join_(module, self.dv)

    def take_out_(self, module: Any, dense: DenseValues) -> None:
        """Restore dense values and the output projection in place; as `MapForm.take_out_`."""
        put_back_(module, {self.value: dense.value}, self.layout)
        fill_(dense.output, dense.weight, dense.bias)
        join_(module, self.heads * self.head_width)

    def finish_(self, module: Any) -> None:
        """Do nothing: all there is, is in the checkpoint."""

    def read(self, name: str, module: Any, output: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Read Wv·P (D, dv), its bias (dv,) or None, and O (dv·group, D), from the module called `name`.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        proj = module.get_submodule(self.value).proj
        value = plain_weight(f"{name}.{self.value}.proj", proj)
        weight = plain_weight(f"the output projection of {name}", output)
        bias = None if proj.bias is None else proj.bias.detach()
        return value.T, bias, weight.T if output_dim(output) else weight

    def widened(self, channels: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Fill each head up with zeros to its dense width d: the channels of all, `sizes` wide, along a dimension."""
        heads = channels.split(list(sizes), dim)
        after = channels.dim() - 1 - dim % channels.dim()
        filled = [pad(head, (0, 0) * after + (0, self.head_width - head.shape[dim])) for head in heads]
        return torch.cat(filled, dim)

    def trained(self, module: Any, output: Any) -> list[nn.Parameter]:
        """List the parameters of the map, for training to bring what it adds nearer to what a dense one does."""
        proj = module.get_submodule(self.value).proj
        return [each for each in (proj.weight, proj.bias, output.weight, output.bias) if each is not None]

    # Attention.

    def unpack(self, value: Tensor) -> Tensor:
        """Split values into heads; heads with fewer channels are padded with zeros.

        Args:
            value: as the module lays out what its projection returns, (B, ⌈dv/d⌉, S, d).

        Returns:
            (B, H, S, s), s being the most channels that a head has; Hkv heads where queries are grouped.
        """
        joined = value.transpose(1, 2).flatten(2)[..., : self.dv]  # (B, S, dv)
        most = max(self.sizes)
        if min(self.sizes) == most:
            return joined.reshape(*joined.shape[:2], len(self.sizes), most).transpose(1, 2)
        parts = [pad(part, (0, most - part.shape[-1])) for part in joined.split(list(self.sizes), -1)]
        return torch.stack(parts, 1)

    def pack(self, outputs: Tensor) -> Tensor:
        """Remove the padding of `unpack`, (B, T, H, s) to (B, T, 1, dv·group)."""
        if min(self.sizes) == max(self.sizes):
            return outputs
        parts = [outputs[..., head, :size] for head, size in enumerate(self.output_sizes)]
        return torch.cat(parts, -1).unsqueeze(-2)

    # Heads.

    def head_rows(self) -> list[HeadRows]:
        """A head owns its channels of the values, unless it shares them; outputs are no rows."""
        if self.group > 1:
            return []
        names = ("weight", "bias") if self.value_bias else ("weight",)
        return [HeadRows.of(f"{self.value}.proj.{name}", self.sizes) for name in names]

    def without(self, kept: Sequence[int]) -> Self:
        """Keep the channels of the given heads; heads share no channels."""
        return replace(self, heads=len(kept), sizes=tuple(self.sizes[head] for head in kept))

    def keep_heads(self, module: Any, output: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` and its output projection with these heads only, in ascending order."""
        smaller = self.without(kept)
        stretches = [range(start, stop) for start, stop in pairwise(accumulate(self.sizes, initial=0))]
        left = [channel for head in kept for channel in stretches[head]]
        dim = output_dim(output)
        return [
            Cut(module, self.at, smaller),
            *self.row_cuts(module, kept),
            Cut(module.get_submodule(self.value), "padding", padding_of(smaller.dv, smaller.multiple)),
            Cut(output, "weight", remaining(output.weight, dim, left)),
            Cut(output, "in_features" if dim else "nx", len(left)),
            *([Cut(module, JOINT_WIDTH, smaller.dv)] if hasattr(module, JOINT_WIDTH) else []),
        ]

    # Costs: D input and output width, T tokens.

    def parameters(self, width: int) -> int:
        """D·dv for values, as much for the outputs of each head that shares them, and dv for the values' bias."""
        return ((1 + self.group) * width + self.value_bias) * self.dv

    def macs(self, width: int, length: int) -> int:
        """T·D·dv for values; T²·dv and T·D·dv for each head that shares them."""
        return (length * width + self.group * (length**2 + length * width)) * self.dv


def join_(module: Any, width: int) -> None:
    """Set the total width of the heads' outputs on a module that reshapes by it, in place."""
    if hasattr(module, JOINT_WIDTH):
        setattr(module, JOINT_WIDTH, width)


def output_dim(output: nn.Linear | Conv1D) -> int:
    """Return the input dimension of an output projection's weight: 0 in a transposed layer (Conv1D), else 1."""
    return 0 if isinstance(output, Conv1D) else 1


def fill_(output: Any, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Replace the parameters of an output projection, or another plain layer, in place; a bias of None stays."""
    output.weight = weight
    if bias is not None:
        output.bias = bias
    setattr(output, "in_features" if output_dim(output) else "nx", weight.shape[output_dim(output)])
