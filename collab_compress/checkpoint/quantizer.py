"""The plug-in through which stock `save_pretrained` and `from_pretrained` store and rebuild edited models.

Without this package, Transformers would skip a `quantization_config` whose method it does not know, and build a stock
model with random weights in place of every projection that an edit replaced. So each stored config that describes
edits names a weights file that does not exist (`transformers_weights`): stock loading fails there, whatever flags are
passed. `EditQuantizer` removes the name before weights are looked for.
"""

import copy
import functools
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.checkpoint.edits import (
    MARK,
    METHOD,
    STORED_METHOD,
    EditConfig,
    ModelEdit,
    configs_inside,
    edits_of,
    follow_configs_,
    is_edits,
    keep_on_one_device_,
    kept_conversions,
    models_in,
    path_in_base,
    record_edit_,
    save_apart_,
    with_modules,
)
from collab_compress.errors import CheckpointError
from collab_compress.transformers_parts import (
    QUANTIZATION_CONFIGS,
    QUANTIZERS,
    UPDATES_CONVERSIONS,
    AutoHfQuantizer,
    HfQuantizer,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    weight_conversions_of,
)

# The error of a stock load shows it; names the first version that reads the format `VERSION`.
GUARD = f"install-collab-compress-0.1.0-and-import-{METHOD}-before-loading.safetensors"

_logger = logging.getLogger(__name__)
QUANTIZES = ("torchao", "bitsandbytes")  # methods that quantize the weights of edited models while they are loaded
LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # in the path of a module
OTHER = "quantization"  # attribute of an `EditConfig`: the config of such a method


# Saving.


DESCRIBES = "collab_describes_edits"  # attribute of a `save_pretrained` that stores edits


def describe_edits_when_saving() -> None:
    """Make `save_pretrained` store edits in configs, with the guard, which Transformers itself leaves out."""
    save, describe = PreTrainedModel.save_pretrained, PretrainedConfig.to_diff_dict
    if getattr(save, DESCRIBES, False):  # the package is imported again
        return

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        with _describing(self):
            return save(self, *args, **options)

    @functools.wraps(describe)
    def to_diff_dict(self: PretrainedConfig) -> dict[str, Any]:
        return _guarded(describe(self))

    setattr(save_pretrained, DESCRIBES, True)
    PreTrainedModel.save_pretrained = save_pretrained
    PretrainedConfig.to_diff_dict = to_diff_dict


@contextmanager
def _describing(model: PreTrainedModel) -> Iterator[None]:
    """Make the configs of `model` and of its parts describe their edits within this context."""
    follow_configs_(model)
    description = vars(model.config).get("quantization_config")
    is_edited = any(MARK in vars(inner) for inner in models_in(model))
    if not (is_edited if description is None else is_edits(description)):  # it is quantized otherwise
        yield
        return
    if is_edited:
        for inner in models_in(model):
            save_apart_(inner)
    described = [(config, edits_of(owner)) for config, owner in _config_owners(model)]
    before = [vars(config).pop("quantization_config", None) for config, _ in described]
    try:
        for config, edits in described:
            if edits:
                config.quantization_config = EditConfig(edits)
        yield
    finally:
        for (config, _), description in zip(described, before, strict=True):
            vars(config).pop("quantization_config", None)
            if description is not None:
                config.quantization_config = description


def _config_owners(model: PreTrainedModel) -> list[tuple[PretrainedConfig, PreTrainedModel]]:
    """Pair the config of `model`, and those in it, with the outermost model that each belongs to.

    A model inside may have a copy of the config that the outer config holds.
    """
    owners = [(model.config, model)]
    for config in vars(model.config).values():
        if isinstance(config, PretrainedConfig):
            same = [inner for inner in models_in(model) if inner.config is config]
            equal = [inner for inner in models_in(model) if _settings(inner.config) == _settings(config)]
            owners += [(config, owner) for owner in (*same, *equal)[:1]]
    return owners


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {"type": type(config), **config.to_dict(), "quantization_config": None}


def _guarded(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored config with the guard in it and in each config inside that describes edits."""
    guarded = {name: _guarded(value) if isinstance(value, dict) else value for name, value in stored.items()}
    if is_edits(stored.get("quantization_config")):
        guarded["transformers_weights"] = GUARD
    return guarded


# Loading.


class EditQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replays the edits of a checkpoint on the empty model.

    Nothing is quantized, unless a subclass of this and of a stock quantizer does so with the weights that it loads.
    """

    def __init__(self, quantization_config: EditConfig, **options: Any) -> None:
        other = getattr(quantization_config, OTHER, None)
        super().__init__(other or quantization_config, **options | ({"pre_quantized": False} if other else {}))
        self.edits, self.quantizes = quantization_config.edits, other is not None

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Remove the guard from the config, and from those inside."""
        for inner in configs_inside(config):
            if getattr(inner, "transformers_weights", None) == GUARD:
                del inner.transformers_weights
        return config

    update_tp_plan = update_attn_implementation  # older versions pass the config here first

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Drop weight conversions that do not apply to edited checkpoints, and refuse weights that would be lost."""
        conversions = kept_conversions(super().update_weight_conversions(weight_conversions, *model))
        self._refuse_lost_weights(conversions)
        return conversions

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **options: Any
    ) -> PreTrainedModel:
        self.model, self.stored, self.absent = model, list[str](), list[str]()
        for file in checkpoint_files or ():
            if str(file).endswith(".safetensors"):
                with safe_open(file, framework="pt") as opened:
                    self.stored += opened.keys()
        known = [name for name, _ in model.base_model.named_modules()]
        stored_edits, self.edits = self.edits, []
        for edit in stored_edits:
            paths = {name: _path_in(known, name, model.base_model_prefix) for name in edit.modules}
            self.absent += [name for name, path in paths.items() if path is None]  # a decoder lacks the encoder's
            modules = {path: edit.modules[name] for name, path in paths.items() if path is not None}
            if modules:
                self.edits.append(with_modules(edit, modules))
        for edit in self.edits:
            _check_heads(edit, model)
            edit.apply_(model)
            keep_on_one_device_(model, edit)
        if not UPDATES_CONVERSIONS:
            self._refuse_lost_weights(kept_conversions(weight_conversions_of(model)))
        super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **options)
        return model

    def _refuse_lost_weights(self, conversions: list[Any]) -> None:
        """Refuse a checkpoint that lacks weights of an edited module, or of one like those in `absent`.

        Other weights of a module in place of its own are those of an edit that the config does not describe.
        """
        if not self.stored:
            return
        model = self.model
        expected = model.state_dict()
        used = copy.deepcopy(conversions)  # conversions record their use
        renamings = [conversion for conversion in used if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in used if isinstance(conversion, WeightConverter)]
        prefix = model.base_model_prefix
        loaded = {rename_source_key(name, renamings, converters, prefix, expected)[0] for name in self.stored}
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        edited = {name for edit in self.edits for name in edit.modules}
        like_absent = {LAYER_NUMBER.sub("*", ".".join(name.split(".")[-2:])) for name in self.absent}
        unknown = sorted(loaded - expected.keys())
        for name in sorted(expected.keys() - loaded - set(self.stored) - tied):
            if _lies_in(name, edited) or _lies_in(LAYER_NUMBER.sub("*", name), like_absent):
                saved = model.config.architectures or ["the class that was saved"]
                advice = f"load it as {' or '.join(saved)}"
                if type(model).__name__ in saved:
                    advice = "its weights are not those that config.json was saved with, so save the model again"
                raise CheckpointError(
                    f"{type(model).__name__}: the checkpoint describes converted attention, but holds no {name}; "
                    f"{advice}"
                )
            module = ".".join(name.removeprefix(f"{prefix}.").split(".")[:-2])  # of a projection's weight
            other = next((key for key in unknown if module and _lies_in(key, [module])), None)
            if other is not None:
                raise CheckpointError(
                    f"{type(model).__name__}: the checkpoint holds {other} in place of {name}, and its config "
                    "describes no such edit; restore the config.json that it was saved with"
                )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        del self.model
        super()._process_model_after_weight_loading(model, **options)
        for edit in self.edits:
            record_edit_(model, edit)
        if self.quantizes:
            model.config.quantization_config = self.quantization_config
        else:  # the weights are ordinary floats
            for name in ("hf_quantizer", "quantization_method", "is_quantized"):
                vars(model).pop(name, None)
            for inner in models_in(model):
                for config in configs_inside(inner.config):
                    for name in ("_is_quantized", "quantization_config"):
                        vars(config).pop(name, None)
        for edit in self.edits:
            edit.finish_(model)
        return model

    def is_serializable(self) -> bool:
        """Return whether `save_pretrained` works: a config describes either edits or quantized weights."""
        if self.quantizes:
            _logger.warning("save the converted model, and quantize it whenever it is loaded")
        return not self.quantizes

    @property
    def is_trainable(self) -> bool:
        """Return whether training works."""
        return not self.quantizes or bool(super().is_trainable)


def quantizer_of(config: EditConfig, **options: Any) -> EditQuantizer:
    """Return the quantizer that replays edits, and quantizes as the user asked at loading."""
    other = getattr(config, OTHER, None)
    if other is None:
        return EditQuantizer(config, **options)
    stock = type(AutoHfQuantizer.from_config(other, pre_quantized=False))
    both: type[EditQuantizer] = type(f"Edit{stock.__name__}", (EditQuantizer, stock), {})
    return both(config, **options)


def take_another_quantization_config() -> None:
    """Make `from_pretrained` of an edited model take a `quantization_config` of `QUANTIZES`, in place.

    Transformers refuses a config of another class than the checkpoint's, which describes the edits.
    """
    merge = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merge_quantization_configs(stored: Any, passed: Any) -> Any:
        method = getattr(getattr(passed, "quant_method", None), "value", None)
        config = EditConfig.from_dict(stored) if isinstance(stored, dict) and is_edits(stored) else stored
        if method not in QUANTIZES or not isinstance(config, EditConfig):
            return merge(stored, passed)
        config = copy.copy(config)
        setattr(config, OTHER, passed)
        return config

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_quantization_configs)


def _check_heads(edit: ModelEdit, model: PreTrainedModel) -> None:
    """Refuse an edit whose modules have another number of heads, which the config may say without other shapes."""
    heads = {}
    for site in find_attention(model):
        for module in (site.module, site.part(site.paths.output)):
            heads[path_in_base(model, module)] = site.heads
    for name, expected in edit.heads.items():
        if heads.get(name, expected) != expected:
            raise CheckpointError(
                f"the stored edit of {name} has {expected} heads, but the config makes {heads[name]}; restore the "
                "config.json that was saved with the weights"
            )


def _path_in(known: Sequence[str], name: str, prefix: str) -> str | None:
    """Return the module path of a stored path, whose prefix may differ between a base model and one with a head."""
    for path in (name, name.removeprefix(f"{prefix}.")):
        if path in known:
            return path
    longer = [path for path in known if path.endswith(f".{name}")]
    return longer[0] if len(longer) == 1 else None


def _lies_in(name: str, paths: Collection[str]) -> bool:
    """Return whether a path contains one of `paths`, at any depth."""
    return any(f".{path}." in f".{name}" for path in paths)


def register_checkpoint() -> None:
    """Register the plug-in with Transformers."""
    describe_edits_when_saving()
    QUANTIZATION_CONFIGS[STORED_METHOD] = EditConfig
    QUANTIZERS[METHOD] = quantizer_of
    take_another_quantization_config()
