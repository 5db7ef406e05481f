"""Model edits: the versioned list in a checkpoint, and how live models keep it.

A live model keeps each edit on the innermost model that holds the edited modules, by paths inside that model's base.
So the edits are saved with that model, by itself or inside another one. Configs describe them while they are saved.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from collab_compress.errors import CheckpointError, UnsupportedModelError
from collab_compress.transformers_parts import PrefixChange, WeightConverter, weight_conversions_of

METHOD = "collab_compress"
STORED_METHOD = (
    f"{METHOD} (no quantization: install the package collab-compress and `import {METHOD}` before loading it, "
    "and leave quantization_config as it is)"
)
"""`quant_method` of stored configs; Transformers without this package shows it before advice to delete the edits."""
MARK = "collab_edits"  # attribute of live models: their edits
BEFORE = "collab_configs_before"  # attribute of models that got a config of their own: those before
VERSION = 2


class ModelEdit(Protocol):
    """A change to a stock model's structure that can be replayed on a freshly built one."""

    @property
    def kind(self) -> str:
        """Name in checkpoints, the key in `EDITS`."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """Path inside the base model of each changed module → the change."""

    @property
    def heads(self) -> Mapping[str, int]:
        """Path of each changed module → the number of heads that its attention has before the edit."""

    def to_dict(self) -> dict[str, Any]:
        """Return the edit in JSON types."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelEdit":
        """Rebuild the edit from its kind and what `to_dict` returned."""

    def apply_(self, model: PreTrainedModel) -> None:
        """Change the structure of `model` in place; modules that are changed already stay as they are."""

    def finish_(self, model: PreTrainedModel) -> None:
        """Restore, in place, what loading weights does not, such as frozen parameters."""


EDITS: dict[str, type[ModelEdit]] = {}


class EditConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of an edited model.

    Args:
        edits: the edits in the order they were made, as objects or as dictionaries.
        version: version of the stored form.

    Raises:
        CheckpointError: the checkpoint was written by another version, or holds an unknown or invalid edit.
    """

    def __init__(self, edits: list[Any] | None = None, version: int = VERSION, **_: Any) -> None:
        if version != VERSION:
            raise CheckpointError(
                f"the checkpoint has version {version} of the collab_compress format; expected {VERSION}; upgrade "
                "collab-compress, or convert the model again"
            )
        if edits is not None and not isinstance(edits, list):
            raise CheckpointError(f"the checkpoint has edits {edits!r:.80}; expected a list")
        self.quant_method = METHOD
        self.version = version
        self.edits: list[ModelEdit] = []
        for edit in edits or []:
            if not hasattr(edit, "apply_"):
                kind = edit.get("kind") if isinstance(edit, Mapping) else None
                if not isinstance(kind, str) or kind not in EDITS:
                    raise CheckpointError(
                        f"the checkpoint holds an edit of kind {kind!r}; this package knows "
                        f"{', '.join(sorted(EDITS))}; upgrade collab-compress"
                    )
                edit = EDITS[kind].from_dict(edit)
            self.edits.append(edit)

    def to_dict(self) -> dict[str, Any]:
        """Return the edits in JSON types."""
        edits = [{"kind": edit.kind, **edit.to_dict()} for edit in self.edits]
        return {"quant_method": STORED_METHOD, "version": VERSION, "edits": edits}


# Edits on live models.


def path_in_base(model: PreTrainedModel, module: nn.Module) -> str:
    """Return the path of `module` inside the base model, which is the same with and without a head."""
    for name, candidate in model.base_model.named_modules():
        if candidate is module:
            return str(name)
    outside = next(name for name, candidate in model.named_modules() if candidate is module)
    prefix = model.base_model_prefix
    raise UnsupportedModelError(
        f"{outside} lies outside the base model {prefix!r}, where a checkpoint could not find it again; "
        f"leave it out (modules='{prefix}.*'), or pass model.{prefix} alone"
    )


def models_in(model: PreTrainedModel) -> list[PreTrainedModel]:
    """List `model` and the models inside it, outer ones first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def with_modules(edit: ModelEdit, modules: Mapping[str, Any]) -> ModelEdit:
    """Return the same edit of other modules."""
    changed: ModelEdit = replace(edit, modules=modules)  # type: ignore[type-var]
    return changed


def edits_of(model: PreTrainedModel) -> list[ModelEdit]:
    """Return the edits of `model`, by paths in its base model; empty for a stock model."""
    config = getattr(model.config, "quantization_config", None)
    if getattr(config, "quant_method", None) == METHOD and not isinstance(config, EditConfig):
        raise CheckpointError(
            f"{type(model).__name__} was loaded before collab_compress was imported; import it first, then load"
        )
    edits = []
    for inner in models_in(model):
        if MARK in vars(inner):
            path = path_in_base(model, inner.base_model)
            prefix = f"{path}." if path else ""
            known = {name for name, _ in inner.base_model.named_modules()}  # without layers that were removed
            edits.append(
                [
                    with_modules(edit, {prefix + name: edit.modules[name] for name in edit.modules if name in known})
                    for edit in vars(inner)[MARK]
                    if not known.isdisjoint(edit.modules)
                ]
            )
    return _merged(edits)


def _merged(lists: Iterable[Sequence[ModelEdit]]) -> list[ModelEdit]:
    """Return one list of edits in the order of each list, with edits of one kind joined where that allows."""
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


def record_edit_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Record on the innermost models that hold its modules, in place, that `edit` was applied, to be stored."""
    owners = {id(module): inner for inner in models_in(model) for module in inner.base_model.modules()}
    owned: dict[int, dict[str, Any]] = {}
    for name, spec in edit.modules.items():
        module = model.base_model.get_submodule(name)
        owner = owners[id(module)]
        owned.setdefault(id(owner), {})[path_in_base(owner, module)] = spec
    for inner in models_in(model):
        if id(inner) in owned:
            setattr(inner, MARK, [*vars(inner).get(MARK, ()), with_modules(edit, owned[id(inner)])])
    _keep_weights_(model)
    keep_on_one_device_(model, edit)


def forget_edits_(model: PreTrainedModel, kind: str) -> None:
    """Record on a live model, in place, that its edits of this kind were undone."""
    for inner in models_in(model):
        kept = [edit for edit in vars(inner).pop(MARK, ()) if edit.kind != kind]
        if kept:
            setattr(inner, MARK, kept)
    parts = (type(model), *model.children())
    model._no_split_modules = {name for part in parts for name in getattr(part, "_no_split_modules", None) or ()}
    for edit in edits_of(model):
        keep_on_one_device_(model, edit)
    _keep_weights_(model)


def _keep_weights_(model: PreTrainedModel) -> None:
    """Keep a model that is built around `model` from initialising its new parts again, in place."""
    for part in model.modules():
        part._is_hf_initialized = True


def keep_on_one_device_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Forbid `device_map="auto"` to split an edited module, in place, because it holds parameters itself."""
    edited = {type(model.base_model.get_submodule(name)).__name__ for name in edit.modules}
    model._no_split_modules = {*(model._no_split_modules or ()), *edited}


@contextmanager
def all_or_nothing(model: PreTrainedModel, weights: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore the modules of `model` and their configs, in place, if the block fails or is interrupted.

    Parameters that were replaced are restored. Values that were written into tensors are not.

    Args:
        weights: parameters that stay, and get new `data`.
    """
    classes = [(module, type(module)) for module in model.modules()]
    attributes = [vars(module) for module in model.modules()]
    for value in [value for holder in attributes for value in holder.values()]:
        if isinstance(value, dict):  # parameters, modules inside, hooks
            attributes.append(value)
        elif isinstance(value, PretrainedConfig):
            attributes += map(vars, configs_inside(value))
    before = [(holder, dict(holder)) for holder in attributes]
    data = [(weight, weight.data) for weight in weights]
    try:
        yield
    except BaseException:
        for module, stock_class in classes:
            module.__class__ = stock_class
        for holder, values in before:
            holder.clear()
            holder.update(values)
        for weight, values_before in data:
            weight.data = values_before
        raise


def configs_inside(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a config and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from configs_inside(value)


# Edits in configs.


def is_edits(description: Any) -> bool:
    """Return whether a `quantization_config`, an object or a dictionary, describes edits."""
    is_stored = isinstance(description, dict)
    method = description.get("quant_method") if is_stored else getattr(description, "quant_method", None)
    return method in (METHOD, STORED_METHOD)


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether `model` is quantized by something other than this package, by its config."""
    edits_of(model)
    description = getattr(model.config, "quantization_config", None)
    return description is not None and not is_edits(description)


def save_apart_(model: PreTrainedModel) -> None:
    """Make a model save queries, keys and values as separate tensors, in place.

    Transformers saves those of some families in one tensor, and would split it into equal thirds when loading.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as `save_pretrained` finds them
        known = weight_conversions_of(model, add_legacy=False)
        conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
    kept = kept_conversions(conversions)
    if len(kept) < len(conversions):
        model._weight_conversions = kept


def kept_conversions(conversions: Sequence[Any]) -> list[Any]:
    """Return the weight conversions without those that split a stored tensor."""
    return [
        conversion
        for conversion in conversions
        if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) == 1
    ]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model, by their names."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def built_shapes(model: PreTrainedModel, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a stock model of this config; none if it cannot be built."""
    try:
        with torch.device("meta"):
            return shapes_of(type(model)(copy.deepcopy(config)))
    except Exception:  # whatever a config or a model raises
        return {}


def configs_of(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the configs that `model` and its modules hold, and those inside them, each once."""
    held = (value for module in model.modules() for value in vars(module).values())
    configs = (part for value in held if isinstance(value, PretrainedConfig) for part in configs_inside(value))
    return list({id(config): config for config in configs}.values())


def own_configs_(model: PreTrainedModel, changed: PretrainedConfig | None) -> list[PretrainedConfig]:
    """Give `model` and the models inside it configs of their own, in place; return them and those inside them.

    Models that were built from one config share it. A model around `model` takes the copy when it is saved
    (`follow_configs_`). Settings that differ in `changed`, a copy of the model's config, are set in the model's own
    config, and in copies of it that models inside hold.
    """
    copied: dict[int, Any] = {}
    for inner in models_in(model):
        setattr(inner, BEFORE, (*vars(inner).get(BEFORE, ()), inner.config))
    for module in model.modules():
        for name, value in vars(module).items():
            if name == "config" or isinstance(value, PretrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copied)
    configs = configs_of(model)
    pairs = [] if changed is None else zip(configs_inside(model.config), configs_inside(changed), strict=True)
    for part, source in list(pairs):
        before = part.to_dict()
        changes = {name: new for name, new in source.to_dict().items() if new != before.get(name)}
        for config in [config for config in configs if type(config) is type(part)]:
            for name, new in changes.items():
                if not isinstance(new, dict) and getattr(config, name, None) == before.get(name):
                    setattr(config, name, new)
    return configs


def follow_configs_(model: PreTrainedModel) -> None:
    """Give `model` the config of a model inside that was built with the same one and has its own now, in place."""
    for inner in models_in(model):
        if any(before is model.config for before in vars(inner).get(BEFORE, ())):
            model.config = inner.config
