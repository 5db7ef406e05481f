"""Entry points of the commands."""

from functools import partial

from collab_compress_cli.start import start

COMMANDS = {
    "collab-evaluate": "evaluate.main",
    "collab-results": "results.main",
    "collab-run": "run.main",
    "collab-sweep": "run.sweep_main",
}
"""Command → the function that runs it, in this package."""

evaluate = partial(start, "collab-evaluate", __package__)
results = partial(start, "collab-results", __package__)
run = partial(start, "collab-run", __package__)
sweep = partial(start, "collab-sweep", __package__)
