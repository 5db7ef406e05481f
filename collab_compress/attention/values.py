"""Values of fewer channels a head, and the output projection that reads them: the narrow form of the value map.

    layer(x) = Σ_i A_i (x Wv_i P_i) O_i

where A_i are the attention probabilities of head i, P_i (d, s) keeps s of its d channels, and O_i (s, D) is their
part of the output projection. The dv channels of all heads lie side by side. With grouped queries the heads of
a group share Wv and P, and each has its own O.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.form import Cut, MapForm, padding_of, plain_weight, remaining
from collab_compress.attention.projections import PaddedProjection, dense_projection, replace_
from collab_compress.errors import CompressionError

JOINT_WIDTH = "all_head_size"  # attribute of some modules: width of all head outputs, H·d or dv


@dataclass(frozen=True)
class ValueParts:
    """The parameters of a module's values, narrow ones to be installed or dense ones to be restored.

    Args:
        value: the value projection; of a fused layer, an object that holds the layer as `layer`.
        output: the output projection, which stays in the module and gets the weight and the bias.
        weight: (D, dv·group), or (dv·group, D) in a transposed layer.
        bias: (D,), or None.
    """

    value: Any
    output: nn.Linear | Conv1D
    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass(frozen=True)
class NarrowValues(MapForm):
    """The narrow form: each head has fewer than d value channels, and the output projection reads dv in all.

    Args:
        value: attribute path of the value projection in the attention module.
        output: attribute path of the output projection; a leading `..` starts at the module's parent.
        size: channels of each head of values.
        value_bias: whether values have a bias.
        group: number of heads that share one head of values.

    Example:
        >>> from collab_compress.architectures import find_dense_values
        >>> form = NarrowValues.of(find_dense_values(model)[0], dv=12, value_bias=True)
        >>> form.size, form.dv, form.parameters((24, 24)), form.macs((24, 24), length=10)
        (4, 12, 588, 6960)
    """

    value: str
    output: str
    size: int
    value_bias: bool
    group: int = 1

    at: ClassVar[str] = "value_form"
    kind: ClassVar[str] = "narrow-values"
    title: ClassVar[str] = "narrow values"

    @classmethod
    def of(cls, site: Any, dv: int, value_bias: bool) -> Self:
        """Return the form that replaces the values and outputs of a module.

        Args:
            site: the module, as `architectures` finds it.
            dv: channels of all heads of values together, rounded down to a multiple of them, but to one at least.
            value_bias: whether values have a bias.
        """
        heads = site.key_value_heads
        return cls.for_site(
            site,
            value=site.paths.value,
            output=site.paths.output,
            size=max(1, dv // heads),
            value_bias=value_bias,
            group=site.heads // heads,
        )

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "group", self.group > 0 and self.heads % self.group == 0, f"a divisor of the {self.heads} heads"
        yield "size", 0 < self.size <= self.head_width, f"1 to {self.head_width}"

    # Widths of values.

    @property
    def dense_widths(self) -> dict[str, int]:
        """Path of the value projection → its width in the dense model."""
        return {self.value: self.dense_key_width}

    @property
    def dv(self) -> int:
        """Channels of all heads of values together."""
        return self.value_heads * self.size

    @property
    def value_heads(self) -> int:
        """Number of heads of values."""
        return self.heads // self.group

    @property
    def dense_key_width(self) -> int:
        """Width of the dense keys, and values, of all heads."""
        return self.value_heads * self.head_width

    @property
    def value_width(self) -> int:
        """Channels of the values, with padding."""
        return self.dv + padding_of(self.dv, self.multiple)

    # Parameters: built, filled, installed, read.

    def build(self, module: Any, parent: Any) -> ValueParts:
        """Return uninitialised parameters, as `MapForm.build`.

        Raises:
            CompressionError: the output projection is no plain `nn.Linear` or `Conv1D`.
        """
        dense, in_features = dense_projection(module, self.value)
        value = PaddedProjection(
            in_features, self.dv, self.multiple, self.value_bias, device=dense.device, dtype=dense.dtype
        )
        output = self.output_of(module, parent)
        shape = list(output.weight.shape)
        shape[output_dim(output)] = self.dv * self.group
        weight, bias = output.weight, output.bias
        return ValueParts(
            value.requires_grad_(dense.requires_grad),
            output,
            nn.Parameter(weight.new_empty(shape), weight.requires_grad),
            None if bias is None else nn.Parameter(torch.empty_like(bias), bias.requires_grad),
        )

    def output_of(self, module: Any, parent: Any) -> nn.Linear | Conv1D:
        """Return the output projection, also if heads are mixed before it.

        Raises:
            CompressionError: it is no plain `nn.Linear` or `Conv1D`.
        """
        is_outside = self.output.startswith("..")
        output: nn.Linear | Conv1D = attrgetter(self.output.removeprefix(".."))(parent if is_outside else module)
        output = getattr(output, "proj", output)
        if type(output) not in (nn.Linear, Conv1D):
            raise CompressionError(
                f"{self.output}: got {type(output).__name__}, expected a plain nn.Linear; merge adapters first"
            )
        return output

    def load_(
        self, parts: ValueParts, value: Tensor, value_bias: Tensor | None, output: Tensor, bias: Tensor | None
    ) -> None:
        """Copy Wv·P (D, dv), its bias (dv,), O (dv·group, D) and its bias (D,) into `parts`, in place."""
        with torch.no_grad():
            parts.value.proj.weight.copy_(value.T)
            parts.weight.copy_(output.T if output_dim(parts.output) else output)
            for target, source in ((parts.value.proj.bias, value_bias), (parts.bias, bias)):
                if target is not None and source is not None:
                    target.copy_(source)

    def put_in_(self, module: Any, parts: ValueParts) -> None:
        """Replace the values of `module` and the parameters of its output projection, in place."""
        replace_(module, {self.value: parts.value}, self.layout)
        fill_(parts.output, parts.weight, parts.bias)
        if hasattr(module, JOINT_WIDTH):
            setattr(module, JOINT_WIDTH, self.dv)

    def take_out_(self, module: Any, dense: ValueParts) -> None:
        """Restore the dense values and output projection in place."""
        self.put_in_(module, dense)
        if hasattr(module, JOINT_WIDTH):
            setattr(module, JOINT_WIDTH, self.heads * self.head_width)

    def read(self, name: str, module: Any, output: nn.Linear | Conv1D) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return Wv·P (D, dv), its bias (dv,) or None, and O (dv·group, D), of the module called `name`.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        proj = module.get_submodule(self.value).proj
        value = plain_weight(f"{name}.{self.value}.proj", proj)
        weight = plain_weight(f"the output projection of {name}", output)
        bias = None if proj.bias is None else proj.bias.detach()
        return value.T, bias, weight.T if output_dim(output) else weight

    def widened(self, channels: Tensor) -> Tensor:
        """Pad the channels of heads, side by side along the last dimension, to the dense width d each."""
        return pad(channels.unflatten(-1, (-1, self.size)), (0, self.head_width - self.size)).flatten(-2)

    # Attention.

    def heads_of(self, value: Tensor) -> Tensor:
        """Split values into heads.

        Args:
            value: as the module lays out what its projection returns, (B, ⌈dv/d⌉, S, d).

        Returns:
            (B, H, S, s); Hkv heads where queries are grouped.
        """
        joined = value.transpose(1, 2).flatten(2)[..., : self.dv]  # (B, S, dv)
        return joined.reshape(*joined.shape[:2], self.value_heads, self.size).transpose(1, 2)

    # Heads.

    def head_rows(self) -> dict[str, int]:
        """Return each head's channels of the values, if heads do not share them."""
        names = ("weight", "bias") if self.value_bias else ("weight",)
        return {f"{self.value}.proj.{name}": self.size for name in names} if self.group == 1 else {}

    def without(self, kept: Sequence[int]) -> Self:
        """Return the form of the kept heads, which share no channels."""
        return replace(self, heads=len(kept))

    def keep_heads(self, module: Any, output: nn.Linear | Conv1D, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of `module` and its output projection that leave the kept heads, in ascending order."""
        smaller, dim = self.without(kept), output_dim(output)
        channels = [channel for head in kept for channel in range(head * self.size, (head + 1) * self.size)]
        cuts = [
            Cut(module, self.at, smaller),
            *self.row_cuts(module, kept),
            Cut(module.get_submodule(self.value), "padding", padding_of(smaller.dv, smaller.multiple)),
            Cut(output, "weight", remaining(output.weight, dim, channels)),
            Cut(output, "in_features" if dim else "nx", len(channels)),
        ]
        if hasattr(module, JOINT_WIDTH):
            cuts.append(Cut(module, JOINT_WIDTH, smaller.dv))
        return cuts

    # Costs: Dv input width of values, Do output width, T tokens.

    def parameters(self, widths: tuple[int, int]) -> int:
        """Dv·dv for values, Do·dv for the outputs of each head that shares them, and dv for the values' bias."""
        return (widths[0] + self.group * widths[1] + self.value_bias) * self.dv

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·Dv·dv for values; T²·dv and T·Do·dv for each head that shares them."""
        return (length * widths[0] + self.group * (length**2 + length * widths[1])) * self.dv


def output_dim(output: nn.Linear | Conv1D) -> int:
    """Return the input dimension of an output projection's weight: 0 in a transposed layer (Conv1D), else 1."""
    return 0 if isinstance(output, Conv1D) else 1


def fill_(output: nn.Linear | Conv1D, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Replace the parameters of a linear layer in place; its bias stays if the new one is None."""
    output.weight = weight
    if bias is not None:
        output.bias = bias
    setattr(output, "in_features" if output_dim(output) else "nx", weight.shape[output_dim(output)])
