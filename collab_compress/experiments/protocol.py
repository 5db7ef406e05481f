"""The papers' protocol: fine-tune, convert, evaluate, fine-tune again, evaluate."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from collab_compress.checkpoint.directory import whole_directory
from collab_compress.conversion.compress import compress
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe, Tuning
from collab_compress.experiments.record import environment, read_record, write_record
from collab_compress.experiments.tuning import evaluate, fine_tune, load_classifier
from collab_compress.metrics import load_metric
from collab_compress.tasks import TASKS, encode_classification, load_task


def run(recipe: Recipe, find_model: Callable[[str], Path] = Path) -> list[dict[str, Any]]:
    """Run an experiment, or what is left of it.

    Each stage has a folder in `recipe.output`: `dense`, `dkN` and `dkN-again`, with the model and `result.json`. A
    stage that is finished is not run again, one that was interrupted goes on from its last checkpoint; so any number
    of ranks may share the dense model of one output.

    Args:
        recipe: what to do.
        find_model: gives the directory of `recipe.model`.

    Returns:
        The record of each stage: task, stage, seed, metrics of each validation split, their mean score in percent,
        the recipe and the versions it ran with.

    Raises:
        RecipeError: the task is none that can be run here, or the folder holds another experiment.
        DataError: the data are not there, or malformed.
    """
    task = TASKS[recipe.task]
    if task.num_labels is None:
        raise RecipeError(f"{recipe.task} is {task.kind}; this runs classification and regression")
    source = find_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    data = load_task(recipe.task, recipe.data_dir)
    encoded = encode_classification(data, tokenizer, max_length=recipe.max_length)
    _claim(recipe.output, recipe, "task", "model", "seed", "max_length", "tuning", "heads")
    records = []

    def stage(name: str, start: Path, tuning: Tuning | None) -> Path:
        """Make the model of a stage if it is not there, and its record; gives where the model is."""
        folder = recipe.output / name
        if tuning is not None and not (folder / "model").is_dir():
            model = load_classifier(start, task, recipe.seed)
            fine_tune(model, task, encoded, tokenizer, tuning, recipe.heads, recipe.seed, folder)
        if not (folder / "result.json").is_file():
            model = load_classifier(folder / "model", task, recipe.seed)
            metrics = evaluate(model, task, encoded, tokenizer, folder)
            if _processes().is_main_process:
                write_record(folder / "result.json", _record(recipe, name, metrics))
            _processes().wait_for_everyone()
        records.append(read_record(folder / "result.json"))
        return folder / "model"

    found = stage("dense", source, recipe.tuning) if recipe.tuning is not None else source
    if recipe.compression is not None:
        name = f"dk{recipe.compression.rank}"
        _claim(recipe.output / name, recipe, "compression", "calibration")
        _convert(recipe, found, tokenizer, recipe.output / name)
        found = stage(name, found, None)
        if recipe.again is not None:
            _claim(recipe.output / f"{name}-again", recipe, "compression", "calibration", "again")
            stage(f"{name}-again", found, recipe.again)
    return records


def _convert(recipe: Recipe, source: Path, tokenizer: Any, folder: Path) -> None:
    """Convert a classifier into `folder/model` if it is not there; one process does it for all."""
    assert recipe.compression is not None
    if _processes().is_main_process and not (folder / "model").is_dir():
        model = load_classifier(source, TASKS[recipe.task], recipe.seed)
        compression = replace(recipe.compression, seed=recipe.seed)
        report = compress(model, compression, recipe.calibration, tokenizer=tokenizer)
        write_record(folder / "report.json", report.to_dict())
        with whole_directory(folder / "model") as directory:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    _processes().wait_for_everyone()


def _processes() -> PartialState:
    """Give the processes that run this together; without a GPU they meet on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available())


def _claim(folder: Path, recipe: Recipe, *fields: str) -> None:
    """Note in a folder what is done there, or check that it is the same.

    Raises:
        RecipeError: something else was done there, naming the fields that differ.
    """
    described = asdict(recipe)
    wanted = json.loads(json.dumps({name: described[name] for name in fields}, default=str))
    path = folder / "recipe.json"
    if _processes().is_main_process and not path.is_file():
        write_record(path, wanted)
    _processes().wait_for_everyone()
    there = read_record(path)
    differing = sorted(name for name in wanted if there.get(name) != wanted[name])
    if differing:
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")


def _record(recipe: Recipe, stage: str, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
    names = load_metric(TASKS[recipe.task].metric).scores
    scores = [values[name] for values in metrics.values() for name in names]
    return {
        "task": recipe.task,
        "stage": stage,
        "seed": recipe.seed,
        "score": 100 * sum(scores) / len(scores),
        "metrics": metrics,
        "recipe": asdict(recipe),
        "environment": environment(),
    }
