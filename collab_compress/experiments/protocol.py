"""The papers' protocol: fine-tune, convert, evaluate, fine-tune again, evaluate."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from collab_compress.checkpoint.directory import whole_directory, write_whole_json
from collab_compress.conversion.compress import compress
from collab_compress.errors import RecipeError
from collab_compress.experiments.classification import Classification
from collab_compress.experiments.fresh import make_fresh
from collab_compress.experiments.language_model import LanguageModel
from collab_compress.experiments.reading import parse
from collab_compress.experiments.recipe import Recipe, Tuning
from collab_compress.experiments.record import environment, read_record
from collab_compress.experiments.trackers import check_trackers
from collab_compress.experiments.translation import Translation
from collab_compress.experiments.tuning import evaluate, fine_tune
from collab_compress.experiments.workload import Workload, processes
from collab_compress.tasks import TASKS

WORKLOADS: dict[str, type[Workload]] = {
    "classification": Classification,
    "regression": Classification,
    "translation": Translation,
    "language modelling": LanguageModel,
}
"""Kind of task → how it is run."""

BASE = ("task", "model", "fresh", "data_dir", "files", "seed", "max_length", "tuning", "heads", "translation")
CONVERTED = (*BASE, "compression", "calibration")


def run(recipe: Recipe, find_model: Callable[[str], Path] = Path) -> list[dict[str, Any]]:
    """Run an experiment, or what is left of it.

    Each stage has a folder in `recipe.output` with `result.json` and, where one was made, the model: `tuned` (or
    `given`, a model evaluated as it is), the conversion's name, and the same with `-again`. A stage that is finished
    is not run again, one that was interrupted goes on from its last checkpoint; so any number of conversions may
    share the tuned model of one output.

    Args:
        recipe: what to do.
        find_model: gives the directory of `recipe.model`.

    Returns:
        The record of each stage: task, method, stage, conversion, whether it was tuned again, seed, metrics of each
        split, score (their mean, in the benchmark's scale), parameters, the recipe, and the versions it ran with.

    Raises:
        RecipeError: a folder holds another experiment, or something cannot be run.
        DataError: the data are not there, or malformed.
    """
    check_trackers(recipe.trackers)
    workload = WORKLOADS[TASKS[recipe.task].kind](recipe)
    _claim(recipe.output, recipe, BASE)
    source = _fresh(workload) if recipe.model is None else find_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = workload.encode(workload.texts, tokenizer)
    records = []

    def stage(name: str, start: Path, tuning: Tuning | None = None) -> Path:
        """Make a stage's model if it is not there, and its record; gives where the model is."""
        folder = recipe.output / name
        if tuning is not None:
            if not (folder / "model").is_dir():
                fine_tune(workload, workload.load_model(start, trained=False), encoded, tokenizer, tuning, folder)
            start = folder / "model"
        if not (folder / "result.json").is_file():
            model = workload.load_model(start)
            parameters = model.num_parameters()
            metrics = evaluate(workload, model, encoded, tokenizer, folder)
            if processes().is_main_process:
                write_whole_json(folder / "result.json", _record(workload, name, metrics, parameters))
            processes().wait_for_everyone()
        records.append(read_record(folder / "result.json"))
        return start

    found = stage("given" if recipe.tuning is None else "tuned", source, recipe.tuning)
    name = recipe.conversion_name
    if name is not None:
        _claim(recipe.output / name, recipe, CONVERTED)
        stage(name, _converted(workload, found, tokenizer, recipe.output / name))
        if recipe.again is not None:
            _claim(recipe.output / f"{name}-again", recipe, (*CONVERTED, "again"))
            stage(f"{name}-again", recipe.output / name / "model", recipe.again)
    return records


def _fresh(workload: Workload) -> Path:
    """Make the model to start from if it is not there; one process does it for all."""
    recipe = workload.recipe
    folder = recipe.output / "start"
    if processes().is_main_process and not folder.is_dir() and recipe.fresh is not None:
        make_fresh(recipe.fresh, workload.task, workload.texts["train"], recipe.seed, folder)
    processes().wait_for_everyone()
    return folder


def _converted(workload: Workload, source: Path, tokenizer: Any, folder: Path) -> Path:
    """Convert a model into `folder/model` if it is not there; one process does it for all."""
    recipe = workload.recipe
    if processes().is_main_process and not (folder / "model").is_dir() and recipe.compression is not None:
        model = workload.load_model(source)
        compression = replace(recipe.compression, seed=recipe.seed)
        report = compress(model, compression, recipe.calibration, tokenizer=tokenizer)
        write_whole_json(folder / "report.json", report.to_dict())
        with whole_directory(folder / "model") as directory:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    processes().wait_for_everyone()
    return folder / "model"


def _claim(folder: Path, recipe: Recipe, fields: tuple[str, ...]) -> None:
    """Note in a folder what is done there, or check that it is the same.

    Raises:
        RecipeError: something else was done there, naming the fields that differ.
    """
    path = folder / "recipe.json"
    if processes().is_main_process and not path.is_file():
        write_whole_json(path, asdict(recipe))
    processes().wait_for_everyone()
    there = parse(Recipe, read_record(path), str(path))
    differing = [name for name in fields if getattr(there, name) != getattr(recipe, name)]
    if differing:
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")


def _record(workload: Workload, stage: str, metrics: dict[str, dict[str, float]], parameters: int) -> dict[str, Any]:
    recipe = workload.recipe
    tests = [split for split in metrics if split.startswith("test")]  # GLUE's have no labels, so they are not here
    scores = [metrics[split][name] for split in tests or metrics for name in workload.metric.scores]
    return {
        "task": recipe.task,
        "method": recipe.method,
        "stage": stage,
        "conversion": None if stage in ("given", "tuned") else recipe.conversion_name,
        "again": stage == f"{recipe.conversion_name}-again",
        "seed": recipe.seed,
        "score": workload.metric.scale * sum(scores) / len(scores),
        "metrics": metrics,
        "parameters": parameters,
        "recipe": asdict(recipe),
        "environment": environment(),
    }
