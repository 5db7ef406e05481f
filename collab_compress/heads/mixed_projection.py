"""Mixing the heads' outputs just before the output projection, and the model edit that rebuilds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class MixedProjection(nn.Module):
    """An output projection that mixes the heads first: Z'_i = Σ_j α_ij Z_j, then Z' ↦ Z'·Wo + bo.

    Multi-Head Mixing of "Multi-Head Rotation – a Multi-Head Attention Utilisation Using Parameters Rotation and
    Linear Mixing". The heads are mixed, not the weights of `proj`, so that whatever wraps or watches it (adapters,
    offloading, hooks) goes on working.

    Args:
        proj: the output projection, H·d → D. Its device and dtype are those of α.
        heads: number of heads H.
    """

    frozen = False
    """Whether α gets a gradient of zeros: it stays in the graph, for distributed training to see it at each step."""

    def __init__(self, proj: nn.Linear, heads: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": proj.weight.device, "dtype": proj.weight.dtype}
        self.heads = heads
        self.proj = proj
        self.alphas = nn.Parameter(torch.eye(heads, **like))

    @property
    def weight(self) -> Tensor:
        """Weight of the projection by itself, which stock models look for when they initialise."""
        return self.proj.weight

    def forward(self, x: Tensor) -> Tensor:
        """Mix and project concatenated head outputs (..., H·d) to (..., D)."""
        z = x.reshape(-1, self.heads, x.shape[-1] // self.heads)  # (N, H, d)
        alphas = self.alphas.detach() + 0 * self.alphas if self.frozen else self.alphas
        # A batched product over tokens: einsum and broadcasting matmul copy their operands, at twice the cost.
        mixed = torch.bmm(alphas.to(x.dtype).expand(z.shape[0], -1, -1), z)
        projected: Tensor = self.proj(mixed.reshape(x.shape))
        return projected


@dataclass(frozen=True)
class AlphasEdit:
    """Output projections that mix heads.

    Args:
        modules: path of each output projection inside the base model (so that the checkpoint loads with and without
            a head) → number of heads H.
    """

    modules: dict[str, int]
    kind: ClassVar[str] = "alphas"
    implementations: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": dict(self.modules)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlphasEdit":
        """Rebuild the edit from what `to_dict` gave."""
        return cls(dict(data["modules"]))

    def apply_(self, model: PreTrainedModel) -> None:
        """Let output projections of `model` mix their heads by the identity, in place."""
        for name, heads in self.modules.items():
            install_alphas_(model.base_model, name, heads)

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: loading weights restores all there is."""


def install_alphas_(model: nn.Module, name: str, heads: int) -> None:
    """Let the output projection at `name` mix its heads, in place; one that does already is left as it is."""
    projection = model.get_submodule(name)
    if not isinstance(projection, MixedProjection):
        mixed = MixedProjection(projection, heads)  # type: ignore[arg-type]
        model.set_submodule(name, mixed.train(projection.training))
