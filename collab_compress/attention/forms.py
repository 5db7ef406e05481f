"""The table of forms, and the model edit by which a checkpoint remembers them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from collab_compress.attention.form import MapForm, ScoreForm
from collab_compress.attention.install import IMPLEMENTATIONS, install_
from collab_compress.attention.per_head import PerHeadScores
from collab_compress.attention.rotary import RotaryScores
from collab_compress.attention.shared import SharedScores
from collab_compress.attention.stored import refusing_other_models, stored_modules
from collab_compress.attention.values import NarrowValues
from collab_compress.errors import CompressionError

FORMS: dict[str, type[ScoreForm]] = {form.option: form for form in (SharedScores, PerHeadScores)}
"""Name of a form of queries and keys → its class."""

ROTARY_FORMS: dict[str, type[ScoreForm]] = {RotaryScores.option: RotaryScores}
"""The same where a rotary embedding turns queries and keys."""

FORM_KINDS: dict[str, type[MapForm]] = {
    form.kind: form for form in (SharedScores, PerHeadScores, RotaryScores, NarrowValues)
}
"""Name in checkpoints → form."""


def form_for(option: str, site: Any) -> type[ScoreForm]:
    """Return the form of queries and keys that a name stands for, for one kind of module.

    Raises:
        CompressionError: there is none for modules whose queries and keys a rotary embedding turns.
    """
    table = ROTARY_FORMS if site.family.rotary else FORMS
    if option not in table:
        raise CompressionError(
            f"{site.name}: there is no {option} form of queries and keys that a rotary embedding turns; pass form "
            f"{' or '.join(repr(each) for each in table)}"
        )
    return table[option]


@dataclass(frozen=True)
class FormEdit:
    """Attention modules of which one map is in one form.

    Args:
        kind: of the form.
        modules: path of each module inside the base model (so that the checkpoint loads with and without a head)
            → its form.
    """

    kind: str
    modules: Mapping[str, MapForm]
    implementations: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: form.to_dict() for name, form in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FormEdit":
        """Rebuild the edit from its kind and what `to_dict` returned.

        Raises:
            CheckpointError: a form is described wrongly.
        """
        kind = FORM_KINDS[data["kind"]]
        return cls(data["kind"], {name: kind.from_dict(form, name) for name, form in stored_modules(data).items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Install empty attention of the form in `model` in place, for weights to be loaded into.

        Raises:
            CheckpointError: the model has not the modules, or not the widths, that the forms are made for.
        """
        with refusing_other_models(self.kind, model):
            for name, form in self.modules.items():
                module: Any = model.base_model.get_submodule(name)
                if not hasattr(module, form.at):
                    parent = model.base_model.get_submodule(name.rpartition(".")[0])
                    form.check_fits(module, name)
                    install_(module, form, form.build(module, parent))

    def finish_(self, model: PreTrainedModel) -> None:
        """Restore, in place, what the checkpoint does not hold."""
        for name, form in self.modules.items():
            module: Any = model.base_model.get_submodule(name)
            getattr(module, form.at).finish_(module)
