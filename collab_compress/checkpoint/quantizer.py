"""The plug-in through which stock `from_pretrained` rebuilds edited models."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer

from collab_compress.checkpoint.edits import METHOD, EditConfig, ModelEdit, edits_of

# What else is done to an edited model once its weights are loaded; filled where the package is imported.
AFTER_LOADING: list[Callable[[PreTrainedModel], None]] = []


class EditQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replays the edits of a checkpoint on the empty model; nothing is quantized."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for edit in self.quantization_config.edits:
            edit.apply_(model)
            _keep_whole_(model, edit)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        _mark_as_ordinary_(model)
        for edit in self.quantization_config.edits:
            edit.finish_(model)
        for finish in AFTER_LOADING:
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
    """Note on a live model, in place, that `edit` was applied, so that `save_pretrained` stores it."""
    model.config.quantization_config = EditConfig([*edits_of(model), edit])
    model.hf_quantizer = EditQuantizer(model.config.quantization_config)
    _mark_as_ordinary_(model)
    _keep_whole_(model, edit)


def forget_edits_(model: PreTrainedModel, kind: str) -> None:
    """Note on a live model, in place, that its edits of this kind were undone; with none left it is a stock one."""
    left = [edit for edit in edits_of(model) if edit.kind != kind]
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)
    if left:
        model.config.quantization_config = EditConfig(left)
        model.hf_quantizer = EditQuantizer(model.config.quantization_config)
    _mark_as_ordinary_(model)


def _mark_as_ordinary_(model: PreTrainedModel) -> None:
    """Tell Transformers that weights are ordinary floats: `.half()`, Trainer and compilation stay allowed."""
    model.is_quantized = False
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = False


def _keep_whole_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Let `device_map="auto"` cut no edited module in two, in place: what it holds itself would be left behind."""
    edited = {type(model.base_model.get_submodule(name)).__name__ for name in edit.modules}
    model._no_split_modules = {*(model._no_split_modules or ()), *edited}


def register_checkpoint() -> None:
    """Make the plug-in known to Transformers."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = EditConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = EditQuantizer
