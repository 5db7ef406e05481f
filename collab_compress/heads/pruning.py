"""Remove attention heads, and the model edit that removes them again when a checkpoint loads."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, find_attention, refuse_kept_attention, transformers_model
from collab_compress.architectures.sites import STOCK_HEADS, FusedSlice, fused_slice
from collab_compress.attention.edits import from_stored, refusing_other_models, stored_modules
from collab_compress.attention.maps import Cut, Part, kept_rows
from collab_compress.attention.projections import (
    Rows,
    fused_layer,
    input_dim,
    plain_weight,
    remaining,
    rows_of,
    width_in,
)
from collab_compress.attention.run import head_hooks, is_converted, maps_of, prepare_
from collab_compress.attention.values import JOINT_WIDTH
from collab_compress.checkpoint import all_or_nothing, is_quantized, path_in_base, record_edit_
from collab_compress.errors import CheckpointError, CompressionError, HeadError, shown
from collab_compress.heads.sharding import refuse_unwritable

_logger = logging.getLogger(__name__)


def check_heads(
    sites: Sequence[AttentionSite], heads: Mapping[str, Collection[int]]
) -> list[tuple[AttentionSite, list[int]]]:
    """Return the named modules with their heads in ascending order, or raise a HeadError if one is not known."""
    known = {site.name: site for site in sites}
    for name, chosen in heads.items():
        if name not in known:
            raise HeadError(f"no attention module {name!r}; there are {', '.join(known)}")
        for head in chosen:
            if not isinstance(head, Integral) or not 0 <= head < known[name].heads:
                raise HeadError(f"{name} has no head {shown(head)}; its heads are 0 to {known[name].heads - 1}")
    return [(site, sorted(set(map(int, heads[site.name])))) for site in sites if len(heads.get(site.name, ()))]


@dataclass(frozen=True)
class KeptHeads:
    """The heads that one attention module keeps, and the paths of its projections inside it."""

    kept: tuple[int, ...]  # ascending, counted as before the removal
    before: int  # number of heads
    head_width: int  # of one head's queries and keys, d
    value_width: int  # of one head's values, dv
    heads: str  # attribute that counts heads
    query: str
    key: str
    value: str
    output: str  # starts with `..` where it lies in the parent module

    @property
    def widths(self) -> dict[str, int]:
        """Path of each projection → channels of one head in the dense form."""
        return {self.query: self.head_width, self.key: self.head_width, self.value: self.value_width}

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapConfig.rules`."""
        ascending = list(self.kept) == sorted(set(self.kept))
        yield "kept", len(self.kept) > 0 and ascending, "heads that stay, ascending"
        yield "kept", self.kept[-1] < self.before, f"heads below {self.before}"
        yield "head_width", self.head_width > 0, "at least 1"
        yield "value_width", self.value_width > 0, "at least 1"


@dataclass(frozen=True)
class PrunedEdit:
    """Attention modules that have lost heads, counted as when the edit was made: edits are replayed in order."""

    modules: dict[str, KeptHeads]  # by path inside the base model
    kind: ClassVar[str] = "pruned"

    @property
    def heads(self) -> dict[str, int]:
        """Path of each module → the number of heads that it has before the edit."""
        return {name: kept.before for name, kept in self.modules.items()}

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: {**asdict(kept), "kept": list(kept.kept)} for name, kept in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PrunedEdit":
        """Rebuild the edit from the result of `to_dict`, or raise a CheckpointError."""
        return cls({name: from_stored(KeptHeads, kept, name) for name, kept in stored_modules(data).items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Remove the heads in place, in modules that still have them; weights may still be empty."""
        with refusing_other_models(self.kind, model):
            cuts: list[Cut] = []
            for name, kept in self.modules.items():
                module = model.base_model.get_submodule(name)
                if getattr(module, _head_count(module, kept)) == kept.before:
                    cuts += _module_cuts(model.base_model, name, kept)
            for cut in cuts:
                setattr(cut.owner, cut.name, cut.value)
            for name in self.modules:
                module = model.base_model.get_submodule(name)
                if is_converted(module):
                    prepare_(module)

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: cut projections are loaded like any other weight."""


def _module_cuts(base: Any, name: str, kept: KeptHeads) -> list[Cut]:
    """List the changes that remove heads from the module `base.name`."""
    module: Any = base.get_submodule(name)
    holder = base.get_submodule(name.rpartition(".")[0]) if kept.output.startswith("..") else module
    output = holder.get_submodule(kept.output.removeprefix(".."))
    fused = fused_layer(module, kept.query)
    if isinstance(fused, Conv1D):
        return _fused_cuts(module, fused, output, kept, f"{name}.{kept.query}")
    cuts = _converted_cuts(module, kept)
    dense = {path: width for path, width in kept.widths.items() if path not in rows_of(module)}
    for path, width in dense.items():
        projection = module.get_submodule(path)
        cuts += _output_cuts(projection, _channels(kept, width, len(projection.weight), f"{name}.{path}"))
    _, ov = maps_of(module)
    channels = kept_rows(kept.kept, kept.value_width if ov is None else ov.config.size)
    cuts += [
        Cut(output, "weight", remaining(output.weight, input_dim(output), channels)),
        Cut(output, "in_features" if input_dim(output) else "nx", len(channels)),
    ]
    if hasattr(module, JOINT_WIDTH):
        cuts.append(Cut(module, JOINT_WIDTH, len(channels)))
    if hasattr(module, "embed_dim"):  # some models reshape outputs by it
        cuts.append(Cut(module, "embed_dim", len(kept.kept) * kept.head_width))
    return [*cuts, Cut(module, _head_count(module, kept), len(kept.kept))]


def _converted_cuts(module: Any, kept: KeptHeads) -> list[Cut]:
    """List the changes that remove heads from converted maps, and from the layers that hold their projections."""
    qk, ov = maps_of(module)
    parts: dict[str, tuple[Part, Any]] = {kept.query: ("query", qk), kept.key: ("key", qk), kept.value: ("value", ov)}
    channels: dict[str, list[int]] = {}  # that stay in each layer
    rows, cuts = {}, [cut for converted in (qk, ov) if converted is not None for cut in converted.cuts(kept.kept)]
    for path, (layer, start, _) in rows_of(module).items():
        part, converted = parts[path]
        own = (
            kept_rows(kept.kept, kept.widths[path]) if converted is None else converted.kept_channels(part, kept.kept)
        )
        before = channels.setdefault(layer, [])
        rows[path] = Rows(layer, len(before), len(before) + len(own))
        before += [start + channel for channel in own]
    for layer, remaining_channels in channels.items():
        cuts += _output_cuts(module.get_submodule(layer), remaining_channels)
    if rows:
        cuts.append(Cut(module, "rows", rows))
    return cuts


def _fused_cuts(module: Any, layer: Conv1D, output: Conv1D, kept: KeptHeads, path: str) -> list[Cut]:
    """List the changes that remove heads from one transposed layer of queries, keys and values (GPT-2)."""
    channels = _channels(kept, kept.head_width, layer.nf // 3, path)
    fused = [block * (layer.nf // 3) + channel for block in range(3) for channel in channels]
    return [
        Cut(layer, "weight", remaining(layer.weight, 1, fused)),
        Cut(layer, "bias", remaining(layer.bias, 0, fused)),
        Cut(layer, "nf", len(fused)),
        Cut(output, "weight", remaining(output.weight, 0, channels)),
        Cut(output, "nx", len(channels)),
        Cut(module, "split_size", len(channels)),
        Cut(module, kept.heads, len(kept.kept)),
    ]


def _head_count(module: Any, kept: KeptHeads) -> str:
    """Return the attribute that holds the number of heads; a converted module may view another number of them."""
    return STOCK_HEADS if STOCK_HEADS in module.__dict__ else kept.heads


def _channels(kept: KeptHeads, width: int, count: int, path: str) -> list[int]:
    """Return those of the `count` output channels of the projection at `path` that belong to the kept heads."""
    if kept.before * width != count:
        raise CheckpointError(
            f"{path}: got {count} output channels; expected {kept.before} heads × {width}; the model is not the one "
            "that its config describes, so take the config.json that was saved with the weights"
        )
    return kept_rows(kept.kept, width)


def _output_cuts(linear: nn.Linear | Conv1D, channels: Sequence[int]) -> list[Cut]:
    cuts = [Cut(linear, "weight", remaining(linear.weight, 0, channels))]
    if linear.bias is not None:
        cuts.append(Cut(linear, "bias", remaining(linear.bias, 0, channels)))
    return [*cuts, Cut(linear, "out_features", len(channels))]


@torch.inference_mode(False)
def prune_heads_(model: PreTrainedModel, heads: Mapping[str, Collection[int]]) -> None:
    """Remove attention heads from `model`, in place and all or nothing.

    The model then computes what it computed with those heads masked by 0 (`HeadMask`), with fewer parameters and
    operations. Removed are their channels of the query, key and value projections and of the output projection's
    input; in a collaborative module their rows of the mixing matrix and their content biases, while the shared
    projections stay. The model saves, reloads, converts and expands like any other. Remaining heads are numbered
    from 0 again, in the alignment heads of Whisper too.
    Cut parameters are new objects: make an optimizer afterwards.

    Args:
        model: stock or edited; dtype, device and frozenness are kept.
        heads: path of the attention module → heads to remove, from 0. A module that serves several layers (ALBERT)
            loses them in all.

    Raises:
        UnsupportedModelError: the model's family is not known, or a module lies outside the base model.
        HeadError: a module or head is not known; no head would be left; a projection is no plain `nn.Linear`, is
            shared or offloaded; head outputs are mixed, masked or hooked; the model is quantized or sharded.
        CheckpointError: the model was loaded before this package was imported, or a projection is not as wide as
            its heads.

    Example:
        >>> prune_heads_(model, {"encoder.layer.0.attention.self": [0, 2]})
        >>> model.encoder.layer[0].attention.self.query
        Linear(in_features=24, out_features=8, bias=True)
        >>> model(**batch).last_hidden_state.shape
        torch.Size([2, 6, 24])
    """
    model = transformers_model(model)
    refuse_unwritable(model, "prune_heads_")
    chosen = check_heads(find_attention(model), heads)
    if is_quantized(model):
        raise HeadError(f"{type(model).__name__} is quantized; remove heads from the unquantized checkpoint instead")
    if not chosen:
        return
    holders: Counter[int] = Counter()  # of each parameter and module, by identity
    for module in model.modules():
        holders.update({id(part) for part in (*module._parameters.values(), *module._modules.values())})
    holders.pop(id(None), None)
    shared = {part for part, count in holders.items() if count > 1}
    edit = PrunedEdit({path_in_base(model, site.module): _keep(site, heads, shared) for site, heads in chosen})
    kept = {site.name: edit.modules[path_in_base(model, site.module)].kept for site, _ in chosen}

    def renumber(layer: int, name: str, head: int) -> tuple[int, int] | None:
        if name not in kept:
            return layer, head
        return (layer, kept[name].index(head)) if head in kept[name] else None

    with all_or_nothing(model):
        note = renumber_alignment_heads_(model, renumber)
        edit.apply_(model)
        record_edit_(model, edit)
    if note:
        _logger.warning(note)


def renumber_alignment_heads_(
    model: PreTrainedModel, renumber: Callable[[int, str, int], tuple[int, int] | None]
) -> str:
    """Renumber the cross-attention heads that generation settings name (Whisper), in place; return a note or "".

    `renumber` maps the number of a layer, the path of its cross-attention and the number of a head to new numbers.
    """
    before = getattr(getattr(model, "generation_config", None), "alignment_heads", None)
    if not before:
        return ""
    sites = find_attention(model, optional=True)
    crossing = dict(enumerate(site.name for site in sites if site.kind == "cross"))
    moved = [renumber(layer, crossing[layer], head) for layer, head in before if layer in crossing]
    after = [list(pair) for pair in moved if pair is not None]
    model.generation_config = copy.deepcopy(model.generation_config)
    if after:
        model.generation_config.alignment_heads = after
    else:
        del model.generation_config.alignment_heads
    removed = len(before) - len(after)
    if not removed:
        return ""
    timestamps = "word timestamps come from the others" if after else "there are no word timestamps any more"
    return f"{removed} of the {len(before)} heads in generation_config.alignment_heads are removed: {timestamps}"


def _keep(site: AttentionSite, removed: Sequence[int], shared: Collection[int]) -> KeptHeads:
    """Return the heads that a module keeps, or raise if the others cannot be removed."""
    refuse_kept_attention(site)
    family, masks = site.family, "mask them instead (HeadMask)"
    kept = tuple(head for head in range(site.heads) if head not in removed)
    output_path = site.path(family.paths.output)
    for is_refused, reason in (
        (not kept, f"removing heads {list(removed)} leaves none; keep at least one head"),
        (head_hooks(site.module), "something acts on its heads (a mask, a recorder, dropout); remove that first"),
        (
            family.limits.no_pruning,
            f"heads cannot be removed from {family.name}, because {family.limits.no_pruning}; {masks}",
        ),
        (
            site.key_value_heads != site.heads,
            f"{site.heads} heads share {site.key_value_heads} heads of keys and values, so none can be removed "
            f"alone; {masks}",
        ),
        (site.own_positions, f"heads cannot be removed, because {site.own_positions}; {masks}"),
        (
            family.paths.fused and is_converted(site.module),
            f"it is converted, and {family.name} has one layer for queries, keys and values; remove heads first, "
            f"then convert, or {masks}",
        ),
        (
            hasattr(site.part(family.paths.output), "alphas"),
            f"{output_path} mixes the heads, so none can be removed alone; call merge_alphas_ first",
        ),
    ):
        if is_refused:
            raise HeadError(f"{site.name}: {reason}")
    qk, ov = maps_of(site.module)
    for path in (family.paths.query, family.paths.key):
        _read_linear(site, path, shared)
    if qk is not None:
        try:
            qk.config.without(kept).check_room(family)
        except CompressionError as error:
            raise HeadError(
                f"{site.name} cannot work with {len(kept)} heads: {error}; or remove fewer heads"
            ) from error
    value = _read_linear(site, family.paths.value, shared)
    output = _read_linear(site, family.paths.output, shared)
    if width_in(output) != value.out_features:
        raise HeadError(
            f"{site.name}: values are {value.out_features} wide and the output projection reads "
            f"{width_in(output)}; expected the same; the {family.name} description does not fit this model"
        )
    paths = {name: getattr(family.paths, name) for name in ("heads", "query", "key", "value", "output")}
    value_width = value.out_features // site.heads if ov is None else site.head_width
    return KeptHeads(kept, site.heads, site.head_width, value_width, **paths)


def _read_linear(site: AttentionSite, path: str, shared: Collection[int]) -> nn.Linear | FusedSlice:
    """Return a projection, or raise unless it is a plain one, in memory, and not shared with another module."""
    where = site.path(path)
    projection: nn.Linear | FusedSlice = fused_slice(site.module, site.family, path) or site.part(path)
    layer = projection.layer if isinstance(projection, FusedSlice) else projection
    plain_weight(where, layer, HeadError)
    if any(id(part) in shared for part in (layer, *layer.parameters(recurse=False))):
        raise HeadError(f"{where} is shared with another module, which would lose channels too; untie them first")
    return projection
