"""Evaluate models on MTEB and on the LM evaluation harness.

Tasks and metrics are those packages' own code (the extra `eval`), imported where it is used. Any
model of Transformers is scored, converted or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from collab_compress.errors import DataError, one_line

__all__ = ["Score", "lm_eval_scores", "mteb_scores"]


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Args:
        task: the package's name of the task.
        metric: the package's name of the metric.
        value: in the metric's own scale.
        error: standard error, or None where the package has none.
    """

    task: str
    metric: str
    value: float
    error: float | None = None


def mteb_scores(model: Any, tasks: Sequence[Any], *, batch_size: int = 32, progress: bool = False) -> list[Score]:
    """Score an embedding model on tasks of MTEB (Muennighoff et al. 2023, arXiv 2210.07316).

    Args:
        model: a SentenceTransformer, or anything else that `mteb.evaluate` takes.
        tasks: tasks, or their names.

    Returns:
        The main metric of each task, averaged over its evaluated splits and languages.

    Raises:
        DataError: mteb has no such task, or its data cannot be loaded.
        ModuleNotFoundError: mteb is not installed.
    """
    import mteb

    loaded_tasks = []
    for task in tasks:
        try:
            loaded_tasks.append(mteb.get_task(task) if isinstance(task, str) else task)
        except (KeyError, ValueError) as error:
            raise DataError(f"mteb has no task {task!r}: {one_line(error)}") from error
    scores = []
    for task in loaded_tasks:
        name = task.metadata.name
        options = {"cache": None, "co2_tracker": False, "encode_kwargs": {"batch_size": batch_size}}
        try:
            results = mteb.evaluate(model, task, show_progress_bar=progress, **options)
        except (OSError, ValueError) as error:  # errors of the hub are among both
            raise _unreachable("mteb", name, error) from error
        [result] = results.task_results
        scores.append(Score(name, task.metadata.main_score, float(result.get_score())))
    return scores


def lm_eval_scores(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    shots: int | None = None,
    limit: int | None = None,
    include: str | Path | None = None,
) -> list[Score]:
    """Score a decoder or an encoder–decoder on tasks of EleutherAI's LM evaluation harness.

    The harness scores a continuation by the tokens that follow those of its context. So if a decoder's tokenizer ends
    every text with a special token, as tokenizers of recipes do, texts are encoded without special tokens.

    Args:
        model: a model that predicts tokens, on the device to run on.
        tasks: names of tasks or of groups of tasks.
        shots: examples in a prompt; None for the task's default.
        limit: largest number of questions of each task, for a quick try; None for all.
        include: folder with further tasks, as YAML files.

    Returns:
        Every metric of each task and group.

    Raises:
        DataError: there is no such task, its data cannot be loaded, or the model predicts no tokens.
        ModuleNotFoundError: lm_eval is not installed.
    """
    if tokenizer is None or not model.can_generate():
        what = "has no tokenizer" if tokenizer is None else "predicts no tokens"
        raise DataError(f"{type(model).__name__} {what}; lm_eval takes a decoder, such as GPT2LMHeadModel, with one")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    for name in tasks:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks)
            raise DataError(f"lm_eval has no task {name!r}; close to it: {', '.join(near) or 'none'}")
    ends = bool(tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"][-1])
    add_bos_token = False if ends and not model.config.is_encoder_decoder else None
    harness_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, add_bos_token=add_bos_token)
    options = {"num_fewshot": shots, "limit": limit, "task_manager": manager, "log_samples": False}
    try:
        results = lm_eval.simple_evaluate(harness_model, tasks=list(tasks), **options)
    except (OSError, ValueError) as error:
        raise _unreachable("lm_eval", ", ".join(tasks), error) from error
    scores: list[Score] = []
    for name, metrics in {**results["results"], **results.get("groups", {})}.items():
        scores += _lm_eval_metrics(name, metrics)
    return scores


def _lm_eval_metrics(task: str, metrics: dict[str, Any]) -> Iterator[Score]:
    """Read `{"acc,none": 0.5, "acc_stderr,none": 0.1}`: keys are a metric and a filter of the answers."""
    for key, value in metrics.items():
        metric, comma, answer_filter = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{metric}_stderr,{answer_filter}")
        name = metric if answer_filter == "none" else f"{metric} ({answer_filter})"
        yield Score(task, name, float(value), error if isinstance(error, float) else None)


def _unreachable(package: str, tasks: str, error: Exception) -> DataError:
    return DataError(
        f"{package} cannot run {tasks}: {one_line(error)}; its data come from the hub, or from the cache of an "
        "earlier run"
    )
