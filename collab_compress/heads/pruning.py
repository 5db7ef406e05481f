"""Remove attention heads for good: which ones, how they are cut out, and how a checkpoint does it again."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention, transformers_model
from collab_compress.attention.form import Cut, remaining
from collab_compress.attention.install import FORMS_AT, STOCK_HEADS, head_hooks, lay_out_
from collab_compress.attention.stored import from_stored, refusing_other_models, stored_modules
from collab_compress.attention.values import JOINT_WIDTH
from collab_compress.checkpoint import is_quantized, path_in_base, record_edit_
from collab_compress.errors import CompressionError, HeadError
from collab_compress.heads.sharding import refuse_sharded


def check_heads(
    sites: Sequence[AttentionSite], heads: Mapping[str, Collection[int]]
) -> list[tuple[AttentionSite, list[int]]]:
    """Pair the modules that are named with their heads, in ascending order; those without a head are left out.

    Raises:
        HeadError: a module or a head is not known.
    """
    known = {site.name: site for site in sites}
    if not isinstance(heads, Mapping) or not all(isinstance(chosen, Collection) for chosen in heads.values()):
        raise HeadError(f"heads are {heads!r}; expected module path → heads, as in {{{next(iter(known))!r}: [0]}}")
    for name, chosen in heads.items():
        if name not in known:
            raise HeadError(f"no attention module {name!r}; there are {', '.join(known)}")
        for head in chosen:
            if not isinstance(head, int) or not 0 <= head < known[name].heads:
                raise HeadError(f"{name} has no head {head!r}; its heads are 0 to {known[name].heads - 1}")
    return [(site, sorted(set(heads[site.name]))) for site in sites if heads.get(site.name)]


def least_important(
    importance: Mapping[str, Tensor], share: float, *, keep_one: bool = False
) -> dict[str, list[int]]:
    """Pick the least important heads over all modules.

    Args:
        importance: module path → (H,), as `head_importance` gives.
        share: how much of all heads to pick, 0 to 1; rounded to whole heads. Of equals the first are picked.
        keep_one: spare the most important head of each module, as physical removal must; fewer than the share are
            picked where nothing else is left.

    Returns:
        Module path → heads in ascending order; modules without any are left out.

    Raises:
        HeadError: the share is not between 0 and 1, or an importance is no list of numbers.
    """
    if not 0 <= share <= 1:
        raise HeadError(f"share of heads is {share}; expected 0 to 1")
    for name, values in importance.items():
        if values.dim() != 1 or not len(values) or not bool(values.isfinite().all()):
            raise HeadError(f"importance of {name}: got {values}; expected one finite number a head")
    spared = {(name, int(values.argmax())) for name, values in importance.items()} if keep_one else set()
    ranked = sorted(
        ((float(value), name, head) for name, values in importance.items() for head, value in enumerate(values)),
        key=lambda entry: entry[0],
    )
    picked: dict[str, list[int]] = {}
    for _, name, head in [entry for entry in ranked if entry[1:] not in spared][: round(share * len(ranked))]:
        picked.setdefault(name, []).append(head)
    return {name: sorted(picked[name]) for name in importance if name in picked}


@dataclass(frozen=True)
class KeptHeads:
    """Which heads of one attention module are left, and where its parts are.

    Args:
        kept: heads that stay, ascending, counted as before the removal.
        before: number of heads before.
        head_width: width d of one head's queries and keys.
        value_width: width dv of one head's values.
        heads: attribute of the attention module that counts heads.
        query: attribute path of the query projection in the attention module.
        key: attribute path of the key projection.
        value: attribute path of the value projection.
        output: attribute path of the output projection in the attention module, from the module around it with `..`.
    """

    kept: tuple[int, ...]
    before: int
    head_width: int
    value_width: int
    heads: str
    query: str
    key: str
    value: str
    output: str

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        ascending = list(self.kept) == sorted(set(self.kept))
        yield "kept", len(self.kept) > 0 and ascending, "heads that stay, ascending"
        yield "kept", self.kept[-1] < self.before, f"heads below {self.before}"
        yield "head_width", self.head_width > 0, "at least 1"
        yield "value_width", self.value_width > 0, "at least 1"


@dataclass(frozen=True)
class PrunedEdit:
    """Attention modules that have lost heads.

    Heads are counted as they were when the edit was made, so several such edits are replayed in their order.

    Args:
        modules: path of each module inside the base model → which of its heads are left.
    """

    modules: dict[str, KeptHeads]
    kind: ClassVar[str] = "pruned"
    implementations: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: {**asdict(kept), "kept": list(kept.kept)} for name, kept in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PrunedEdit":
        """Rebuild the edit from what `to_dict` returned.

        Raises:
            CheckpointError: what is left of a module is described wrongly.
        """
        return cls({name: from_stored(KeptHeads, kept, name) for name, kept in stored_modules(data).items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Cut the heads out of `model` in place; its weights may still be empty."""
        with refusing_other_models(self.kind, model):
            remove_(model, self)

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: what is left of a projection is loaded like any other weight."""


def remove_(model: PreTrainedModel, edit: PrunedEdit) -> None:
    """Cut the heads out of `model`, in place."""
    for cut in plan_removal(model, edit):
        setattr(cut.owner, cut.name, cut.value)
    for name in edit.modules:
        module = model.base_model.get_submodule(name)
        for form in (getattr(module, at, None) for at in FORMS_AT):
            if form is not None:
                lay_out_(module, form.pieces)


def plan_removal(model: PreTrainedModel, edit: PrunedEdit) -> list[Cut]:
    """Compute what the edit changes, without changing it; modules that have not as many heads as before are done."""
    cuts = []
    for name, kept in edit.modules.items():
        module = model.base_model.get_submodule(name)
        if getattr(module, _counted(module, kept)) == kept.before:
            around = kept.output.startswith("..")
            holder = model.base_model.get_submodule(name.rpartition(".")[0]) if around else module
            cuts += _module_cuts(module, holder.get_submodule(kept.output.removeprefix("..")), kept)
    return cuts


def _module_cuts(module: Any, output: Any, kept: KeptHeads) -> list[Cut]:
    cuts: list[Cut]
    if hasattr(module, "value_form"):
        cuts = module.value_form.keep_heads(module, output, kept.kept)
    else:
        values = _channels(kept.kept, kept.value_width)
        cuts = _output_cuts(module.get_submodule(kept.value), values) + _input_cuts(output, values)
        if hasattr(module, JOINT_WIDTH):
            cuts.append(Cut(module, JOINT_WIDTH, len(values)))
    if hasattr(module, "score_form"):
        cuts += module.score_form.keep_heads(module, kept.kept)
    else:
        channels = _channels(kept.kept, kept.head_width)
        cuts += _output_cuts(module.get_submodule(kept.query), channels)
        cuts += _output_cuts(module.get_submodule(kept.key), channels)
    if hasattr(module, "embed_dim"):  # by which some lay outputs out
        cuts.append(Cut(module, "embed_dim", len(kept.kept) * kept.head_width))
    return [*cuts, Cut(module, _counted(module, kept), len(kept.kept))]


def _counted(module: Any, kept: KeptHeads) -> str:
    """Attribute that holds the number of heads; the stock one may say how many pieces a converted module views."""
    return STOCK_HEADS if STOCK_HEADS in module.__dict__ else kept.heads


def _channels(heads: Sequence[int], width: int) -> list[int]:
    return [head * width + channel for head in heads for channel in range(width)]


def _output_cuts(linear: Any, channels: Sequence[int]) -> list[Cut]:
    cuts = [
        Cut(linear, name, remaining(parameter, 0, channels))
        for name, parameter in (("weight", linear.weight), ("bias", linear.bias))
        if parameter is not None
    ]
    return [*cuts, Cut(linear, "out_features", len(channels))]


def _input_cuts(linear: Any, channels: Sequence[int]) -> list[Cut]:
    return [Cut(linear, "weight", remaining(linear.weight, 1, channels)), Cut(linear, "in_features", len(channels))]


@torch.inference_mode(False)
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
    model = transformers_model(model)
    refuse_sharded(model, "prune_heads_")
    chosen = check_heads(find_attention(model, FAMILIES), heads)
    if is_quantized(model):
        raise HeadError(f"{type(model).__name__} is quantized; remove heads from the unquantized checkpoint instead")
    shared = _shared(model)
    modules = {path_in_base(model, site.module): _kept(model, site, removed, shared) for site, removed in chosen}
    if not modules:
        return
    edit = PrunedEdit(modules)
    remove_(model, edit)
    record_edit_(model, edit)


def _kept(model: PreTrainedModel, site: AttentionSite, removed: Sequence[int], shared: Collection[int]) -> KeptHeads:
    """Check that heads can be removed from a module, and describe what is left."""
    family = site.family
    kept = tuple(head for head in range(site.heads) if head not in removed)
    if not kept:
        raise HeadError(f"{site.name}: removing heads {list(removed)} leaves none; keep at least one head")
    if head_hooks(site.module):
        raise HeadError(f"{site.name}: something acts on its heads (a mask, a tap, dropout); remove that first")
    if family.keeps_heads:
        raise HeadError(
            f"{site.name}: heads cannot be removed from {family.name}, because {family.keeps_heads}; mask them "
            "instead (HeadMask)"
        )
    if site.key_value_heads != site.heads:
        raise HeadError(
            f"{site.name}: {site.heads} heads share {site.key_value_heads} heads of keys and values, so none can be "
            "removed alone; mask them instead (HeadMask)"
        )
    output = site.part(family.output)
    if hasattr(output, "alphas"):
        raise HeadError(
            f"{site.path(family.output)} mixes the heads, so each is part of all; call merge_alphas_ first, then "
            "remove heads"
        )
    _check_query_and_key(site, kept, shared)
    form = getattr(site.module, "value_form", None)
    path = family.value if form is None else f"{family.value}.proj"
    value = _linear(site, path, site.part(path), shared)
    _linear(site, family.output, output, shared)
    if (form is None and value.out_features % site.heads) or output.in_features != value.out_features:
        raise HeadError(
            f"{site.name}: values are {value.out_features} wide and the output projection reads "
            f"{output.in_features}; expected the same for {site.heads} heads; the {family.name} description does not "
            "fit this model"
        )
    value_width = value.out_features // site.heads if form is None else site.head_width
    return KeptHeads(
        kept=kept,
        before=site.heads,
        head_width=site.head_width,
        value_width=value_width,
        heads=family.heads,
        query=family.query,
        key=family.key,
        value=family.value,
        output=family.output,
    )


def _check_query_and_key(site: AttentionSite, kept: Sequence[int], shared: Collection[int]) -> None:
    """Check that channels can be cut from the query and key projections, or heads' rows from what replaces them."""
    if hasattr(site.module, "score_form"):
        form = site.part("score_form")
        projections = {path.removesuffix(".weight") for path, _ in form.head_rows() if path.endswith(".proj.weight")}
        for path in sorted(projections | {f"{form.key}.proj"}):
            _linear(site, path, site.part(path), shared)
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
    try:
        site.part("score_form").without(kept).multiple  # noqa: B018 (raises)
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
