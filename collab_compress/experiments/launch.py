"""Jobs of a cluster, through submitit."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from collab_compress.errors import RecipeError, one_line

Share = TypeVar("Share")


def launch(
    work: Callable[[Share], list[str]],
    shares: Sequence[Share],
    folder: Path,
    cluster: str | None,
    parameters: Mapping[str, Any],
) -> list[str]:
    """Do each share of a work in a job of its own, and wait for all of them; an interrupt cancels them.

    Args:
        work: what a job does with its share; gives what went wrong.
        shares: one for each job; on Slurm they are an array.
        folder: for submitit's files, which hold what jobs print; all machines must see it.
        cluster: slurm, local (processes of this machine), debug (this process); what submitit finds if None.
        parameters: of submitit's executor, such as timeout_min, slurm_partition and gpus_per_node.

    Returns:
        What went wrong, once each; a job that did not come to its end is told with its log.

    Raises:
        RecipeError: submitit is not installed, there is no such cluster, it knows no such parameter, or the folder
            cannot be written to.
    """
    try:
        submitit = import_module("submitit")
    except ImportError as error:
        raise RecipeError("the launcher submitit is not installed: pip install 'collab-compress[cluster]'") from error
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**parameters)
        with executor.batch():
            jobs = [executor.submit(work, share) for share in shares]
    except (NameError, RuntimeError, TypeError, ValueError, AssertionError, OSError) as error:
        raise RecipeError(f"submitit cannot start jobs from {folder}: {one_line(error)}") from error
    failed: list[str] = []
    try:
        for job in jobs:
            try:
                failed += job.result()
            except Exception as error:
                failed.append(f"job {job.job_id}: {one_line(error)}; its log is {job.paths.stderr}")
    except BaseException:
        for job in jobs:
            with suppress(Exception):  # gone already
                job.cancel()
        raise
    return list(dict.fromkeys(failed))
