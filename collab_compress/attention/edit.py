"""The collaborative form as a model edit: how a checkpoint rebuilds it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from collab_compress.attention.collaborative import (
    CollaborativeSpec,
    build_parts,
    install_,
    is_collaborative,
)
from collab_compress.attention.view import IMPLEMENTATIONS


@dataclass(frozen=True)
class CollaborativeEdit:
    """Attention modules in collaborative form.

    Args:
        modules: path of each module inside the base model (so that the checkpoint loads with and without a head)
            → what to rebuild there.
    """

    modules: dict[str, CollaborativeSpec]
    kind: ClassVar[str] = "collaborative"
    implementations: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: asdict(spec) for name, spec in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CollaborativeEdit":
        """Rebuild the edit from what `to_dict` gave."""
        return cls({name: CollaborativeSpec(**spec) for name, spec in data["modules"].items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Put empty collaborative attention into `model` in place, for weights to be loaded into."""
        base = model.base_model
        for name, spec in self.modules.items():
            module = base.get_submodule(name)
            if not is_collaborative(module):
                install_(module, spec, build_parts(module, spec))

    def finish_(self, model: PreTrainedModel) -> None:
        """Freeze again, in place, the mixing matrices that are not trained."""
        for name, spec in self.modules.items():
            model.base_model.get_submodule(name).mixing.requires_grad_(spec.train_mixing)
