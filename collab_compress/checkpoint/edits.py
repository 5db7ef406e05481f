"""The versioned list of a checkpoint's model edits, and where live models keep theirs.

A live model keeps each edit on the innermost model that holds the edited modules, by paths inside that model's base.
So the edits go wherever that model goes: saved by itself, or put under another head.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from collab_compress.errors import CheckpointError, UnsupportedModelError


def path_in_base(model: PreTrainedModel, module: nn.Module) -> str:
    """Path of `module` inside the base model, which is the same with and without a head.

    Raises:
        UnsupportedModelError: it lies outside.
    """
    for name, candidate in model.base_model.named_modules():
        if candidate is module:
            return str(name)
    outside = next(name for name, candidate in model.named_modules() if candidate is module)
    prefix = model.base_model_prefix
    raise UnsupportedModelError(
        f"{outside} lies outside the base model {prefix!r}, where a checkpoint could not find it again; "
        f"leave it out (modules='{prefix}.*'), or pass model.{prefix} alone"
    )


METHOD = "collab_compress"
MARK = "collab_edits"  # attribute of live models: the edits of modules that belong to no model inside
VERSION = 2


class ModelEdit(Protocol):
    """One change to a stock model's structure that can be replayed on a freshly built one."""

    @property
    def kind(self) -> str:
        """Name in checkpoints, by which `EDITS` finds what rebuilds it."""
        ...

    implementations: ClassVar[tuple[str, ...]]  # of attention that it works with; empty: all

    @property
    def modules(self) -> Mapping[str, Any]:
        """Path inside the base model of each module that is changed → how."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        ...

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelEdit":
        """Rebuild the edit from its kind and what `to_dict` gave."""
        ...

    def apply_(self, model: PreTrainedModel) -> None:
        """Change the structure of `model` in place; what is changed already is left as it is."""
        ...

    def finish_(self, model: PreTrainedModel) -> None:
        """Restore, in place, what loading weights does not: which parameters are frozen, say."""
        ...


EDITS: dict[str, type[ModelEdit]] = {}


class EditConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of an edited model.

    Args:
        edits: the edits in the order they were made, as objects or as their dictionaries.
        version: version of the stored form.

    Raises:
        CheckpointError: the checkpoint was written by another version, or holds an edit that is not known.
    """

    def __init__(self, edits: list[Any] | None = None, version: int = VERSION, **_: Any) -> None:
        if version != VERSION:
            raise CheckpointError(
                f"the checkpoint has version {version} of the collab_compress format; expected {VERSION}; upgrade "
                "collab-compress, or convert the model again"
            )
        self.quant_method = METHOD
        self.version = version
        if edits is not None and not isinstance(edits, list):
            raise CheckpointError(f"the checkpoint has edits {edits!r:.80}; expected a list")
        self.edits = [edit if hasattr(edit, "apply_") else _decode(edit) for edit in edits or []]

    def to_dict(self) -> dict[str, Any]:
        """Describe the edits in JSON types."""
        edits = [{"kind": edit.kind, **edit.to_dict()} for edit in self.edits]
        return {"quant_method": self.quant_method, "version": VERSION, "edits": edits}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of `to_dict`, as Transformers looks it up when `from_pretrained` gets a live config."""
        return self.to_dict().get(name, default)


def _decode(data: Any) -> ModelEdit:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in EDITS:
        raise CheckpointError(
            f"the checkpoint holds an edit of kind {kind!r}; this package knows {', '.join(sorted(EDITS))}; "
            "upgrade collab-compress"
        )
    return EDITS[kind].from_dict(data)


def models_in(model: PreTrainedModel) -> list[PreTrainedModel]:
    """List `model` and the models inside it, outer ones first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def with_modules(edit: ModelEdit, modules: Mapping[str, Any]) -> ModelEdit:
    """Return the same edit of other modules."""
    changed: ModelEdit = replace(edit, modules=modules)  # type: ignore[type-var]
    return changed


def keep_edit_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Store an edit of `model` on the innermost models that hold its modules, in place."""
    owners = {id(module): inner for inner in models_in(model) for module in inner.base_model.modules()}
    owned: dict[int, dict[str, Any]] = {}
    for name, spec in edit.modules.items():
        module = model.base_model.get_submodule(name)
        owner = owners[id(module)]
        owned.setdefault(id(owner), {})[path_in_base(owner, module)] = spec
    for inner in models_in(model):
        if id(inner) in owned:
            setattr(inner, MARK, [*vars(inner).get(MARK, ()), with_modules(edit, owned[id(inner)])])


def edits_of(model: PreTrainedModel) -> list[ModelEdit]:
    """Return the edits that made `model` what it is, by paths in its base model; empty for a stock model.

    Raises:
        CheckpointError: the model was rebuilt by the modelling code that its checkpoint ships.
        UnsupportedModelError: an edited model inside lies outside the base model.
    """
    config = getattr(model.config, "quantization_config", None)
    if getattr(config, "quant_method", None) == METHOD and not isinstance(config, EditConfig):
        raise CheckpointError(
            f"{type(model).__name__} was loaded before collab_compress was imported; import it first, then load"
        )
    return _merged(_edits_inside(model, inner) for inner in models_in(model) if MARK in vars(inner))


def _edits_inside(model: PreTrainedModel, inner: PreTrainedModel) -> list[ModelEdit]:
    """Return the edits that `inner` keeps, by paths in the base of `model`, without layers that were taken out."""
    place = path_in_base(model, inner.base_model)
    prefix = f"{place}." if place else ""
    known = {name for name, _ in inner.base_model.named_modules()}
    edits = []
    for edit in vars(inner)[MARK]:
        modules = {prefix + name: spec for name, spec in edit.modules.items() if name in known}
        if modules:
            edits.append(with_modules(edit, modules))
    return edits


def _merged(lists: Iterable[Sequence[ModelEdit]]) -> list[ModelEdit]:
    """Return one list of edits that keeps the order of each list, with edits of one kind joined where that allows."""
    merged: list[ModelEdit] = []
    for edits in lists:
        place = 0
        for edit in edits:
            kinds = [other.kind for other in merged[place:]]
            if edit.kind in kinds:
                place += kinds.index(edit.kind)
                merged[place] = with_modules(edit, {**merged[place].modules, **edit.modules})
            else:
                merged.insert(place, edit)
            place += 1
    return merged


def describes_edits(config: Any) -> bool:
    """Whether a model's config says that the model is edited."""
    edits = getattr(config, "quantization_config", None)
    method = edits.get("quant_method") if isinstance(edits, dict) else getattr(edits, "quant_method", None)
    return bool(method == METHOD)


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether something else than this package changed the weights of `model`, as its config says.

    Raises:
        CheckpointError: as `edits_of`.
    """
    edits_of(model)
    return getattr(model.config, "quantization_config", None) is not None and not describes_edits(model.config)
