"""Help of the commands: for recipes and sweeps, usage and fields, read from the source."""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from collab_compress_cli.command import fill

import collab_compress_options

OPTIONS = Path(collab_compress_options.__file__).parent
LIBRARY = OPTIONS.with_name("collab_compress")  # not imported, which takes long
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SOURCES = (
    OPTIONS / "options.py",
    LIBRARY / "conversion/from_scratch.py",
    LIBRARY / "heads/rotation.py",
    LIBRARY / "training/head_training.py",
    EXPERIMENTS / "untrained.py",
    EXPERIMENTS / "recipe.py",
    EXPERIMENTS / "sweep.py",
)
"""Files that define recipes, sweeps and the dataclasses of their fields."""

RUN = """usage: collab-run [RECIPE.yaml] [FIELD=VALUE ...] [--revision REV] [--json FILE] [--quiet]

Fine-tune a model on a task, convert it, fine-tune it again, and evaluate after each stage. Stages that are finished
in the output are skipped, and an interrupted one resumes. Several processes: torchrun or accelerate launch, with
-m collab_compress_glue_runs.commands.run.

Examples:
  collab-run mrpc.yaml output=outputs/mrpc data_dir=glue/MRPC
  collab-run mrpc.yaml --output outputs/mrpc-64 --compression.dk 64 --seed 1
  collab-run task=rte model=minilm output=outputs/rte 'tuning={epochs: 5}' 'compression={dk: 128}'

arguments:
  RECIPE.yaml          a file with fields and their values, or one of the package (mrpc.yaml, ptb.yaml, trec.yaml,
                       multi30k.yaml, llama-ptb.yaml, modernbert-ptb.yaml); without it, set all fields here
  FIELD=VALUE          sets a field of the recipe, with dots between nested ones; values are YAML (quote brackets and
                       braces in a shell); --FIELD VALUE is the same
  --revision REV       branch, tag or commit of a model on the hub (default: its main branch)
  --json FILE          also write the record of each stage as JSON
  --quiet              print errors only, without progress bars
  -h, --help           show this
  --version            show the version
"""
SWEEP = """usage: collab-sweep SWEEP.yaml [FIELD=VALUE ...] [--revision REV] [--json FILE] [--quiet]

Run every task with every conversion, method and seed that a file describes, skipping finished runs. A sweep can be
stopped at any point and started again; collab-results OUTPUT shows the results so far. If a run fails, the others
continue, and the exit code is 1; where several processes run together, the sweep stops.

Examples:
  collab-sweep glue.yaml output=outputs/glue base.data_dir=glue
  collab-sweep glue.yaml output=outputs/glue 'only.tasks=[mrpc]' 'only.seeds=[0]'
  collab-sweep glue.yaml scale=paper

arguments:
  SWEEP.yaml           a file with the fields of a sweep, or one of the package (glue.yaml and those of the papers)
  FIELD=VALUE          sets a field, with dots between nested ones; values are YAML (quote brackets and braces in a
                       shell); --FIELD VALUE is the same
  --revision REV       as base.revision=REV: branch, tag or commit of a model on the hub (default: its main branch)
  --json FILE          also write the failed runs as JSON
  --quiet              print errors only, without progress bars
  -h, --help           show this
  --version            show the version
"""


def help_text(name: str) -> str:
    """Return the help of `collab-run` or `collab-sweep`, as wide as the terminal, at most 100 columns."""
    if name == "collab-run":
        return "\n".join([RUN, "fields of a recipe:", *_fields("Recipe")])
    recipe_fields = "fields of base, tasks, methods and conversions are those of a recipe: collab-run --help"
    return "\n".join([SWEEP, "fields of a sweep:", *_fields("Sweep"), "", recipe_fields])


def _fields(name: str, prefix: str = "") -> Iterator[str]:
    """Yield a paragraph for each field of a dataclass and of nested ones, from the docstrings of the fields."""
    classes = _classes()
    for field, docstring in pairwise(classes[name].body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(docstring, ast.Expr):
            continue
        path = f"{prefix}{ast.unparse(field.target)}"
        words = " ".join(str(ast.literal_eval(docstring.value)).split())
        yield fill(f"  {path}  {words}{_default(field)}", rest=" " * 6)
        inner = [node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name) and node.id in classes]
        for nested in inner[:1]:
            yield from _fields(nested, f"{path}.")


def _default(field: ast.AnnAssign) -> str:
    if field.value is None:
        return " (required)"
    try:
        value = ast.literal_eval(field.value)
    except ValueError:  # a constant's name, or a call
        return ""
    return "" if value is None else f" (default: {value})"


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """Return the classes of `SOURCES`, parsed instead of imported."""
    classes = {}
    for source in SOURCES:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    return classes
