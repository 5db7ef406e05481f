"""Attention modules that still have their per-head query and key projections: what a conversion starts from."""

from dataclasses import dataclass

from torch import Tensor, nn

from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.sites import AttentionSite, find_attention, read
from collab_compress.errors import UnsupportedModelError


@dataclass(frozen=True)
class DenseSite(AttentionSite):
    """A dense attention module.

    Args:
        query: projection of queries, weight (H·d, D), storage layout of `nn.Linear`.
        key: projection of keys, weight (H·d, D).
    """

    query: nn.Linear
    key: nn.Linear

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
    model: nn.Module, families: dict[str, AttentionFamily], modules: str = "*"
) -> list[DenseSite]:
    """List every attention module of `model` that can be converted; as `find_attention`, and checks the projections.

    Raises:
        UnsupportedModelError: as `find_attention`; a query or key projection is no plain `nn.Linear`, is quantized,
            or is not H·d wide.
    """
    return [_dense(site) for site in find_attention(model, families, modules)]


def _dense(site: AttentionSite) -> DenseSite:
    family, paths = site.family, (site.family.query, site.family.key)
    query, key = (read(site.name, site.module, family, path, nn.Linear) for path in paths)
    for path, projection in zip(paths, (query, key), strict=True):
        if projection.out_features != site.width:
            raise UnsupportedModelError(
                f"{site.name}.{path}: got {projection.out_features} output channels; expected {site.heads} heads × "
                f"{site.head_width} = {site.width}; the {family.name} description does not fit this model"
            )
    if not (query.weight.is_floating_point() and key.weight.is_floating_point()):
        raise UnsupportedModelError(f"{site.name}: weights are {query.weight.dtype}; convert before quantizing")
    return DenseSite(**vars(site), query=query, key=key)
