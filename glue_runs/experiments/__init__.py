"""Experiments: fine-tune, convert, evaluate, fine-tune again, described by one recipe."""

from .protocol import run
from .recipe import Recipe, TranslationOptions, Tuning, read_recipe
from .sweep import Sweep, read_sweep, run_sweep
from .untrained import Fresh

__all__ = [
    "Fresh",
    "Recipe",
    "Sweep",
    "TranslationOptions",
    "Tuning",
    "read_recipe",
    "read_sweep",
    "run",
    "run_sweep",
]
