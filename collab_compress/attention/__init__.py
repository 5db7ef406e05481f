"""Converted attention inside a live model: its forms, projections, attention functions."""

from collab_compress.attention.form import MapForm, ScoreForm, ScoreParts
from collab_compress.attention.forms import FORM_KINDS, FormEdit
from collab_compress.attention.functions import register_attention
from collab_compress.attention.install import install_, is_converted, uninstall_
from collab_compress.attention.rotary import RotaryScores
from collab_compress.attention.shared import SharedScores
from collab_compress.attention.values import NarrowValues, ValueParts

__all__ = [
    "FORM_KINDS",
    "FormEdit",
    "MapForm",
    "NarrowValues",
    "RotaryScores",
    "ScoreForm",
    "ScoreParts",
    "SharedScores",
    "ValueParts",
    "install_",
    "is_converted",
    "register_attention",
    "uninstall_",
]
