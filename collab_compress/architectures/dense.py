"""Attention modules that still have their per-head query and key projections: what a conversion starts from."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.fused import FusedSlice
from collab_compress.architectures.sites import KINDS, AttentionSite, Kind, find_attention, read
from collab_compress.errors import UnsupportedModelError


@dataclass(frozen=True)
class DenseSite(AttentionSite):
    """A dense attention module.

    Args:
        query: projection of queries, weight (H·d, D), storage layout of `nn.Linear`; the part that is it where the
            model keeps several in one layer.
        key: projection of keys, weight (H·d, D).
    """

    query: nn.Linear | FusedSlice
    key: nn.Linear | FusedSlice

    def query_heads(self) -> Tensor:
        """Wq of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.query.weight, self.heads)

    def key_heads(self) -> Tensor:
        """Wk of each head in mathematical layout, (H, D, d)."""
        return split_heads(self.key.weight, self.heads)

    def query_bias(self) -> Tensor | None:
        """Query bias of each head, (H, d), or None where the projection has none."""
        bias = self.query.bias
        return None if bias is None else bias.detach().reshape(self.heads, self.head_width)


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """Turn an `nn.Linear` weight (H·d, D) into per-head matrices (H, D, d)."""
    return weight.detach().view(heads, -1, weight.shape[1]).transpose(1, 2)


def find_dense_attention(
    model: nn.Module,
    families: dict[str, AttentionFamily],
    modules: str = "*",
    kinds: Collection[Kind] = KINDS,
) -> list[DenseSite]:
    """List every attention module of `model` that can be converted; as `find_attention`, and checks the projections.

    Raises:
        UnsupportedModelError: as `find_attention`; a query or key projection is no plain `nn.Linear`, is quantized,
            or is not H·d wide; the family's description leaves this kind of attention out.
    """
    return [_dense(site) for site in find_attention(model, families, modules, kinds)]


def _dense(site: AttentionSite) -> DenseSite:
    if site.kind in site.family.undescribed:
        raise UnsupportedModelError(
            f"{site.name}: {site.kind} attention of {site.family.name} cannot be converted, because "
            f"{site.family.undescribed[site.kind]}; leave it out with a pattern of module paths, or by kinds"
        )
    family, paths = site.family, (site.family.query, site.family.key)
    query, key = (read(site.name, site.module, family, path, nn.Linear) for path in paths)
    for path, projection in zip(paths, (query, key), strict=True):
        if projection.out_features != site.width:
            raise UnsupportedModelError(
                f"{site.name}.{path}: got {projection.out_features} output channels; expected {site.heads} heads × "
                f"{site.head_width} = {site.width}; the {family.name} description does not fit this model"
            )
    for path, weight in zip(paths, (query.weight, key.weight), strict=True):
        if not weight.is_floating_point() or type(weight) not in (Tensor, nn.Parameter):
            kind = f"{type(weight).__module__}.{type(weight).__qualname__} of {weight.dtype}"
            raise UnsupportedModelError(f"{site.name}.{path}: weights are {kind}; convert before quantizing")
    return DenseSite(**vars(site), query=query, key=key)
