"""What the scripts in `glue_runs` share: a recipe or a sweep from the command line, and what came out."""

import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError
from collab_compress.experiments import read_recipe, read_sweep, run, run_sweep
from collab_compress.tasks import TASKS

from .command import silence_libraries, stopping_in_one_line


def run_script(usage: str, tasks: Collection[str], arguments: list[str] | None = None) -> None:
    """Run the recipe that the command line gives, and print a line for each stage.

    Errors are one line on standard error and exit code 2; an interrupt is one and 130.

    Args:
        usage: what to print where there are no arguments.
        tasks: what the script is for.
        arguments: a recipe file, and settings as `field=value` or `--field value`; those of the process if not given.
    """
    with stopping_in_one_line("error"), _bars_closed():
        path, settings = _arguments(usage, arguments)
        recipe = read_recipe(path, settings)
        if recipe.task not in tasks:
            raise RecipeError(f"{recipe.task} is {TASKS[recipe.task].kind}; this script is for {', '.join(tasks)}")
        silence_libraries()
        records = run(recipe)
        for record in records if process_state().is_main_process else ():
            print(f"{record['task']:10} {record['stage']:14} {record['score']:.2f}  {record['metrics']}")


def run_sweep_script(usage: str, arguments: list[str] | None = None) -> None:
    """Run the sweep that the command line gives, with a line for each stage as it is done.

    Where some of the runs fail the exit code is 1; where the sweep cannot be run at all it is 2, with one line.
    """
    with stopping_in_one_line("error"), _bars_closed():
        path, settings = _arguments(usage, arguments)
        if path is None:
            raise RecipeError("give the file of a sweep")
        sweep = read_sweep(path, settings)
        silence_libraries()
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        level = logging.INFO if process_state().is_main_process else logging.CRITICAL
        logging.getLogger("collab_compress.experiments.sweep").setLevel(level)
        failed = run_sweep(sweep)
        if failed:
            sys.exit("failed:\n" + "\n".join(failed) if process_state().is_main_process else 1)


@contextmanager
def _bars_closed() -> Iterator[None]:
    """Close progress bars before an error is printed, which would stand behind one otherwise."""
    try:
        yield
    except BaseException:
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()
        raise


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
    path = None if "=" in given[0] or given[0].startswith("--") else Path(given.pop(0))
    return path, list(_settings(given))


def _settings(given: list[str]) -> Iterator[str]:
    """Give settings as `field=value`, whether they are written so, as `--field=value` or as `--field value`."""
    words = iter(given)
    for word in words:
        if not word.startswith("--"):
            yield word
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and (value := next(words, "--")).startswith("--"):
            raise RecipeError(f"{word} sets nothing; expected a value after it")
        yield f"{name if '.' in name else name.replace('-', '_')}={value}"
