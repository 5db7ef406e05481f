"""Mixing the heads' outputs just before the output projection, and the model edit that rebuilds it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.attention.stored import refusing_other_models, stored_modules
from collab_compress.checkpoint import (
    edits_of,
    forget_edits_,
    forget_standalone_,
    is_quantized,
    path_in_base,
    record_edit_,
)
from collab_compress.errors import CheckpointError, HeadError
from collab_compress.heads.sharding import refuse_sharded


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
        """Rebuild the edit from what `to_dict` returned.

        Raises:
            CheckpointError: a number of heads is none.
        """
        modules = stored_modules(data)
        for name, heads in modules.items():
            if type(heads) is not int or heads < 1:
                raise CheckpointError(f"the stored edit of {name} is {heads!r:.80}; expected its number of heads")
        return cls(modules)

    def apply_(self, model: PreTrainedModel) -> None:
        """Install identity mixing before the output projections of `model`, in place."""
        with refusing_other_models(self.kind, model):
            for name, heads in self.modules.items():
                install_alphas_(model.base_model, name, heads)

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: loading weights restores all there is."""


def install_alphas_(model: nn.Module, name: str, heads: int) -> None:
    """Install mixing before the output projection at `name`, in place, unless it has it already."""
    projection = model.get_submodule(name)
    if not isinstance(projection, MixedProjection):
        mixed = MixedProjection(projection, heads)  # type: ignore[arg-type]
        model.set_submodule(name, mixed.train(projection.training))


@torch.inference_mode(False)
def mix_heads_(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> None:
    """Add head mixing to every attention module, in place, in all modules or none.

    Just before the output projection head i becomes Z'_i = Σ_j α_ij Z_j. α (H, H) starts as the identity, so the
    model computes the same until α is trained. Implements Multi-Head Mixing of "Multi-Head Rotation – a Multi-Head
    Attention Utilisation Using Parameters Rotation and Linear Mixing".

    Args:
        model: stock or collaborative. A module that serves several layers (ALBERT) has one α for all of them.
        kinds: which kinds of attention.

    Raises:
        UnsupportedModelError: the model's family is not known, or a module lies outside the base model.
        HeadError: heads are mixed already; the model is quantized, offloaded or sharded; an output projection is no
            plain `nn.Linear`, or shares its weight with another; heads differ in the width of their values.
    """
    model = transformers_model(model)
    refuse_sharded(model, "mix_heads_")
    if any(isinstance(module, MixedProjection) for module in model.modules()):
        raise HeadError(
            f"{type(model).__name__} mixes its heads already; merge_alphas_(model) first, or train the alphas it has"
        )
    if is_quantized(model):
        raise HeadError(f"{type(model).__name__} is quantized; mix the heads of the unquantized checkpoint instead")
    sites = find_attention(model, FAMILIES, kinds=kinds)
    outputs = [_plain_output(site) for site in sites]
    if len({id(output.weight) for output in outputs}) < len(outputs):
        raise HeadError(
            f"{type(model).__name__}: output projections share weights, which only one α can mix; untie them"
        )
    planned = {path_in_base(model, output): site.heads for site, output in zip(sites, outputs, strict=True)}
    for path, heads in planned.items():
        install_alphas_(model.base_model, path, heads)
    record_edit_(model, AlphasEdit(planned))


def alphas_of(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> dict[str, nn.Parameter]:
    """Return the mixing coefficients α of every attention module whose heads are mixed.

    Args:
        model: of a known family.
        kinds: which kinds of attention.

    Returns:
        Module path → α (H, H), the parameter itself: α[i, j] is the share of head j in what leaves as head i. Empty
        where no heads are mixed.

    Raises:
        UnsupportedModelError: the model's family is not known.
    """
    return {name: projection.alphas for name, projection in mixed_projections(model, kinds).items()}


def mixed_projections(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> dict[str, MixedProjection]:
    """Return the mixing output projection of each attention module: path → projection, as in `alphas_of`."""
    return {site.name: projection for site, projection in _mixed(model) if site.kind in kinds}


@torch.inference_mode(False)
def merge_alphas_(model: PreTrainedModel) -> None:
    """Fold the mixing of heads into the output projections, in place and all or nothing.

    Wo'_j = Σ_i α_ij Wo_i is exact, computed in float64 and rounded to the model's own dtype; biases stay. Without
    other edits the model is a stock one afterwards and saves as such.

    Args:
        model: one whose heads are mixed.

    Raises:
        HeadError: no heads are mixed, something wraps an output projection, or the model is sharded.
    """
    model = transformers_model(model)
    refuse_sharded(model, "merge_alphas_")
    mixed = _mixed(model)
    if not mixed:
        raise HeadError(f"{type(model).__name__} has no alphas to merge; mix_heads_(model) adds them")
    weights = [_folded(_plain(f"{site.path(site.family.output)}.proj", m.proj), m.alphas) for site, m in mixed]
    for (site, module), weight in zip(mixed, weights, strict=True):
        with torch.no_grad():
            _matrix(module.proj).copy_(weight)
        model.set_submodule(site.path(site.family.output), module.proj)
    forget_edits_(model, AlphasEdit.kind)
    if not edits_of(model):
        forget_standalone_(model)


def _mixed(model: PreTrainedModel) -> list[tuple[AttentionSite, MixedProjection]]:
    """List the attention modules whose heads are mixed, with what mixes them."""
    model = transformers_model(model)
    edits_of(model)  # refuses a model whose modules are not this package's
    found = ((site, site.part(site.family.output)) for site in find_attention(model, FAMILIES))
    return [(site, part) for site, part in found if isinstance(part, MixedProjection)]


def _matrix(projection: nn.Linear | Conv1D) -> Tensor:
    """View the weight of an output projection in the layout of `nn.Linear`, (D, H·d)."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def _folded(projection: nn.Linear | Conv1D, alphas: Tensor) -> Tensor:
    """Weight of an output projection that mixes heads by itself, (D, H·d), in float64."""
    heads = _matrix(projection).detach().double().unflatten(1, (len(alphas), -1))  # (D, H, d)
    return torch.einsum("ij,xic->xjc", alphas.detach().double(), heads).flatten(1)


def _plain_output(site: AttentionSite) -> nn.Linear | Conv1D:
    form = getattr(site.module, "value_form", None)
    if form is not None and len(set(form.sizes)) > 1:
        raise HeadError(
            f"{site.name}: its heads have {min(form.sizes)} to {max(form.sizes)} channels of values, and only heads "
            f"of one width can be mixed; pass a dv that {site.heads} divides, or expand the model first"
        )
    return _plain(site.path(site.family.output), site.part(site.family.output))


def _plain(path: str, projection: Any) -> nn.Linear | Conv1D:
    """Check that an output projection can be mixed with, or folded into.

    Raises:
        HeadError: it cannot.
    """
    if type(projection) not in (nn.Linear, Conv1D) or not projection.weight.is_floating_point():
        kind = type(projection)
        raise HeadError(
            f"{path}: got {kind.__module__}.{kind.__qualname__}, expected a plain torch.nn.Linear of floats; merge "
            "adapters and undo quantization first"
        )
    if projection.weight.is_meta:
        raise HeadError(f"{path} is offloaded; load the model into memory")
    return projection
