"""Head mixing before the output projection ("alphas"), and the model edit that rebuilds it in a checkpoint."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.attention.edits import LARGEST, refusing_other_models, stored_modules
from collab_compress.attention.projections import Replacement, input_dim, plain_weight
from collab_compress.checkpoint import (
    all_or_nothing,
    edits_of,
    forget_edits_,
    is_quantized,
    path_in_base,
    record_edit_,
)
from collab_compress.errors import CheckpointError, HeadError
from collab_compress.heads.sharding import refuse_unwritable


class MixedProjection(Replacement):
    """An output projection H·d → D that mixes the heads first: Z'_i = Σ_j α_ij Z_j, then Z' ↦ Z'·Wo + bo.

    Multi-Head Mixing of "Multi-Head Rotation – a Multi-Head Attention Utilisation Using Parameters Rotation and
    Linear Mixing". The heads are mixed, not the weights of `proj`, so that adapters, offloading and hooks on it work.
    """

    frozen = False
    """Whether α is frozen but kept in the graph, with zero gradients, as distributed training needs."""

    def __init__(self, proj: nn.Linear, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.proj = proj
        self.alphas = nn.Parameter(torch.eye(heads, device=proj.weight.device, dtype=proj.weight.dtype))

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle with α that trains."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "frozen"}

    @property
    def weight(self) -> Tensor:
        """Weight of `proj`, which stock models read when they initialise."""
        return self.proj.weight

    def forward(self, x: Tensor) -> Tensor:
        """Mix and project concatenated head outputs (..., H·d) to (..., D)."""
        z = x.reshape(-1, self.heads, x.shape[-1] // self.heads)  # (N, H, d)
        alphas = self.alphas.detach() + 0 * self.alphas if self.frozen else self.alphas
        # bmm over tokens: einsum and broadcasting matmul copy their operands, at twice the cost.
        mixed = torch.bmm(alphas.to(x.dtype).expand(z.shape[0], -1, -1), z)
        projected: Tensor = self.proj(mixed.reshape(x.shape))
        return projected


@dataclass(frozen=True)
class AlphasEdit:
    """Output projections that mix heads."""

    modules: dict[str, int]  # path inside the base model → number of heads H
    kind: ClassVar[str] = "alphas"

    @property
    def heads(self) -> dict[str, int]:
        """Path of each output projection → the number of heads that its attention has."""
        return self.modules

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": dict(self.modules)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlphasEdit":
        """Rebuild the edit from the result of `to_dict`, or raise a CheckpointError."""
        modules = stored_modules(data)
        for name, heads in modules.items():
            if type(heads) is not int or not 1 <= heads < LARGEST:
                raise CheckpointError(f"the stored edit of {name} is {heads!r:.80}; expected its number of heads")
        return cls(modules)

    def apply_(self, model: PreTrainedModel) -> None:
        """Install identity mixing before the output projections that lack it, in place."""
        with refusing_other_models(self.kind, model):
            for name, heads in self.modules.items():
                projection: Any = model.base_model.get_submodule(name)
                if not isinstance(projection, MixedProjection):
                    mixed = MixedProjection(projection, heads)
                    model.base_model.set_submodule(name, mixed.train(projection.training))

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: loading weights restores everything."""


@torch.inference_mode(False)
def mix_heads_(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> None:
    """Add head mixing to every attention module, in place, in all modules or none ("Multi-Head Rotation").

    Just before the output projection head i becomes Z'_i = Σ_j α_ij Z_j. α (H, H) starts as the identity, so the
    model's output changes only once α is trained.

    Args:
        model: stock or collaborative. A module that serves several layers (ALBERT) has one α for all of them.

    Raises:
        UnsupportedModelError: the model's family is not known, or a module lies outside the base model.
        HeadError: heads are mixed already; the model is quantized, offloaded or sharded; an output projection is no
            plain `nn.Linear`, or shares its weight with another; heads differ in the width of their values.

    Example:
        >>> dense = model(**batch).last_hidden_state
        >>> mix_heads_(model)
        >>> torch.allclose(model(**batch).last_hidden_state, dense, atol=1e-5)
        True
        >>> alphas_of(model)["encoder.layer.0.attention.self"].shape
        torch.Size([3, 3])
    """
    model = transformers_model(model)
    refuse_unwritable(model, "mix_heads_")
    if any(isinstance(module, MixedProjection) for module in model.modules()):
        raise HeadError(
            f"{type(model).__name__} mixes its heads already; merge_alphas_(model) first, or train the alphas it has"
        )
    if is_quantized(model):
        raise HeadError(f"{type(model).__name__} is quantized; mix the heads of the unquantized checkpoint instead")
    sites = find_attention(model, kinds=kinds)
    output_weights(model, sites)
    heads_by_path = {path_in_base(model, site.part(site.paths.output)): site.heads for site in sites}
    edit = AlphasEdit(heads_by_path)
    with all_or_nothing(model):
        edit.apply_(model)
        record_edit_(model, edit)


def alphas_of(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> dict[str, nn.Parameter]:
    """Return the mixing coefficients α of every attention module whose heads are mixed.

    Returns:
        Module path → α (H, H), the parameter itself: α[i, j] is the weight of head j in the new head i. Empty where
        no heads are mixed.

    Example:
        >>> alphas_of(model)
        {}
        >>> mix_heads_(model)
        >>> alphas_of(model)["encoder.layer.0.attention.self"].detach()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    return {site.name: projection.alphas for site, projection in find_mixed_projections(model, kinds)}


def find_mixed_projections(
    model: PreTrainedModel, kinds: Collection[Kind] = KINDS
) -> list[tuple[AttentionSite, MixedProjection]]:
    """List the attention modules whose heads are mixed, each with its mixing output projection."""
    model = transformers_model(model)
    edits_of(model)  # refuses a model whose modules are not this package's
    sites = [site for site in find_attention(model, optional=True) if site.kind in kinds]
    projections = [(site, site.part(site.paths.output)) for site in sites]
    return [(site, projection) for site, projection in projections if isinstance(projection, MixedProjection)]


@torch.inference_mode(False)
def merge_alphas_(model: PreTrainedModel) -> None:
    """Fold the mixing of heads into the output projections, in place and all or nothing.

    Wo'_j = Σ_i α_ij Wo_i is exact, computed in float64 and rounded to the model's dtype; biases stay. A model
    without other edits becomes a stock model and saves as such.

    Args:
        model: one whose heads are mixed.

    Raises:
        HeadError: no heads are mixed, something wraps an output projection, or the model is sharded.

    Example:
        >>> mix_heads_(model)
        >>> with torch.no_grad():
        ...     alphas_of(model)["encoder.layer.0.attention.self"][0, 1] = 0.5
        >>> mixed = model(**batch).last_hidden_state
        >>> merge_alphas_(model)
        >>> alphas_of(model), torch.allclose(model(**batch).last_hidden_state, mixed, atol=1e-5)
        ({}, True)
    """
    model = transformers_model(model)
    refuse_unwritable(model, "merge_alphas_")
    mixed = {site.path(site.paths.output): projection for site, projection in find_mixed_projections(model)}
    if not mixed:
        raise HeadError(f"{type(model).__name__} has no alphas to merge; mix_heads_(model) adds them")
    merged: list[tuple[nn.Parameter, Tensor]] = []  # weights, and what replaces their data
    for path, module in mixed.items():
        weight, inputs = output_weight(f"{path}.proj", module.proj)
        heads = weight.detach().cpu().double().movedim(inputs, 0).unflatten(0, (module.heads, -1))  # (H, d, D)
        product = torch.einsum("ij,icx->jcx", module.alphas.detach().cpu().double(), heads).flatten(0, 1)
        merged.append((weight, product.movedim(0, inputs).to(weight).contiguous()))
    with all_or_nothing(model, [weight for weight, _ in merged]):
        for weight, product in merged:
            weight.data = product
        for path, module in mixed.items():
            model.set_submodule(path, module.proj)
        forget_edits_(model, AlphasEdit.kind)


def output_weight(path: str, projection: Any) -> tuple[nn.Parameter, int]:
    """Return the weight of a plain output projection and its dimension of H·d, or raise HeadError."""
    plain_weight(path, projection, HeadError)
    return projection.weight, input_dim(projection)


def output_weights(model: PreTrainedModel, sites: Sequence[AttentionSite]) -> list[tuple[nn.Parameter, int]]:
    """Return what reads each module's heads, α or an output weight, and its dimension of heads; shared ones raise."""
    weights = []
    for site in sites:
        projection = site.part(site.paths.output)
        mixed = isinstance(projection, MixedProjection)
        path = site.path(site.paths.output)
        weights.append((projection.alphas, 1) if mixed else output_weight(path, projection))
    if len({weight.data_ptr() for weight, _ in weights}) < len(weights):
        raise HeadError(f"{type(model).__name__}: output projections share weights; untie them to act on one alone")
    return weights
