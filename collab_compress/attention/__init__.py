"""Converted attention inside a live model: its forms, projections, attention functions, kernels."""

from collab_compress.attention.form import HeadRows, ScoreForm, ScoreParts
from collab_compress.attention.forms import FORMS, Form, ScoreFormEdit
from collab_compress.attention.functions import register_attention
from collab_compress.attention.install import install_, is_converted, uninstall_
from collab_compress.attention.per_head import PerHeadScores
from collab_compress.attention.shared import SharedScores

__all__ = [
    "FORMS",
    "Form",
    "HeadRows",
    "PerHeadScores",
    "ScoreForm",
    "ScoreFormEdit",
    "ScoreParts",
    "SharedScores",
    "install_",
    "is_converted",
    "register_attention",
    "uninstall_",
]
