"""What the scripts in `glue_runs` share: a recipe or a sweep from the command line, and what came out."""

import logging
import sys
from collections.abc import Collection
from pathlib import Path

from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.experiments import read_recipe, read_sweep, run, run_sweep
from collab_compress.processes import processes
from collab_compress.tasks import TASKS

from .source import find_directory


def run_script(usage: str, tasks: Collection[str], arguments: list[str] | None = None) -> None:
    """Run the recipe that the command line gives, and print a line for each stage.

    Args:
        usage: what to print where there are no arguments.
        tasks: what the script is for.
        arguments: a recipe file, and `field=value` settings; those of the process if not given.
    """
    path, settings = _arguments(usage, arguments)
    try:
        recipe = read_recipe(path, settings)
        if recipe.task not in tasks:
            raise RecipeError(f"{recipe.task} is {TASKS[recipe.task].kind}; this script is for {', '.join(tasks)}")
        records = run(recipe, find_directory)
    except CollabCompressError as error:
        sys.exit(f"error: {error}")
    for record in records if processes().is_main_process else ():
        print(f"{record['task']:10} {record['stage']:14} {record['score']:.2f}  {record['metrics']}")


def run_sweep_script(usage: str, arguments: list[str] | None = None) -> None:
    """Run the sweep that the command line gives, with a line for each stage as it is done."""
    path, settings = _arguments(usage, arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    level = logging.INFO if processes().is_main_process else logging.ERROR
    logging.getLogger("collab_compress.experiments.sweep").setLevel(level)
    try:
        if path is None:
            raise RecipeError("give the file of a sweep")
        failed = run_sweep(read_sweep(path, settings), find_directory)
    except CollabCompressError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit("failed:\n" + "\n".join(failed))


def tasks_of(*kinds: str) -> list[str]:
    """Name the tasks of some kinds."""
    return [name for name, task in TASKS.items() if task.kind in kinds]


def _arguments(usage: str, arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        sys.exit(usage)
    if given[0] in ("-h", "--help"):
        print(usage)
        sys.exit()
    path = None if "=" in given[0] else Path(given.pop(0))
    return path, given
