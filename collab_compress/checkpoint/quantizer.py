"""The plug-in through which stock `from_pretrained` rebuilds edited models."""

import copy
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.checkpoint.edits import (
    MARK,
    METHOD,
    EditConfig,
    ModelEdit,
    edits_of,
    keep_edit_,
    models_in,
    with_modules,
)
from collab_compress.checkpoint.guard import (
    configs_of,
    describe_,
    describe_edits_when_saving,
    kept_conversions,
    own_configs_,
    save_apart_,
    take_out_guard_,
)
from collab_compress.errors import CheckpointError, UnsupportedModelError
from collab_compress.transformers_parts import (
    QUANTIZATION_CONFIGS,
    QUANTIZERS,
    UPDATES_CONVERSIONS,
    HfQuantizer,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    weight_conversions_of,
)

# What else is done to an edited model once its weights are loaded; filled where the package is imported.
AFTER_LOADING: list[Callable[[PreTrainedModel], None]] = []


class EditQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replays the edits of a checkpoint on the empty model; nothing is quantized."""

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Remove the guard against loading without this package; refuse implementations that cannot run."""
        take_out_guard_(config)
        asked = config._attn_implementation
        for edit in self.quantization_config.edits:
            if asked is not None and edit.implementations and asked not in edit.implementations:
                raise UnsupportedModelError(
                    f"this checkpoint holds {edit.kind} attention, which runs with attn_implementation 'eager' or "
                    f"'sdpa', got {asked!r}; load it with attn_implementation='sdpa'"
                )
        return config

    update_tp_plan = update_attn_implementation  # where older versions show the config first

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Drop weight conversions that do not apply to edited checkpoints, and refuse weights that would be lost."""
        conversions = kept_conversions(super().update_weight_conversions(weight_conversions, *model))
        self._refuse_lost_weights(conversions)
        return conversions

    def _refuse_lost_weights(self, conversions: list[Any]) -> None:
        if self.stored:
            edits = self.quantization_config.edits
            _refuse_lost_weights(self.model, self.stored, conversions, edits, self.elsewhere)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> PreTrainedModel:
        self.model, self.stored = model, _stored_names(checkpoint_files or ())
        edits = [_located(edit, model) for edit in self.quantization_config.edits]
        self.elsewhere = [name for _, names in edits for name in names]
        self.quantization_config.edits = [edit for edit, _ in edits if edit.modules]
        for edit in self.quantization_config.edits:
            edit.apply_(model)
            _keep_whole_(model, edit)
        if not UPDATES_CONVERSIONS:
            self._refuse_lost_weights(kept_conversions(weight_conversions_of(model)))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        del self.model
        edits = self.quantization_config.edits
        for edit in edits:
            keep_edit_(model, edit)
        _describe_(model)
        _mark_as_ordinary_(model)
        for edit in edits:
            edit.finish_(model)
        for finish in AFTER_LOADING if edits else ():
            finish(model)
        return model

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return True: training works."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True: `torch.compile` works."""
        return True


def record_edit_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Note on a live model, in place, that `edit` was applied, so that `save_pretrained` stores it.

    The model gets its own copy of a config that it may share with other models.
    """
    own_configs_(model)
    keep_edit_(model, edit)
    _describe_(model)
    _keep_whole_(model, edit)


def forget_edits_(model: PreTrainedModel, kind: str) -> None:
    """Note on a live model, in place, that its edits of this kind were undone; without others it is a stock one."""
    for inner in models_in(model):
        kept = [edit for edit in vars(inner).pop(MARK, ()) if edit.kind != kind]
        if kept:
            setattr(inner, MARK, kept)
    _describe_(model)
    model._no_split_modules = {
        name for part in (type(model), *model.children()) for name in getattr(part, "_no_split_modules", None) or ()
    }
    for edit in edits_of(model):
        _keep_whole_(model, edit)


def _describe_(model: PreTrainedModel) -> None:
    """Store the edits in the configs of `model` and of the models inside it, in place."""
    for config, owner in configs_of(model):
        describe_(config, owner)
    for part in model.modules():
        part._is_hf_initialized = True  # else a model built around this one would initialise new parts once more
    if edits_of(model):
        for inner in models_in(model):
            save_apart_(inner)


def _mark_as_ordinary_(model: PreTrainedModel) -> None:
    """Remove, in place, what Transformers notes on quantized models: the weights are ordinary floats."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    for config, _ in configs_of(model):
        vars(config).pop("_is_quantized", None)


def _keep_whole_(model: PreTrainedModel, edit: ModelEdit) -> None:
    """Forbid `device_map="auto"` to split an edited module, in place, because it holds parameters of its own."""
    edited = {type(model.base_model.get_submodule(name)).__name__ for name in edit.modules}
    model._no_split_modules = {*(model._no_split_modules or ()), *edited}


def _stored_names(files: Sequence[str]) -> list[str]:
    """Read the names of the tensors in safetensors files."""
    names: list[str] = []
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                names += opened.keys()
    return sorted(names)


def _located(edit: ModelEdit, model: PreTrainedModel) -> tuple[ModelEdit, list[str]]:
    """Return the modules of a stored edit in `model`, whose class may differ from that of the saved model.

    Returns:
        The edit of those modules that `model` has, and the paths of those that it lacks, as a decoder lacks those of
        the encoder.
    """
    known = [name for name, _ in model.base_model.named_modules()]
    modules, elsewhere = {}, []
    for name, spec in edit.modules.items():
        place = _place(name, known, model.base_model_prefix)
        if place is None:
            elsewhere.append(name)
        else:
            modules[place] = spec
    return with_modules(edit, modules), elsewhere


def _place(name: str, known: Sequence[str], prefix: str) -> str | None:
    """Return the module path of a stored path, whose prefix may differ between a base model and one with a head."""
    for place in (name, name.removeprefix(f"{prefix}.")):
        if place in known:
            return place
    places = [place for place in known if place.endswith(f".{name}")]
    return places[0] if len(places) == 1 else None


def _refuse_lost_weights(
    model: PreTrainedModel,
    stored: Sequence[str],
    conversions: Sequence[Any],
    edits: Sequence[ModelEdit],
    elsewhere: Sequence[str],
) -> None:
    """Refuse a checkpoint that lacks weights of an edited module, or of one like those that were not found.

    Raises:
        CheckpointError: loading would leave random weights in attention that the checkpoint describes.
    """
    expected = model.state_dict()
    used = copy.deepcopy(conversions)  # conversions note what they were used for
    renamings = [conversion for conversion in used if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in used if isinstance(conversion, WeightConverter)]
    prefix = model.base_model_prefix
    loaded = {rename_source_key(name, renamings, converters, prefix, expected)[0] for name in stored}
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    missing = expected.keys() - loaded - set(stored) - tied
    edited = {name for edit in edits for name in edit.modules}
    alike = {_any_layer(".".join(name.split(".")[-2:])) for name in elsewhere}
    for name in sorted(missing):
        if _lies_in(name, edited) or _lies_in(_any_layer(name), alike):
            raise CheckpointError(
                f"{type(model).__name__}: the checkpoint describes converted attention, but holds no {name}; load it "
                f"as {' or '.join(model.config.architectures or ['the class that was saved'])}"
            )


def _lies_in(name: str, paths: Collection[str]) -> bool:
    """Whether a path goes through one of `paths`, wherever that begins."""
    return any(f".{path}." in f".{name}" for path in paths)


def _any_layer(path: str) -> str:
    """Return a path with `*` in place of each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def register_checkpoint() -> None:
    """Make the plug-in known to Transformers."""
    describe_edits_when_saving()
    QUANTIZATION_CONFIGS[METHOD] = EditConfig
    QUANTIZERS[METHOD] = EditQuantizer
