"""`collab-run` and `collab-sweep`, and the scripts in `glue_runs`: a recipe or a sweep from the command line."""

import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tqdm import tqdm

from collab_compress.checkpoint.directory import refuse_place, to_json, write_new
from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError
from collab_compress.experiments import read_recipe, read_sweep, run, run_sweep
from collab_compress.experiments.protocol import summary
from collab_compress.tasks import TASKS

from .command import silence_libraries, stopping_in_one_line
from .help import RUN, SWEEP
from .outputs import refuse_nested


@dataclass(frozen=True)
class Options:
    """Arguments besides fields of the recipe."""

    json: Path | None = None
    quiet: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Run `collab-run`; errors are one line on standard error and exit code 2."""
    run_script(RUN, TASKS, None if argv is None else list(argv), "collab-run")


def sweep_main(argv: Sequence[str] | None = None) -> None:
    """Run `collab-sweep`; errors are one line on standard error and exit code 2."""
    run_sweep_script(SWEEP, None if argv is None else list(argv), "collab-sweep")


def run_script(usage: str, tasks: Collection[str], arguments: list[str] | None = None, name: str = "error") -> None:
    """Run the recipe that the command line gives, and print a line for each stage.

    Errors are one line on standard error and exit code 2; an interrupt is one and 130.

    Args:
        usage: what to print where there are no arguments.
        tasks: what the script is for.
        arguments: a recipe file, and settings as `field=value` or `--field value`; those of the process if not given.
        name: what errors begin with.
    """
    with stopping_in_one_line(name, hold_warnings=False), _bars_closed():
        path, settings, options = _arguments(usage, arguments, "recipes")
        recipe = read_recipe(path, settings)
        refuse_nested({"--json": options.json, "output": recipe.output})
        if recipe.task not in tasks:
            raise RecipeError(f"{recipe.task} is {TASKS[recipe.task].kind}; this script is for {', '.join(tasks)}")
        silence_libraries()
        records = run(replace(recipe, progress=False) if options.quiet else recipe)
        if process_state().is_main_process:
            _write(options, records)
            for record in () if options.quiet else records:
                print(f"{record['task']:10} {record['stage']:14} {summary(record)}  {record['metrics']}")


def run_sweep_script(usage: str, arguments: list[str] | None = None, name: str = "error") -> None:
    """Run the sweep that the command line gives, with a line for each stage as it is done.

    Where some of the runs fail the exit code is 1; where the sweep cannot be run at all it is 2, with one line.
    """
    with stopping_in_one_line(name, hold_warnings=False), _bars_closed():
        path, settings, options = _arguments(usage, arguments, "sweeps")
        if path is None:
            raise RecipeError("give the file of a sweep")
        settings = [f"base.{each}" if each.startswith("revision=") else each for each in settings]
        sweep = read_sweep(path, [*settings, *(["base.progress=false"] if options.quiet else [])])
        refuse_nested({"--json": options.json, "output": sweep.output})
        silence_libraries()
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        level = logging.ERROR if options.quiet else logging.INFO
        level = level if process_state().is_main_process else logging.CRITICAL
        logging.getLogger("collab_compress.experiments.sweep").setLevel(level)
        failed = run_sweep(sweep)
        if process_state().is_main_process:
            _write(options, failed)
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


def _write(options: Options, result: Any) -> None:
    if options.json is not None:
        write_new(options.json, to_json(result))


def _arguments(usage: str, arguments: list[str] | None, kind: str) -> tuple[Path | None, list[str], Options]:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        sys.exit(usage)
    if {"-h", "--help"} & set(given):
        print(usage)
        sys.exit()
    path = None if "=" in given[0] or given[0].startswith("--") else _file(given.pop(0), kind)
    quiet = "--quiet" in given
    settings = list(_settings([word for word in given if word != "--quiet"]))
    files = [Path(setting.partition("=")[2]) for setting in settings if setting.startswith("json=")]
    for file in files:
        refuse_place(file)
    kept = [setting for setting in settings if not setting.startswith("json=")]
    return path, kept, Options(files[-1] if files else None, quiet)


def _file(name: str, kind: str) -> Path:
    """Return the path of a recipe or a sweep: a file, or else one that comes with the package."""
    path = Path(name)
    if path.exists() or path.name != name:
        return path
    try:
        shipped = resources.files(f"{__package__}.{kind}") / name
    except ModuleNotFoundError:  # installed in place, from a checkout
        shipped = Path(__file__).parents[1] / "glue_runs" / kind / name
    return Path(str(shipped)) if shipped.is_file() else path


def _settings(given: list[str]) -> Iterator[str]:
    """Return settings as `field=value`, from `field=value`, `--field=value` or `--field value`."""
    words = iter(given)
    for word in words:
        if not word.startswith("--"):
            yield word
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and (value := next(words, "--")).startswith("--"):
            raise RecipeError(f"{word} sets nothing; expected a value after it")
        text = to_json(value).strip() if name == "revision" else value  # 1.0 is a name too
        yield f"{name if '.' in name else name.replace('-', '_')}={text}"


if __name__ == "__main__":
    main()
