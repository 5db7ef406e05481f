"""The papers' protocol: fine-tune, convert, evaluate, fine-tune again, evaluate."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from collab_compress.checkpoint.directory import atomic_directory, write_json
from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.conversion import recover_
from collab_compress.conversion.compress import compress, install_unset_
from collab_compress.distributed import failing_together, on_every_process, on_main_process, process_state
from collab_compress.errors import CheckpointError, RecipeError
from collab_compress.experiments.identity import read_result, refuse_moved, reserve_output
from collab_compress.experiments.measures import add_measures, check_measures
from collab_compress.experiments.recipe import Recipe, Tuning
from collab_compress.experiments.record import (
    environment,
    hub_commits,
    is_free,
    is_ours,
    mark,
    read_record,
    write_record,
)
from collab_compress.experiments.sharding import sharding
from collab_compress.experiments.trackers import check_trackers
from collab_compress.experiments.tuning import LOG, evaluate, fine_tune, rehearse, training_arguments
from collab_compress.experiments.untrained import make_fresh
from collab_compress.experiments.workload import (
    Classification,
    LanguageModel,
    MaskedLanguageModel,
    Translation,
    Workload,
    load_tokenizer,
)
from collab_compress.tasks import TASKS

WORKLOADS: dict[str, type[Workload]] = {
    "classification": Classification,
    "regression": Classification,
    "translation": Translation,
    "language modelling": LanguageModel,
    "masked language modelling": MaskedLanguageModel,
}
"""Kind of task → how it is run."""


def run(recipe: Recipe, find_model: Callable[..., str | Path] = find_directory) -> list[dict[str, Any]]:
    """Run an experiment, or what is left of it.

    Each stage has a folder in `recipe.output` with `result.json` and, where one was made, the model: `tuned` (or
    `given`, a model evaluated as it is), the conversion's name, and the same with `-again`. A stage that is finished
    is not run again, one that was interrupted goes on from its last checkpoint; so any number of conversions may
    share the tuned model of one output.

    Args:
        recipe: what to do.
        find_model: gives the directory, or the name on the hub, of the recipe's model, or of the one whose config a
            fresh model takes; knows `minilm`, directories, short names and names on the hub if not given. Of a recipe
            with a revision it is called with that too, and gives a directory.

    Returns:
        The record of each stage: task, method, stage, conversion, whether it was tuned again, seed, metrics of each
        split, score (their mean, in the benchmark's scale), parameters, the recipe, the versions it ran with, the
        commits of model and data where they are from the hub; of a fine-tuning its seconds and what it logged; of a
        conversion its seconds, without and with calibration, and the mean relative error of scores; and what the
        recipe's measures found.

    Raises:
        RecipeError: a folder holds another experiment, or something cannot be run.
        HeadError: a measure cannot be taken of the model.
        DataError: the data are not there, or malformed.
        CheckpointError: the model is not there.
    """
    check_trackers(recipe.trackers)
    check_measures(recipe)
    stages = ["given" if recipe.tuning is None else "tuned", *filter(None, [recipe.conversion_name])]
    if recipe.again is not None:
        stages.append(f"{recipe.conversion_name}-again")
    with failing_together(), ExitStack() as held:
        if not on_main_process(lambda: held.enter_context(reserve_output(recipe, stages))):
            _run(recipe, find_model, stages)
        return on_main_process(lambda: [read_result(recipe, stage) for stage in stages])


def _run(recipe: Recipe, find_model: Callable[..., str | Path], stages: Sequence[str]) -> None:
    """Run the stages that are not finished."""
    workload = on_every_process(lambda: _checked(recipe))
    source = (
        _fresh(workload, find_model)
        if recipe.model is None
        else on_every_process(lambda: find_model(str(recipe.model), *filter(None, [recipe.revision])))
    )
    tokenizer = on_every_process(lambda: load_tokenizer(source))
    commits = on_every_process(lambda: hub_commits(source, workload.texts))
    on_main_process(lambda: refuse_moved(recipe, commits))

    @cache
    def encoded() -> DatasetDict:
        if recipe.num_proc is not None and process_state().num_processes > 1:  # once, into the cache for all of them
            on_main_process(lambda: bool(workload.encode(workload.texts, deepcopy(tokenizer))))
        return on_every_process(lambda: workload.encode(workload.texts, deepcopy(tokenizer)))

    if on_main_process(lambda: _is_unmade(recipe, stages)):
        data = encoded()
        on_every_process(lambda: _rehearse(workload, source, data, tokenizer))

    def stage(name: str, start: str | Path, tuning: Tuning | None = None) -> str | Path:
        """Make a stage's model if it is not there, and its record; gives where the model is."""
        folder = recipe.output / name
        trained, scored = on_main_process(lambda: _begin(folder))
        if tuning is not None:
            if not trained:
                data = encoded()
                model = on_every_process(lambda: workload.load_model(start, trained=False))
                fine_tune(workload, model, data, tokenizer, tuning, folder)
            start = folder / "model"
        if not scored:
            data = encoded()
            model = on_every_process(lambda: workload.load_model(start))
            parameters = model.num_parameters()
            metrics = evaluate(
                workload, model, data, tokenizer, tuning or recipe.tuning or recipe.again or Tuning(), folder
            )
            made = (metrics, parameters, commits)
            on_main_process(
                lambda: write_record(folder / "result.json", _record(workload, name, *made, _log(folder)))
            )
        on_main_process(lambda: add_measures(workload, start, deepcopy(tokenizer), folder))
        return start

    found = stage(stages[0], source, recipe.tuning)
    name = recipe.conversion_name
    if name is not None:
        folder = recipe.output / name
        _convert(workload, found, tokenizer, folder)
        stage(name, folder / "model")
        if recipe.again is not None:
            stage(f"{name}-again", folder / "model", recipe.again)


def summary(record: Mapping[str, Any]) -> str:
    """Return a stage's score and metric, as in "86.31 accuracy+f1"."""
    score = math.nan if record["score"] is None else record["score"]
    return f"{score:.2f} {TASKS[record['task']].metric}"


def _is_unmade(recipe: Recipe, stages: Sequence[str]) -> bool:
    """Return whether a model of the experiment is still to be trained or converted."""
    made = stages if recipe.tuning is not None else stages[1:]
    return any(not (recipe.output / name / "model").is_dir() for name in made)


def _rehearse(workload: Workload, source: str | Path, data: DatasetDict, tokenizer: Any) -> None:
    """Go through the stages on one model without a step of training or decomposition.

    What cannot be done is raised now, and not after hours of work that leads to it.
    """
    recipe = workload.recipe
    model = workload.load_model(source, trained=recipe.tuning is None)
    if recipe.tuning is not None:
        rehearse(workload, model, data, tokenizer, recipe.tuning)
    if recipe.compression is not None:
        chosen = recipe.compression.with_solver(seed=recipe.seed)
        install_unset_(model, chosen, recipe.calibration, deepcopy(tokenizer), recipe.calibration_options)
    if recipe.again is not None:
        rehearse(workload, model, data, tokenizer, recipe.again)


def _checked(recipe: Recipe) -> Workload:
    """Load the data, and check what only shows when it is used otherwise, which may be hours later."""
    workload = WORKLOADS[TASKS[recipe.task].kind](recipe)
    if not workload.scored():
        raise RecipeError(f"{recipe.task} has no split to score in {recipe.data_dir}: none but train has labels")
    for tuning in (recipe.tuning or Tuning(), recipe.again or Tuning()):
        training_arguments(workload, tuning, recipe.output)
    return workload


def _begin(folder: Path) -> tuple[bool, bool]:
    """Make a stage's folder, and say whether its model and its record are there."""
    if is_free(folder):
        mark(folder)
    return (folder / "model").is_dir(), (folder / "result.json").is_file()


def _fresh(workload: Workload, find_model: Callable[[str], str | Path]) -> Path:
    """Make the model to start from if it is not there."""
    fresh, folder = workload.recipe.fresh, workload.recipe.output / "start"

    def make() -> None:
        if fresh is not None and not is_ours(folder):
            try:
                config = str(find_model(fresh.config)) if isinstance(fresh.config, str) else fresh.config
            except CheckpointError as error:
                raise RecipeError(f"the config of {fresh.config} cannot be read: {error}") from error
            make_fresh(
                replace(fresh, config=config), workload.task, workload.texts["train"], workload.recipe.seed, folder
            )

    on_main_process(make)
    return folder


def _convert(workload: Workload, source: str | Path, tokenizer: Any, folder: Path) -> None:
    """Convert a model into `folder/model` if it is not there; processes share the work."""
    recipe, recovery, together = workload.recipe, workload.recipe.recovery, process_state()
    if recipe.compression is None or on_main_process(lambda: (folder / "model").is_dir()):
        return
    model = on_every_process(lambda: workload.load_model(source)).to(together.device)
    compression, distributed = recipe.compression.with_solver(seed=recipe.seed), together.num_processes > 1
    working = deepcopy(tokenizer)  # what pads is not what is saved
    report = compress(
        model,
        compression,
        recipe.calibration,
        tokenizer=working,
        calibration_options=recipe.calibration_options,
        distributed=distributed,
    )
    described = report.to_dict()
    if recovery is not None:
        settings = {
            **asdict(recovery),
            "seed": recipe.seed,
            "length": recipe.calibration_options.length,
            "disable_tqdm": not recipe.progress,
        }
        dense = on_every_process(lambda: workload.load_model(source))
        with sharding(allowed=False):  # each process has both models whole
            done = recover_(model, dense, working, recipe.calibration, **settings)
        described["recovery"] = {"steps": done.global_step, "mean_divergence": done.training_loss}

    def save() -> None:
        write_json(folder / "report.json", described)
        with atomic_directory(folder / "model") as directory:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)

    on_main_process(save)


def _log(folder: Path) -> dict[str, Any]:
    """Return the log of a fine-tuning, or the time and error of a conversion.

    Nothing of a model that was given, nor of a fine-tuning before logs were kept. A conversion's is for figure 4 of
    "Collaborate Instead of Concatenate".
    """
    if (folder / LOG).is_file():
        return read_record(folder / LOG)
    if not (folder / "report.json").is_file():
        return {}
    report = read_record(folder / "report.json")
    errors = [
        module["weight_error" if module["data_error"] is None else "data_error"] for module in report["modules"]
    ]
    return {
        "seconds": report["seconds"] - report["calibrating"],
        "seconds_with_calibration": report["seconds"],
        "error": sum(errors) / len(errors) if errors else None,
    }


def _record(
    workload: Workload,
    stage: str,
    metrics: dict[str, dict[str, float]],
    parameters: int,
    hub: dict[str, str | None],
    log: dict[str, Any],
) -> dict[str, Any]:
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
        "hub": hub,
        **log,
    }
