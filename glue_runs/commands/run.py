"""`collab-run` and `collab-sweep`: a recipe or a sweep from the command line."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from collab_compress_cli.command import errors_in_one_line, silence_libraries
from collab_compress_cli.distributed import process_state
from collab_compress_cli.model import refuse_nested

from collab_compress.checkpoint.files import refuse_place, to_json, write_new
from collab_compress.errors import RecipeError

from ..experiments import read_recipe, read_sweep, run, run_sweep
from ..experiments.protocol import summary
from .help import RUN, SWEEP


def main(argv: Sequence[str] | None = None) -> None:
    """Run `collab-run`: the stages of a recipe, with a line for each; errors are one line and exit code 2."""
    with errors_in_one_line("collab-run", hold_warnings=False):
        path, settings, json, quiet = _parse(RUN, argv, "recipes")
        recipe = read_recipe(path, settings)
        refuse_nested({"--json": json, "output": recipe.output})
        silence_libraries()
        records = run(replace(recipe, progress=False) if quiet else recipe)
        if process_state().is_main_process:
            if json is not None:
                write_new(json, to_json(records))
            for record in () if quiet else records:
                print(f"{record['task']:10} {record['stage']:14} {summary(record)}  {record['metrics']}")


def sweep_main(argv: Sequence[str] | None = None) -> None:
    """Run `collab-sweep`: the runs of a sweep, with a line for each finished stage.

    The exit code is 1 if some runs fail, and 2 if the sweep cannot be run at all.
    """
    with errors_in_one_line("collab-sweep", hold_warnings=False):
        path, settings, json, quiet = _parse(SWEEP, argv, "sweeps")
        if path is None:
            raise RecipeError("give the file of a sweep")
        settings = [f"base.{setting}" if setting.startswith("revision=") else setting for setting in settings]
        sweep = read_sweep(path, [*settings, *(["base.progress=false"] if quiet else [])])
        refuse_nested({"--json": json, "output": sweep.output})
        silence_libraries()
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        is_main = process_state().is_main_process
        level = logging.CRITICAL if not is_main else logging.ERROR if quiet else logging.INFO
        logging.getLogger("collab_compress.glue_runs.sweep").setLevel(level)
        failed = run_sweep(sweep)
        if is_main and json is not None:
            write_new(json, to_json(failed))
        if failed:
            sys.exit("failed:\n" + "\n".join(failed) if is_main else 1)


def _parse(usage: str, argv: Sequence[str] | None, kind: str) -> tuple[Path | None, list[str], Path | None, bool]:
    """Return the file, the settings of its fields, the path of `--json`, and whether `--quiet` is given."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        sys.exit(usage)
    path = None if _is_setting(words[0]) else _file(words.pop(0), kind)
    quiet = "--quiet" in words
    settings, json = [], None
    for setting in _parse_settings([word for word in words if word != "--quiet"]):
        if setting.startswith("json="):
            json = Path(setting.removeprefix("json="))
            refuse_place(json)
        else:
            settings.append(setting)
    return path, settings, json, quiet


def _is_setting(word: str) -> bool:
    """Return whether the first word is a setting; a file may have `=` in its path."""
    field, equals, _ = word.partition("=")
    return word.startswith("--") or (bool(equals) and "/" not in field and not os.path.isfile(word))


def _file(name: str, kind: str) -> Path:
    """Return the path of a recipe or a sweep: a file, or one that comes with the package."""
    path = Path(name)
    if path.exists() or path.name != name:
        return path
    shipped = Path(__file__).parents[1] / kind / name
    return shipped if shipped.is_file() else path


def _parse_settings(words: Sequence[str]) -> Iterator[str]:
    """Yield settings as `field=value`, from `field=value`, `--field=value` or `--field value`."""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--"):
            yield word
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise RecipeError(f"{word} sets nothing; expected a value after it")
        text = to_json(value).strip() if name == "revision" else value  # a name such as 1.0 stays text
        yield f"{name if '.' in name else name.replace('-', '_')}={text}"


if __name__ == "__main__":
    main()
