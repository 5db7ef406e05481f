"""The plug-in through which stock `from_pretrained` rebuilds edited models."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer

from collab_compress.checkpoint.edits import MARK, METHOD, EditConfig, ModelEdit, edits_of
from collab_compress.checkpoint.guard import (
    configs_of,
    guard_,
    keep_guards_of_configs_that_are_read,
    own_configs_,
    take_out_guard_,
    unguard_,
)
from collab_compress.errors import UnsupportedModelError

# What else is done to an edited model once its weights are loaded; filled where the package is imported.
AFTER_LOADING: list[Callable[[PreTrainedModel], None]] = []


class EditQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replays the edits of a checkpoint on the empty model; nothing is quantized."""

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Take out the guard against loading without this package, and refuse attention that could not run."""
        take_out_guard_(config)
        asked = config._attn_implementation
        for edit in self.quantization_config.edits:
            if asked is not None and edit.implementations and asked not in edit.implementations:
                raise UnsupportedModelError(
                    f"this checkpoint holds {edit.kind} attention, which runs with attn_implementation 'eager' or "
                    f"'sdpa', got {asked!r}; load it with attn_implementation='sdpa'"
                )
        return config

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Leave out of what the weights are loaded by what edited models are not saved by."""
        found: list[Any] = super().update_weight_conversions(weight_conversions, model)
        return _kept_conversions(found) if self.quantization_config.edits else found

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> PreTrainedModel:
        stored = _stored_shapes(checkpoint_files or ())
        if _are_dense(stored, model, self.quantization_config.edits):
            self.quantization_config.edits = []
        for edit in self.quantization_config.edits:
            edit.apply_(model)
            _keep_whole_(model, edit)
        if self.quantization_config.version == 1:  # guarded by empty tensors
            empty = {f"^{re.escape(name)}$" for name, shape in stored.items() if 0 in shape}
            model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *empty}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        edits = self.quantization_config.edits
        _describe_(model, edits)
        _mark_as_ordinary_(model)
        for edit in edits:
            edit.finish_(model)
        for finish in AFTER_LOADING if edits else ():
            finish(model)
        return model

    def is_serializable(self) -> bool:
        """Say that `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Say that training works."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Say that `torch.compile` works."""
        return True


def record_edit_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Note on a live model, in place, that `edit` was applied, so that `save_pretrained` stores it.

    The model gets its own copy of a config that it may share with other models.
    """
    edits = [*edits_of(model), edit]
    own_configs_(model)
    _describe_(model, edits)
    _keep_whole_(model, edit)


def forget_edits_(model: PreTrainedModel, kind: str) -> None:
    """Note on a live model, in place, that its edits of this kind were undone; with none left it is a stock one."""
    left = [edit for edit in edits_of(model) if edit.kind != kind]
    _describe_(model, left)
    model._no_split_modules = {
        name for part in (type(model), *model.children()) for name in getattr(part, "_no_split_modules", None) or ()
    }
    for edit in left:
        _keep_whole_(model, edit)


def _describe_(model: PreTrainedModel, edits: Sequence[ModelEdit]) -> None:
    """Let `model` and its configs say that it has these edits, in place; without any they are a stock model's."""
    for config in configs_of(model):
        if edits:
            guard_(config, EditConfig(list(edits)))
        else:
            unguard_(config)
    for part in model.modules():
        part._is_hf_initialized = True  # else a model built around this one would initialise new parts once more
        if isinstance(part, PreTrainedModel):
            vars(part).pop(MARK, None)
            if edits:
                setattr(part, MARK, True)
                _save_apart_(part)


def _save_apart_(model: PreTrainedModel) -> None:
    """Let a model keep queries, keys and values apart in its checkpoint, in place.

    Transformers saves those of some families in one tensor, and would take it apart again in equal thirds.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as `save_pretrained` finds them
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in found if not isinstance(each, PrefixChange)]
    if len(_kept_conversions(conversions)) < len(conversions):
        model._weight_conversions = _kept_conversions(conversions)


def _kept_conversions(conversions: Sequence[Any]) -> list[Any]:
    """Leave out what takes a stored tensor apart."""
    return [each for each in conversions if not isinstance(each, WeightConverter) or len(each.target_patterns) == 1]


def _mark_as_ordinary_(model: PreTrainedModel) -> None:
    """Remove, in place, what Transformers notes on quantized models: the weights are ordinary floats."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    for config in configs_of(model):
        vars(config).pop("_is_quantized", None)


def _keep_whole_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Let `device_map="auto"` cut no edited module in two, in place: what it holds itself would be left behind."""
    edited = {type(model.base_model.get_submodule(name)).__name__ for name in edit.modules}
    model._no_split_modules = {*(model._no_split_modules or ()), *edited}


def _stored_shapes(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of the tensors in safetensors files."""
    shapes = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return shapes


def _are_dense(stored: dict[str, tuple[int, ...]], model: PreTrainedModel, edits: Sequence[ModelEdit]) -> bool:
    """Whether tensors are those of a stock model whose config describes edits of another model.

    That is what a model built from an edited model's config saves. What tells the two apart is the names and shapes
    that edits change.
    """
    if not stored or not edits:
        return False
    edited = copy.deepcopy(model)
    for edit in edits:
        edit.apply_(edited)
    prefix = f"{model.base_model_prefix}."
    found, before, after = (
        {(name.removeprefix(prefix), shape) for name, shape in shapes.items()}
        for shapes in (stored, _shapes(model), _shapes(edited))
    )
    return bool(found & (before - after)) and not found & (after - before)


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def register_checkpoint() -> None:
    """Make the plug-in known to Transformers."""
    keep_guards_of_configs_that_are_read()
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = EditConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = EditQuantizer
