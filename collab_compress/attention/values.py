"""Values of fewer channels a head, and the output projection that reads them: the narrow OV circuit.

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

from collab_compress.architectures import refuse_hooks
from collab_compress.architectures.sites import by_input
from collab_compress.attention.maps import ConvertedMap, Cut, HeadRows, Layers, MapConfig, Part, kept_rows
from collab_compress.attention.projections import (
    Weights,
    copied,
    family_of,
    input_dim,
    plain_rows,
    plain_weight,
    projection_like,
    rows_of,
)
from collab_compress.attention.shared import channels_of
from collab_compress.errors import CompressionError
from collab_compress.factorization import Narrowing, narrow_values

JOINT_WIDTH = "all_head_size"  # attribute of some modules: width of all head outputs, H·d or dv


@dataclass(frozen=True)
class NarrowConfig(MapConfig):
    """The config of `NarrowOV`: heads of values have s channels, and the output projection reads dv in all.

    Args:
        size: channels s of each head of values.
        value_bias: whether values have a bias.
        group: number of heads that share one head of values.

    Example:
        >>> from collab_compress.architectures import find_dense_values
        >>> config = NarrowConfig.of(find_dense_values(model)[0], dv=12, value_bias=True)
        >>> config.size, config.dv, config.parameters((24, 24)), config.macs((24, 24), length=10)
        (4, 12, 588, 6960)
    """

    size: int
    value_bias: bool
    group: int = 1

    kind: ClassVar[str] = "narrow-values"
    title: ClassVar[str] = "narrow values"

    @classmethod
    def of(cls, site: Any, dv: int, value_bias: bool) -> Self:
        """Return the config of what replaces the values and outputs of a module."""
        heads = site.key_value_heads
        cross = site.kind == "cross"
        return cls(site.heads, site.head_width, max(1, dv // heads), value_bias, site.heads // heads, cross=cross)

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapConfig.rules`."""
        yield from super().rules()
        yield "group", self.group > 0 and self.heads % self.group == 0, f"a divisor of the {self.heads} heads"
        yield "size", 0 < self.size <= self.head_width, f"1 to {self.head_width}"

    @property
    def dv(self) -> int:
        """Channels of all heads of values together."""
        return self.key_value_heads * self.size

    @property
    def key_value_heads(self) -> int:
        """Number of heads of values."""
        return self.heads // self.group

    def without(self, kept: Sequence[int]) -> Self:
        """Return the config of the kept heads, which share no channels."""
        return replace(self, heads=len(kept))

    # Costs: Dv input width of values, Do output width, T tokens.

    def parameters(self, widths: tuple[int, int]) -> int:
        """Dv·dv for values, Do·dv for the outputs of each head that shares them, and dv for the values' bias."""
        return (widths[0] + self.group * widths[1] + self.value_bias) * self.dv

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·Dv·dv for values; T²·dv and T·Do·dv for each head that shares them."""
        return (length * widths[0] + self.group * (length**2 + length * widths[1])) * self.dv


class NarrowOV(ConvertedMap):
    """Heads with fewer value channels than the dense ones; it has no parameters but its projections."""

    at: ClassVar[str] = "ov"

    def __init__(self, config: NarrowConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def build(cls, config: NarrowConfig, module: Any, parent: Any) -> tuple["NarrowOV", Layers]:
        """Return an uninitialised map and its projections, as `ConvertedMap.build`."""
        family = family_of(module)
        dense, in_features = projection_like(module, family.paths.value)
        value = nn.Linear(in_features, config.dv, config.value_bias, device=dense.device, dtype=dense.dtype)
        output = output_of(module, parent)
        weight, bias = output.weight, output.bias
        shape = list(weight.shape)
        shape[input_dim(output)] = config.dv * config.group
        new = Weights(
            nn.Parameter(weight.new_empty(shape), weight.requires_grad),
            None if bias is None else nn.Parameter(torch.empty_like(bias), bias.requires_grad),
        )
        return cls(config), {family.paths.value: value.requires_grad_(dense.requires_grad), family.paths.output: new}

    @classmethod
    def from_dense(
        cls, site: Any, config: NarrowConfig, moments: Any, head_weights: Tensor | None, solver: Any
    ) -> tuple["NarrowOV", Layers, Narrowing]:
        """Narrow the values of a dense module, as `ConvertedMap.from_dense`; head weights do not matter."""
        result = narrow_values(
            site.value_heads(),
            site.output_heads(),
            config.size,
            moments[0] if moments else None,
            fold=site.output.bias is not None,
            damping=solver.damping,
            device=solver.device,
        )
        like = result.output
        values = [weight.to(like) @ kept for weight, kept in zip(site.value_heads(), result.heads, strict=True)]
        ov, layers = cls.build(config, site.module, site.parent)
        value, output = layers.values()
        dtype = value.weight.dtype  # before they move: not every device has float64
        new_output = result.output.T if input_dim(site.output) else result.output
        with torch.no_grad():
            value.weight.copy_(torch.cat(values, 1).T.to(dtype))
            output.weight.copy_(new_output.to(dtype))
            if (biases := site.value_bias()) is not None and value.bias is not None:
                joined = [bias.to(like) @ kept for bias, kept in zip(biases, result.heads, strict=True)]
                value.bias.copy_(torch.cat(joined).to(dtype))
            if output.bias is not None:
                lost = 0.0 if result.bias is None else result.bias
                output.bias.copy_((site.output.bias.to(like) + lost).to(dtype))
        return ov, layers, result

    def to_dense(self, site: Any, head_width: int | None) -> Layers:
        """Pad the channels of values and of the output projection with zeros, as `ConvertedMap.to_dense`."""
        output = output_of(site.module, site.parent)
        refuse_hooks(f"{site.name}: its output projection", output, stays=True)
        width = self.config.head_width if head_width is None else head_width
        value, bias = plain_rows(site.name, site.module, site.paths.value)
        plain_weight(f"the output projection of {site.name}", output)
        like, _ = projection_like(site.module, site.paths.value)
        dense_bias = self._widened(bias, width) if bias is not None and self.config.value_bias else None
        wide = self._widened(by_input(output).T, width)  # (D, H·d)
        wide = wide if input_dim(output) else wide.T.contiguous()
        return {
            site.paths.value: copied(self._widened(value.T, width).T, dense_bias, like),
            site.paths.output: Weights(nn.Parameter(wide, output.weight.requires_grad), output.bias),
        }

    def _widened(self, channels: Tensor, width: int) -> Tensor:
        """Pad the channels of heads, side by side along the last dimension, to a width each."""
        return pad(channels.unflatten(-1, (-1, self.config.size)), (0, width - self.config.size)).flatten(-2)

    def put_in_(self, module: Any) -> None:
        """Set the width of all head outputs."""
        if hasattr(module, JOINT_WIDTH):
            setattr(module, JOINT_WIDTH, self.config.dv * self.config.group)

    def take_out_(self, module: Any) -> None:
        """Restore the width of all head outputs."""
        if hasattr(module, JOINT_WIDTH):
            setattr(module, JOINT_WIDTH, self.config.heads * self.config.head_width)

    def heads(self, value: Tensor) -> Tensor:
        """Split values into heads."""
        joined = channels_of(value)[..., : self.config.dv]  # (B, S, dv)
        heads: Tensor = joined.unflatten(-1, (-1, self.config.size)).transpose(1, 2)
        return heads

    def head_rows(self, module: Any) -> list[HeadRows]:
        """List each head's channels of the values, if heads do not share them."""
        if self.config.group > 1:
            return []
        layer, start, _ = rows_of(module)[family_of(module).paths.value]
        names = ("weight", "bias") if self.config.value_bias else ("weight",)
        return [HeadRows(f"{layer}.{name}", start, self.config.size) for name in names]

    def kept_channels(self, part: Part, kept: Sequence[int]) -> list[int]:
        """Return the value channels of the kept heads."""
        return kept_rows(kept, self.config.size)

    def cuts(self, kept: Sequence[int]) -> list[Cut]:
        """Return the cut of the config."""
        return [Cut(self, "config", self.config.without(kept))]


NarrowConfig.module = NarrowOV


def output_of(module: Any, parent: Any) -> nn.Linear | Conv1D:
    """Return the output projection of an attention module, also if heads are mixed before it."""
    path = family_of(module).paths.output
    output: nn.Linear | Conv1D = attrgetter(path.removeprefix(".."))(parent if path.startswith("..") else module)
    output = getattr(output, "proj", output)
    if type(output) not in (nn.Linear, Conv1D):
        raise CompressionError(
            f"{path}: got {type(output).__name__}, expected a plain nn.Linear; merge adapters first"
        )
    return output
