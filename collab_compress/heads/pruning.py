"""Remove attention heads from a model for good."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention
from collab_compress.attention import is_collaborative
from collab_compress.attention.view import acts_of
from collab_compress.checkpoint import is_quantized, path_in_base, record_edit_
from collab_compress.errors import CompressionError, HeadError
from collab_compress.heads.choice import check_heads
from collab_compress.heads.removal import KeptHeads, PrunedEdit, plan_removal
from collab_compress.heads.sharding import refuse_sharded


def prune_heads_(model: PreTrainedModel, heads: Mapping[str, Collection[int]]) -> None:
    """Remove attention heads from `model`, in place and all or nothing.

    The model computes afterwards what it computed with those heads masked by 0 (`HeadMask`), with fewer parameters
    and operations: their channels of the query, key and value projections and of the output projection's input go; in
    a collaborative module their rows of the mixing matrix and their content biases go, and the shared projections
    stay. The model saves, reloads, converts and expands like any other. Heads that remain are counted anew from 0, so
    a second call counts those. Parameters that were cut are new ones: make an optimizer afterwards.

    Args:
        model: stock or edited; dtype, device and frozenness are kept.
        heads: path of the attention module → heads to remove, from 0. A module that serves several layers (ALBERT)
            loses them in all.

    Raises:
        UnsupportedModelError: the model's family is not known, or a module lies outside the base model.
        HeadError: a module or head is not known; no head would be left; a projection is no plain `nn.Linear`, is
            shared or offloaded; head outputs are mixed, masked or otherwise acted on; the model is quantized or
            sharded.
        CheckpointError: the model was loaded before this package was imported.
    """
    refuse_sharded(model, "prune_heads_")
    chosen = check_heads(find_attention(model, FAMILIES), heads)
    if is_quantized(model):
        raise HeadError(f"{type(model).__name__} is quantized; remove heads from the unquantized checkpoint instead")
    shared = _shared(model)
    modules = {path_in_base(model, site.module): _kept(model, site, removed, shared) for site, removed in chosen}
    if not modules:
        return
    edit = PrunedEdit(modules)
    for cut in plan_removal(model, edit):
        setattr(cut.owner, cut.name, cut.value)
    record_edit_(model, edit)


def _kept(model: PreTrainedModel, site: AttentionSite, removed: Sequence[int], shared: Collection[int]) -> KeptHeads:
    """Check that heads can be removed from a module, and describe what is left."""
    family = site.family
    kept = tuple(head for head in range(site.heads) if head not in removed)
    if not kept:
        raise HeadError(f"{site.name}: removing heads {list(removed)} leaves none; keep at least one head")
    if acts_of(site.module):
        raise HeadError(f"{site.name}: something acts on its heads (a mask, a tap, dropout); remove that first")
    if family.keeps_heads:
        raise HeadError(
            f"{site.name}: heads cannot be removed from {family.name}, because {family.keeps_heads}; mask them "
            "instead (HeadMask)"
        )
    output = site.part(family.output)
    if hasattr(output, "alphas"):
        raise HeadError(
            f"{site.path(family.output)} mixes the heads, so each is part of all; call merge_alphas_ first, then "
            "remove heads"
        )
    _check_query_and_key(site, kept, shared)
    value = _linear(site, family.value, site.part(family.value), shared)
    _linear(site, family.output, output, shared)
    if value.out_features % site.heads or output.in_features != value.out_features:
        raise HeadError(
            f"{site.name}: values are {value.out_features} wide and the output projection reads "
            f"{output.in_features}; expected the same for {site.heads} heads; the {family.name} description does not "
            "fit this model"
        )
    return KeptHeads(
        kept=kept, before=site.heads, head_width=site.head_width, value_width=value.out_features // site.heads,
        heads=family.heads, query=family.query, key=family.key, value=family.value,
        output=path_in_base(model, output),
    )  # fmt: skip


def _check_query_and_key(site: AttentionSite, kept: Sequence[int], shared: Collection[int]) -> None:
    """Check the projections of which channels are cut: queries and keys, or where they are shared, content biases."""
    if is_collaborative(site.module):
        key = f"{site.family.key}.proj"
        _linear(site, key, site.part(key), shared)
        _check_room(site, kept)
        return
    for path in (site.family.query, site.family.key):
        projection = _linear(site, path, site.part(path), shared)
        if projection.out_features != site.width:
            raise HeadError(
                f"{site.path(path)}: got {projection.out_features} output channels; expected {site.heads} heads × "
                f"{site.head_width} = {site.width}; the {site.family.name} description does not fit this model"
            )


def _check_room(site: AttentionSite, kept: Sequence[int]) -> None:
    """Check that the shared channels still fit where the module lays them out as exactly as many heads as it has."""
    module: Any = site.module
    try:
        replace(module.collaborative, heads=len(kept)).multiple  # noqa: B018 (raises)
    except CompressionError as error:
        raise HeadError(f"{site.name} cannot do with {len(kept)} heads: {error}; or remove fewer heads") from error


def _linear(site: AttentionSite, path: str, projection: Any, shared: Collection[int]) -> nn.Linear:
    """Check that channels can be cut from a projection: it is a plain one, in memory, and nobody else's."""
    where = site.path(path)
    plain = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
    kind = type(projection.weight if plain and "weight" in projection._parameters else projection)
    if kind is not nn.Parameter or not projection.weight.is_floating_point():
        kind = type(projection) if kind is nn.Parameter else kind
        raise HeadError(
            f"{where}: got {kind.__name__}, expected a plain nn.Linear; merge adapters, remove "
            "parametrizations and undo quantization before removing heads"
        )
    for part in (projection, *projection.parameters(recurse=False)):
        if id(part) in shared:
            raise HeadError(f"{where} is shared with another module, which would lose channels too; untie them first")
        if isinstance(part, nn.Parameter) and part.is_meta:
            raise HeadError(f"{where} is offloaded; load the model into memory")
    return projection  # type: ignore[no-any-return]


def _shared(model: nn.Module) -> set[int]:
    """Identities of the parameters and modules that more than one module holds."""
    held: Counter[int] = Counter()
    for module in model.modules():
        held.update(
            {id(part) for part in (*module._parameters.values(), *module._modules.values()) if part is not None}
        )
    return {identity for identity, holders in held.items() if holders > 1}
