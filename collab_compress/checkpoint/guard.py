"""Guard in the configs of edited models, so that stock Transformers cannot load them without this package.

Transformers skips a `quantization_config` whose method it does not know, and would go on to build a stock model with
random weights in place of every projection that an edit replaced. So each stored config that describes edits names a
weights file that does not exist (`transformers_weights`): stock loading stops there, whatever flags are given.
`EditQuantizer` takes the name out before weights are looked for.
"""

import copy
import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.checkpoint.edits import MARK, METHOD, EditConfig, describes_edits, edits_of, models_in
from collab_compress.transformers_parts import PrefixChange, WeightConverter, weight_conversions_of

# Read in the error of a stock load; names the first version that reads the format `VERSION`.
GUARD = f"pip-install-collab-compress-0.1.0-and-import-{METHOD}-before-loading.safetensors"


def describe_edits_when_saving() -> None:
    """Register hooks that store edits in saved configs, together with the guard.

    A model may have got an edited body after its config was made, or share its config with a model inside; only
    `save_pretrained` knows which of them is saved. Transformers takes the name of a weights file out of each config
    that it saves.
    """
    save, describe = PreTrainedModel.save_pretrained, PretrainedConfig.to_diff_dict

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        with _described(self):
            return save(self, *args, **options)

    @functools.wraps(describe)
    def to_diff_dict(self: PretrainedConfig) -> dict[str, Any]:
        return _guarded(describe(self))

    PreTrainedModel.save_pretrained = save_pretrained
    PretrainedConfig.to_diff_dict = to_diff_dict


@contextmanager
def _described(model: PreTrainedModel) -> Iterator[None]:
    """Make the configs of `model` and of its parts describe their edits within this context."""
    description = vars(model.config).get("quantization_config")
    edited = any(MARK in vars(inner) for inner in models_in(model))
    if description is None:
        skipped = not edited
    else:  # quantized otherwise, or edited by modelling code that was shipped, which does this itself
        skipped = not (describes_edits(model.config) and isinstance(description, EditConfig | dict))
    if skipped:
        yield
        return
    owners = _owned_configs(model)
    if edited:
        for inner in models_in(model):
            save_apart_(inner)
    before = [vars(config).get("quantization_config") for config, _ in owners]
    for config, owner in owners:
        describe_(config, owner)
    try:
        yield
    finally:
        for (config, _), description in zip(owners, before, strict=True):
            vars(config).pop("quantization_config", None)
            if description is not None:
                config.quantization_config = description


def _owned_configs(model: PreTrainedModel) -> list[tuple[PretrainedConfig, PreTrainedModel]]:
    """Pair the config of `model`, and those in it, with the outermost model that each is of.

    A model inside that was edited by itself has got a copy of the config that the outer config holds.
    """
    _, *inside = configs_of(model)
    owners = [(model.config, model)]
    for config in vars(model.config).values():
        if isinstance(config, PretrainedConfig):
            same = [owner for other, owner in inside if other is config]
            alike = [owner for other, owner in inside if _settings(other) == _settings(config)]
            owners += [(config, owner) for owner in (*same, *alike)[:1]]
    return owners


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {"type": type(config), **config.to_dict(), "quantization_config": None}


def save_apart_(model: PreTrainedModel) -> None:
    """Make a model save queries, keys and values as separate tensors, in place.

    Transformers saves those of some families in one tensor, and would take it apart again in equal thirds.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as `save_pretrained` finds them
        known = weight_conversions_of(model, add_legacy=False)
        conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
    if len(kept_conversions(conversions)) < len(conversions):
        model._weight_conversions = kept_conversions(conversions)


def kept_conversions(conversions: Sequence[Any]) -> list[Any]:
    """Return the weight conversions without those that take a stored tensor apart."""
    return [
        conversion
        for conversion in conversions
        if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) == 1
    ]


def describe_(config: PretrainedConfig, model: PreTrainedModel) -> None:
    """Store the edits of `model` in a config, in place; without edits the config is a stock one."""
    edits = edits_of(model)
    if edits:
        config.quantization_config = EditConfig(edits)
    elif describes_edits(config):
        del config.quantization_config


def _guarded(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a config as it is stored, with the guard in it and in each config inside that describes edits."""
    guarded = {name: _guarded(value) if isinstance(value, dict) else value for name, value in stored.items()}
    edits = stored.get("quantization_config")
    if isinstance(edits, dict) and edits.get("quant_method") == METHOD:
        guarded["transformers_weights"] = GUARD
    return guarded


def take_out_guard_(config: PretrainedConfig) -> None:
    """Remove the name of the missing file from a config that was read, and from those inside, in place."""
    if getattr(config, "transformers_weights", None) == GUARD:
        del config.transformers_weights
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            take_out_guard_(value)


def configs_of(model: PreTrainedModel) -> list[tuple[PretrainedConfig, PreTrainedModel]]:
    """List the configs of `model` and the models inside it, each once, with the outermost model that it is of."""
    found: dict[int, tuple[PretrainedConfig, PreTrainedModel]] = {}
    for inner in models_in(model):
        found.setdefault(id(inner.config), (inner.config, inner))
    return list(found.values())


def own_configs_(model: PreTrainedModel) -> None:
    """Copy the configs of `model`, of the models inside it and of those around it, in place.

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
