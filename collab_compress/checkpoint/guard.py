"""Configs that stock Transformers cannot load without this package, and that no two models share.

Transformers skips a `quantization_config` whose method it does not know, and would go on to build a stock model with
random weights in place of every projection that an edit replaced. So the stored config names a weights file that does
not exist (`transformers_weights`): stock loading stops there, whatever flags are given. `EditQuantizer` takes the
name out before weights are looked for. Transformers itself takes it out of every config that it saves, so a config
that is read is made one that puts it in again (`keep_guards_of_configs_that_are_read`).
"""

import copy
import functools
import gc
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.checkpoint.edits import METHOD, EditConfig, describes_edits

# Read in the error of a stock load; names the first version that reads the format `VERSION`.
GUARD = f"pip-install-collab-compress-0.1.0-and-import-{METHOD}-before-loading.safetensors"


class GuardedConfig:
    """Puts the guard into what a config of an edited model stores; mixed into the class of that config."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Leave out what Transformers does to classes of configs: this one adds no field."""

    @property
    def num_key_value_heads(self) -> int:
        """How many heads wide keys are at most, for paged caches; other configs have no such attribute."""
        found = [
            heads for edit in getattr(vars(self).get("quantization_config"), "edits", ()) for heads in _pieces(edit)
        ]
        stored: int | None = vars(self).get("num_key_value_heads")
        if stored is not None:  # where heads share keys, converted keys are never wider than those
            return stored
        most = max(found, default=0)
        if most <= self.num_attention_heads:  # type: ignore[attr-defined]
            raise AttributeError("num_key_value_heads")
        return most

    def to_diff_dict(self) -> dict[str, Any]:
        """Describe the config as it is stored."""
        stored: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return {**stored, "transformers_weights": GUARD} if describes_edits(self) else stored

    def __copy__(self) -> Any:  # compiled decoders copy their config, where making a class could not be traced
        made: Any = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, copied: dict[int, Any]) -> Any:
        made = copied[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), copied))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_config, (type(self).__bases__[1],), dict(vars(self))


def _pieces(edit: Any) -> list[int]:
    return [spec.key_pieces for spec in edit.modules.values() if hasattr(spec, "key_pieces")]


@functools.cache
def _guarded_class(stock: Any) -> Any:
    """Give the class of guarded configs of one kind; it goes by the same name, by which Transformers looks it up."""
    bases: tuple[type, ...] = (GuardedConfig, stock)
    return type(stock.__name__, bases, {"__module__": stock.__module__})


def _empty_config(stock: Any) -> PretrainedConfig:
    """Make a guarded config without attributes, as copying and unpickling do."""
    made = _guarded_class(stock)
    config: PretrainedConfig = made.__new__(made)
    return config


def guard_(config: PretrainedConfig, edits: EditConfig) -> None:
    """Describe edits in a config, in place, and let it store the guard with them."""
    config.quantization_config = edits
    _let_guard_(config)


def keep_guards_of_configs_that_are_read() -> None:
    """Let a config that Transformers reads store the guard again, where it describes edits; from now on."""
    read: Any = vars(PretrainedConfig)["from_dict"].__func__
    if hasattr(read, "__wrapped__"):  # by an earlier call
        return

    @functools.wraps(read)
    def from_dict(cls: Any, *given: Any, **options: Any) -> Any:
        found = read(cls, *given, **options)
        config = found[0] if isinstance(found, tuple) else found
        if describes_edits(config):
            _let_guard_(config)
        return found

    PretrainedConfig.from_dict = classmethod(from_dict)


def _let_guard_(config: PretrainedConfig) -> None:
    if not isinstance(config, GuardedConfig):
        stock: Any = type(config)
        config.__class__ = _guarded_class(stock)


def unguard_(config: PretrainedConfig) -> None:
    """Make a config that of a stock model again, in place."""
    if isinstance(config, GuardedConfig):
        config.__class__ = type(config).__bases__[1]
    vars(config).pop("quantization_config", None)


def take_out_guard_(config: PretrainedConfig) -> None:
    """Remove the name of the missing file from a config that was read, in place."""
    if getattr(config, "transformers_weights", None) == GUARD:
        del config.transformers_weights


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """List the configs that `model` and the models inside it could be saved with, each once."""
    found = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    return list(found.values())


def own_configs_(model: PreTrainedModel) -> None:
    """Give `model`, the models inside it and those around it a copy of their config, in place.

    Models built from one config share the object, and edits of one must not be stored with another. A model around
    `model` (a classifier whose body is edited) holds the same object and must follow; nothing leads from a module to
    what holds it but the garbage collector's records.
    """
    copied: dict[int, Any] = {}
    for held in _holders(model):
        for name, value in held.items():
            if name == "config" or isinstance(value, PretrainedConfig):
                held[name] = copy.deepcopy(value, copied)


def _holders(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Attributes of all modules in `model`, and of modules around it that hold its config."""
    found = {id(vars(module)): vars(module) for module in model.modules()}
    for holder in gc.get_referrers(model.config):
        held = vars(holder) if issubclass(type(holder), nn.Module) else holder
        children = held.get("_modules") if issubclass(type(held), dict) else None
        inside = [part for child in (children or {}).values() if child is not None for part in child.modules()]
        if any(part is model for part in inside):
            found[id(held)] = held
            found.update({id(vars(part)): vars(part) for part in inside})
    return list(found.values())
