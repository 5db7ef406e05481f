"""Experiments: fine-tune, convert, evaluate, fine-tune again, described by one recipe."""

from collab_compress.experiments.protocol import run
from collab_compress.experiments.recipe import Recipe, Tuning, read_recipe

__all__ = ["Recipe", "Tuning", "read_recipe", "run"]
