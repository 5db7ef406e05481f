"""The papers' protocol: fine-tune, convert, evaluate, fine-tune again, evaluate."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collab_compress_cli.distributed import process_state
from collab_compress_cli.pretrained import find_directory
from transformers import PreTrainedModel

from collab_compress.checkpoint.files import atomic_directory, write_json
from collab_compress.conversion.compress import compress, install_unset_
from collab_compress.errors import RecipeError

from ..tasks import TASKS
from .examples import scored_splits
from .measures import MEASURES, add_measures
from .outputs import claim, environment, hub_commits, read_record, read_result, reserve_output, write_record
from .processes import on_every_process, on_main_process
from .recipe import Recipe, Tuning
from .tuning import LOG, check_trackers, evaluate, fine_tune, rehearse, training_arguments
from .untrained import make_fresh
from .workload import WORKLOADS, Workload, load_tokenizer


def run(recipe: Recipe) -> list[dict[str, Any]]:
    """Run an experiment from where it stopped.

    Each stage has a folder in `recipe.output` with `result.json` and, if the stage made one, the model: `tuned` (or
    `given`, a model evaluated as it is), the conversion's name, and the same with `-again` (`tuned-again` without a
    conversion). Finished stages are not repeated, and an interrupted one continues from its last checkpoint; so any
    number of conversions may share the tuned model of one output.

    Returns:
        The record of each stage: task, method, stage, conversion, whether it was tuned again, seed, metrics of each
        split, score (their mean, in the benchmark's scale), parameters, the recipe, the versions it ran with, the
        commits of model and data where they are from the hub; of a fine-tuning its seconds and log; of a conversion
        its seconds, calibration included, and the mean relative error of scores; and the recipe's measures.

    Raises:
        RecipeError: a folder holds another experiment, or something cannot be run.
        HeadError: a measure cannot be taken of the model.
        DataError: the data are missing or malformed.
        CheckpointError: the model is missing.
    """
    check_environment(recipe)
    first = "given" if recipe.tuning is None else "tuned"
    stages = [first, *filter(None, [recipe.conversion_name, recipe.again_name])]
    with ExitStack() as held:
        if not on_main_process(held.enter_context)(reserve_output(recipe, stages)):
            _run(recipe, stages)
        return _read_results(recipe, stages)


@on_main_process
def _read_results(recipe: Recipe, stages: Sequence[str]) -> list[dict[str, Any]]:
    return [read_result(recipe.output / stage) for stage in stages]


def check_environment(recipe: Recipe) -> None:
    """Refuse unknown measures, and trackers that are not installed."""
    check_trackers(recipe.trackers)
    for name in recipe.measures:
        if name not in MEASURES:
            raise RecipeError(f"unknown measure {name!r}; expected some of {', '.join(MEASURES)}")


def summary(record: Mapping[str, Any]) -> str:
    """Return a stage's score and metric, as in "86.31 accuracy+f1"."""
    score = math.nan if record["score"] is None else record["score"]
    return f"{score:.2f} {TASKS[record['task']].metric}"


def _run(recipe: Recipe, stages: Sequence[str]) -> None:
    """Run the stages that are not finished."""
    workload = _load_workload(recipe)
    source = _find_start(workload)
    workload.tokenizer = on_every_process(load_tokenizer)(source)
    commits = on_every_process(hub_commits)(source, workload.texts)
    is_unmade = _is_missing("model", recipe, stages if recipe.tuning is not None else stages[1:])
    if is_unmade or _is_missing("result.json", recipe, stages):
        workload.encode_splits()
    if is_unmade:
        _rehearse(workload, source)

    folder, usual_tuning = recipe.output / stages[0], recipe.tuning or recipe.again or Tuning()
    if recipe.tuning is not None:
        source = _fine_tune(workload, source, recipe.tuning, folder)
    dense = source
    _evaluate(workload, source, usual_tuning, folder, commits)
    if recipe.conversion_name is not None:
        folder = recipe.output / recipe.conversion_name
        source = _convert(workload, source, folder)
        _evaluate(workload, source, usual_tuning, folder, commits)
    if recipe.again is not None and recipe.again_name is not None:
        folder = recipe.output / recipe.again_name
        source = _fine_tune(workload, source, recipe.again, folder, dense if recipe.again.distilled else None)
        _evaluate(workload, source, recipe.again, folder, commits)


@on_every_process
def _load_workload(recipe: Recipe) -> Workload:
    """Load the data, and check what would otherwise fail hours later."""
    workload = WORKLOADS[TASKS[recipe.task].kind](recipe)
    if not workload.scored():
        raise RecipeError(f"{recipe.task} has no split to score in {recipe.data_dir}: none but train has labels")
    for tuning in (recipe.tuning or Tuning(), recipe.again or Tuning()):
        training_arguments(workload, tuning, recipe.output)
    return workload


def _find_start(workload: Workload) -> Path:
    """Return the folder of the model to start from; an untrained one is made if it is missing."""
    recipe = workload.recipe
    if recipe.model is None:
        return _make_fresh(workload)
    directory: Path = on_every_process(find_directory)(recipe.model, recipe.revision)
    return directory


@on_main_process
def _make_fresh(workload: Workload) -> Path:
    """Make the untrained model if it is missing, and return its folder."""
    fresh, folder = workload.recipe.fresh, workload.recipe.output / "start"
    if fresh is None or folder.is_dir():
        return folder
    with atomic_directory(folder) as directory:
        train, seed = workload.texts["train"], workload.recipe.seed
        make_fresh(fresh, workload.task, workload.model_class, train, seed, directory)
        claim(workload.recipe, directory)
    return folder


@on_main_process
def _is_missing(file: str, recipe: Recipe, stages: Sequence[str]) -> bool:
    """Return whether a stage lacks its model or record."""
    return not all((recipe.output / stage / file).exists() for stage in stages)


@on_every_process
def _rehearse(workload: Workload, source: Path) -> None:
    """Go through the stages on one model without training or decomposition, to find errors before hours of work."""
    recipe = workload.recipe
    model = workload.load_model(source, trained=recipe.tuning is None)
    if recipe.tuning is not None:
        rehearse(workload, model, recipe.tuning)
    if recipe.compression is not None:
        compression = recipe.compression.with_solver(seed=recipe.seed)
        tokenizer = workload.new_tokenizer()
        install_unset_(model, compression, recipe.calibration, tokenizer, recipe.calibration_options)
    if recipe.again is not None:
        rehearse(workload, model, recipe.again)


def _fine_tune(workload: Workload, source: Path, tuning: Tuning, folder: Path, dense: Path | None = None) -> Path:
    """Fine-tune a model into `folder/model` if that is missing, towards a dense one if given, and return its path."""
    if _is_missing("model", workload.recipe, [folder.name]):
        model = on_every_process(workload.load_model)(source, trained=False)
        teacher = None if dense is None else on_every_process(workload.load_model)(dense)
        on_main_process(claim)(workload.recipe, folder)
        fine_tune(workload, model, tuning, folder, teacher)
    return folder / "model"


def _convert(workload: Workload, source: Path, folder: Path) -> Path:
    """Convert a model into `folder/model` if that is missing, and return its path; each process converts it whole."""
    recipe = workload.recipe
    if recipe.compression is not None and _is_missing("model", recipe, [folder.name]):
        on_main_process(claim)(recipe, folder)
        model = on_every_process(workload.load_model)(source).to(process_state().device)
        report = on_every_process(compress)(
            model,
            recipe.compression.with_solver(seed=recipe.seed),
            recipe.calibration,
            workload.new_tokenizer(),
            calibration_options=recipe.calibration_options,
        )
        _save_conversion(workload, model, report.to_dict(), folder)
    return folder / "model"


@on_main_process
def _save_conversion(workload: Workload, model: PreTrainedModel, report: Mapping[str, Any], folder: Path) -> None:
    write_json(folder / "report.json", report)
    with atomic_directory(folder / "model") as directory:
        model.save_pretrained(directory)
        workload.tokenizer.save_pretrained(directory)


def _evaluate(
    workload: Workload, source: Path, tuning: Tuning, folder: Path, commits: Mapping[str, str | None]
) -> None:
    """Write the record of a stage if it is missing, and add the measures that it lacks."""
    recipe = workload.recipe
    if _is_missing("result.json", recipe, [folder.name]):
        model = on_every_process(workload.load_model)(source)
        on_main_process(claim)(recipe, folder)
        parameters = model.num_parameters()
        metrics = evaluate(workload, model, tuning, folder)
        _write_result(workload, folder, metrics, parameters, commits)
    on_main_process(add_measures)(workload, source, folder)


@on_main_process
def _write_result(
    workload: Workload,
    folder: Path,
    metrics: dict[str, dict[str, float]],
    parameters: int,
    commits: Mapping[str, str | None],
) -> None:
    recipe, stage = workload.recipe, folder.name
    scores = [workload.metric.benchmark_score(metrics[split]) for split in scored_splits(metrics)]
    record = {
        "task": recipe.task,
        "method": recipe.method_name,
        "stage": stage,
        "conversion": None if stage in ("given", "tuned") else recipe.conversion_name,
        "again": stage == recipe.again_name,
        "seed": recipe.seed,
        "score": sum(scores) / len(scores),
        "metrics": metrics,
        "parameters": parameters,
        "recipe": asdict(recipe),
        "environment": environment(),
        "hub": commits,
        **_read_log(folder),
    }
    write_record(folder / "result.json", record)


def _read_log(folder: Path) -> dict[str, Any]:
    """Return the log of a fine-tuning, or the time and error of a conversion; nothing for a given model."""
    if (folder / LOG).is_file():
        return read_record(folder / LOG)
    if not (folder / "report.json").is_file():
        return {}
    report = read_record(folder / "report.json")
    scores = [part for part in report["parts"] if part["part"] == "dk"]
    errors = [part["weight_error" if part["data_error"] is None else "data_error"] for part in scores]
    return {"seconds": report["seconds"], "error": sum(errors) / len(errors) if errors else None}
