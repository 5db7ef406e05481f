"""In which files Transformers defines the attention classes that families describe."""

import re
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

from collab_compress.architectures import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
FILES = {
    (file.parent.name, name): f"transformers.models.{file.parent.name}.{file.stem}"
    for file in sorted(MODELS.glob("*/modeling_*.py"))
    for name in re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Folder and name of each class → its module."""


def folder_of(model_type, name):
    """Return the folder that defines a family's class: the model type's own, or the only one."""
    default = model_type_to_module_name(model_type)
    folders = [folder for folder, class_ in FILES if class_ == name]
    if default in folders:
        return default
    assert len(folders) == 1, (model_type, name, folders)
    return folders[0]


DESCRIBED = {
    (folder_of(family.model_types[0], name), name): family
    for family in FAMILIES.values()
    for name in family.attention_classes
}
"""Folder and name of each attention class that is described → its family."""
