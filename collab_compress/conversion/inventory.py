"""What of a model can be converted: attention maps, feed-forward blocks, layers, and why others cannot be."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import (
    AttentionSite,
    DenseSite,
    ValueSite,
    find_attention,
    refuse_hooks,
)
from collab_compress.architectures.sites import (
    dense_scores,
    dense_values,
    read,
    refuse_unknown_parts,
    why_undescribed,
)
from collab_compress.attention import QKConfig, maps_of
from collab_compress.attention.projections import width_in
from collab_compress.calibration import Batch
from collab_compress.calibration.stacks import Stack, find_stacks
from collab_compress.checkpoint import is_quantized
from collab_compress.conversion.depth import refuse_shallower
from collab_compress.conversion.feed_forward import FeedForward, find_blocks, narrower_config
from collab_compress.conversion.layers import SingleLayers, single_layers, undivided
from collab_compress.conversion.maps import MapTask
from collab_compress.conversion.residual import ResidualLinear, find_residual_linears
from collab_compress.errors import CollabCompressError, CompressionError, UnsupportedModelError
from collab_compress.heads.sharding import refuse_unwritable
from collab_compress.options import Compression

ROTARY = "what queries and keys with a rotary embedding lose is not known beforehand, so only dk makes them narrower"
CONVERTED = "it is already converted"


class Inventory:
    """What of a model can be converted, each part found once, when needed; all but attention needs a `batch`."""

    def __init__(self, model: PreTrainedModel, batch: Batch | None = None, modules: str = "*") -> None:
        self.model, self.batch, self.modules = model, batch, modules

    @cached_property
    def attention(self) -> list[AttentionSite]:
        """The described attention modules."""
        return find_attention(self.model, self.modules, optional=True)

    @cached_property
    def editable(self) -> list[AttentionSite]:
        """The attention modules that can be converted."""
        return [site for site in self.attention if not _why_not(site)]

    @cached_property
    def why_kept(self) -> str:
        """Why some attention stays as it is; empty where all can be converted."""
        reasons = [f"{site.name}: {reason}" for site in self.attention if (reason := _why_not(site))]
        return why_undescribed(self.model, self.modules) or (reasons or [""])[0]

    @cached_property
    def stacks(self) -> list[Stack]:
        """The lists of numbered layers, at least one."""
        assert self.batch is not None
        with undivided(self.model):
            stacks = find_stacks(self.model, self.batch)
        if not stacks:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no list of numbered layers, with linear layers inside, that are "
                "called one after the other and pass on hidden states of one width"
            )
        return stacks

    @cached_property
    def layers(self) -> SingleLayers:
        """The numbered layers, which can be called alone in evaluation mode; raises as `single_layers`."""
        assert self.batch is not None
        with undivided(self.model):
            return single_layers(self.model, self.stacks, self.batch)

    @cached_property
    def residual_linears(self) -> list[ResidualLinear]:
        """The residual linear layers, in the order of calls; raises as `find_residual_linears`."""
        layers = self.layers
        with undivided(self.model):
            return find_residual_linears(self.model, self.stacks, layers)

    @cached_property
    def blocks(self) -> list[FeedForward]:
        """The feed-forward blocks, in the order of calls; raises as `find_blocks`."""
        linears = self.residual_linears
        with undivided(self.model):
            return find_blocks(self.model, linears, self.layers)

    # Parts whose loss at every width can be measured, and why others cannot.

    @cached_property
    def scores(self) -> tuple[list[DenseSite], str]:
        """The modules whose queries and keys can lose channels by measured loss, and why the others stay dense."""
        if any(maps_of(site.module)[0] is not None for site in self.attention):
            return [], CONVERTED
        others = [site for site in self.editable if not (site.family.rotary or site.no_dk)]
        sites = dense_scores(self.model, others)
        reasons = [site.no_dk or ROTARY for site in self.editable if site not in others]
        return sites, ROTARY if ROTARY in reasons else (reasons or [self.why_kept])[0]

    @cached_property
    def narrowable_values(self) -> tuple[list[ValueSite], str]:
        """The modules whose values can lose channels, and why others stay dense."""
        if any(maps_of(site.module)[1] is not None for site in self.attention):
            return [], CONVERTED
        return list(map(dense_values, self.editable)), self.why_kept

    @cached_property
    def narrowable_blocks(self) -> tuple[list[FeedForward], str]:
        """The feed-forward blocks that can be made narrower, or why there are none."""
        try:
            width = min(block.width for block in self.blocks)
            narrower_config(self.model, self.blocks, max(1, width // 2 - 1))  # most likely a multiple of nothing
        except UnsupportedModelError as error:
            return [], str(error).removesuffix("; leave out dff")
        return self.blocks, ""

    # Maps to convert to given widths.

    def tasks(self, compression: Compression, by_module: Mapping[str, Compression] | None = None) -> list[MapTask]:
        """Return the maps to convert, queries and keys first, after checking that all of them can be converted.

        Widths `by_module` are those that `keep` chose; then attention that cannot be converted stays as it is.
        """
        for_all = not by_module and (compression.dk is not None or compression.dv is not None)  # none is left out
        sites = self.editable if by_module else self.attention
        if for_all and not sites:
            find_attention(self.model, self.modules)  # raises
        widths = {site.name: (by_module or {}).get(site.name, compression) for site in sites}
        for site in sites:
            parts = (widths[site.name].dk, "queries and keys"), (widths[site.name].dv, "values")
            for (width, what), converted in zip(parts, maps_of(site.module), strict=True):
                if width is not None and converted is not None:
                    raise CompressionError(
                        f"{site.name}: its {what} are already converted; leave it out by modules, expand the model "
                        "first, or start from the dense checkpoint"
                    )
        scores = dense_scores(self.model, [site for site in sites if widths[site.name].dk is not None])
        values = list(map(dense_values, sites)) if compression.dv is not None else []
        if for_all:
            refuse_unknown_parts(self.model, self.modules)
        for scored in scores:
            _check_scores(MapTask(scored, widths[scored.name]))
        for valued in values:
            _check_width(valued, "dv", widths[valued.name].dv, (valued.value,))
            _check_layers(valued, ((valued.paths.value, valued.value), (valued.paths.output, valued.output)))
        maps: list[DenseSite | ValueSite] = [*scores, *values]
        for one in maps:
            _refuse_joined(one)
        return [MapTask(one, widths[one.name]) for one in maps]


def _why_not(site: AttentionSite) -> str:
    """Return why an attention module cannot be converted, whatever the widths; empty if it can."""
    limits = site.family.limits
    return limits.feed_forward_only or limits.undescribed.get(site.kind, "")


def find_feed_forward(model: PreTrainedModel, batch: Batch) -> list[FeedForward]:
    """Find the feed-forward blocks whose neurons do not depend on each other, in the order in which they are called.

    Args:
        model: stock or edited; left in the mode it was in.
        batch: keyword arguments for the model, of which two sequences are run.

    Raises:
        UnsupportedModelError: the model has no such block, or no numbered layers that can be called alone.
        CalibrationError: the model does not take such batches.
    """
    return Inventory(model, batch).blocks


def refuse_early(model: PreTrainedModel, compression: Compression) -> None:
    """Refuse what `compress` cannot convert, before any data are read."""
    refuse_unconvertible(model, "compress")
    inventory, widths = Inventory(model, modules=compression.modules), compression
    narrowest: dict[str, Compression] = {}
    if compression.keep is not None:  # may choose any width, down to one channel a head
        widths = Compression(dk=1, dv=1)
        for site in inventory.editable:
            dk = None if site.family.rotary or site.no_dk else site.heads
            narrowest[site.name] = Compression(dk=dk, dv=site.key_value_heads)
    if compression.keep is None or narrowest:
        inventory.tasks(widths, narrowest)
    if compression.layers is not None:
        refuse_shallower(model, compression.layers)


def refuse_unconvertible(model: PreTrainedModel, caller: str) -> None:
    """Refuse a model whose layers can be neither changed nor measured, whatever the widths."""
    if is_quantized(model):
        raise CompressionError(f"{type(model).__name__} is quantized; convert the unquantized checkpoint instead")
    refuse_unwritable(model, caller, CompressionError)
    implementation = model.config._attn_implementation
    if implementation not in ("eager", "sdpa", None):  # none without attention
        raise CompressionError(
            f"attention is converted as 'eager' or 'sdpa', the model is set to {implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )
    if getattr(model.config, "rescale_every", 0):  # RWKV's
        raise UnsupportedModelError(
            f"{type(model).__name__} divides its own weights when it first runs, so that no copy can share them; set "
            "rescale_every of its config to 0 before it runs"
        )


def check_weights(weights: Iterable[tuple[str, Tensor]], error: type[CollabCompressError] = CompressionError) -> None:
    """Raise `error` for the first of these named weights that is offloaded or not finite."""
    for name, weight in weights:
        if weight.is_meta:
            raise error(f"{name} is offloaded; load the model into memory")
        if not bool(torch.isfinite(weight).all()):
            raise error(f"{name} holds NaN or infinite values; the checkpoint is damaged")


def _refuse_joined(site: AttentionSite) -> None:
    """Refuse projections that become part of a converted module's one layer, if that would lose anything."""
    if site.family.forward == "stock":
        return
    for path in (site.paths.query, site.paths.key, site.paths.value):
        if site.kind != "cross" or path != site.paths.query:
            projection = read(site.name, site.module, site.family, path, nn.Linear)
            refuse_hooks(site.path(path), getattr(projection, "layer", projection))


def _check_scores(task: MapTask) -> None:
    """Check that the queries and keys of a module can be converted as asked."""
    site = task.site
    assert isinstance(site, DenseSite)
    _check_width(site, "dk", task.compression.dk, () if site.family.rotary else (site.query, site.key))
    if site.family.rotary and task.compression.head_dim is not None:
        raise CompressionError(f"{site.name}: heads with a rotary embedding keep their width; leave out head_dim")
    if site.family.rotary and task.compression.solver.method != "als":
        raise CompressionError(f"{site.name}: other solvers do not apply to rotary embeddings; leave out solver")
    config = task.config()
    if isinstance(config, QKConfig):
        config.check_room(site.family)
    _check_layers(site, ((site.paths.query, site.query), (site.paths.key, site.key)))


def _check_width(site: AttentionSite, name: str, width: int | None, projections: Sequence[Any]) -> None:
    """Refuse a width beyond the channels of all heads, of which each has no more than its projections read."""
    heads, channels = site.key_value_heads, min([site.head_width, *map(width_in, projections)])
    full = heads * channels
    if width is not None and width > full and width != site.key_value_width:
        kind = "key–value heads" if heads < site.heads else "heads"
        raise CompressionError(
            f"{site.name}: {name} is {width}, but {heads} {kind} × {channels} = {full} is exact already; pass {name} "
            f"between 1 and {full}"
        )


def _check_layers(site: AttentionSite, projections: Sequence[tuple[str, Any]]) -> None:
    """Refuse projections with hooks, or with weights that are offloaded or not finite."""
    for path, projection in projections:
        layer: nn.Module = getattr(projection, "layer", projection)  # of a fused layer
        refuse_hooks(site.path(path), layer, stays=path == site.paths.output)
        check_weights((f"{site.path(path)}.{name}", weight) for name, weight in projection.named_parameters())
