"""The versioned list of a checkpoint's model edits, whose names of modules hold with and without a head."""

from collections.abc import Mapping
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
MARK = "collab_edited"  # attribute of live edited models
VERSION = 2  # 1: guards were zero-length tensors under stock names


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
        CheckpointError: the checkpoint was written by a newer version, or holds an edit that is not known.
    """

    def __init__(self, edits: list[Any] | None = None, version: int = VERSION, **_: Any) -> None:
        if not isinstance(version, int) or version > VERSION:
            raise CheckpointError(
                f"the checkpoint has version {version} of the collab_compress format, this package reads up to "
                f"{VERSION}; upgrade collab-compress"
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
        """Look up a field of `to_dict`, as Transformers does where a live config is passed to `from_pretrained`."""
        return self.to_dict().get(name, default)


def _decode(data: Any) -> ModelEdit:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in EDITS:
        raise CheckpointError(
            f"the checkpoint holds an edit of kind {kind!r}; this package knows {', '.join(sorted(EDITS))}; "
            "upgrade collab-compress"
        )
    return EDITS[kind].from_dict(data)


def edits_of(model: PreTrainedModel) -> list[ModelEdit]:
    """Return the edits that made `model` what it is; empty for a stock model, also one of an edited model's config.

    Raises:
        CheckpointError: the model was rebuilt by the modelling code that its checkpoint ships.
    """
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, EditConfig):
        return list(config.edits) if any(MARK in vars(part) for part in model.modules()) else []
    if getattr(config, "quant_method", None) == METHOD:
        raise CheckpointError(
            f"{type(model).__name__} was loaded before collab_compress was imported; import it first, then load"
        )
    return []


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
