"""Experiments: fine-tune, convert, evaluate, fine-tune again, described by one recipe."""

from collab_compress.experiments.protocol import run
from collab_compress.experiments.recipe import Recipe, TranslationOptions, Tuning, read_recipe
from collab_compress.experiments.sweep import Sweep, read_sweep, run_sweep
from collab_compress.experiments.untrained import Fresh

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
