"""Run functions in processes that `torchrun` or `accelerate launch` started together."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import distributed_c10d

from collab_compress.errors import CollabCompressError, RecipeError, one_line

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(days=2)  # for which processes wait while one converts, scores or writes
GRACE = timedelta(seconds=10)  # for which a process that failed waits for the others to notice
EVERYWHERE = "_known_to_all_processes"
Result = TypeVar("Result")


def process_state() -> PartialState:
    """Return the state of the processes that run together; without a GPU they communicate on the CPU.

    Raises:
        CollabCompressError: the environment describes processes that were not started.
    """
    names = [name for name in LAUNCHED if name in os.environ]  # Accelerate sets others itself
    try:
        return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
    except (KeyError, ValueError, torch.distributed.DistError) as error:
        if not names:
            raise
        raise CollabCompressError(
            f"the environment says that several processes were started ({', '.join(names)}), but they cannot "
            f"connect: {one_line(error)}; unset these variables, or start with torchrun"
        ) from error


def end_processes() -> None:
    """Destroy the process group, if there is one; without, its threads may abort a process that exits."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on_main_process(work: Callable[[], Result]) -> Result:
    """Run a function in the main process while the others wait, and return its result in all of them.

    Raises:
        RecipeError: the function failed in the main process, which raises its own error.
    """
    state = process_state()
    if state.num_processes == 1:
        return work()
    outcome: list[Any] = [None, None]  # the result, the error's message
    error: Exception | None = None
    if state.is_main_process:
        try:
            outcome[0] = work()
        except Exception as raised:
            error, outcome[1] = raised, _message(raised)
    broadcast_object_list(outcome)
    result, message = outcome
    if message is not None:
        raise _known_everywhere(error or RecipeError(message))
    return result  # type: ignore[no-any-return]


def on_every_process(work: Callable[[], Result]) -> Result:
    """Run a function without communication in each process; if it fails in one, it fails in all.

    Raises:
        RecipeError: the function failed in another process; a process that fails raises its own error.
    """
    state = process_state()
    if state.num_processes == 1:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    messages = gather_object([None if error is None else _message(error)])
    for number, message in enumerate(messages):
        if message is not None:
            raise _known_everywhere(error or RecipeError(f"process {number}: {message}"))
    return result


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error of one process in all of them, also in those that wait for it, so that they can continue.

    The process group is aborted, which ends the waiting of the others, and created again when all have reported their
    error. Where the others cannot be interrupted, as in the middle of a training step or in NCCL, there is no new
    group (`can_continue_together`): the process that failed must exit, which ends the waiting of the others.

    Raises:
        RecipeError: an error of the process that failed first, which raises its own error.
    """
    alone = process_state().num_processes == 1
    try:
        yield
    except BaseException as error:
        if alone or getattr(error, EVERYWHERE, False) or not can_continue_together():
            raise
        first = _recreate_group(error)
        if first is None:
            raise
        raise RecipeError(first) from error


def can_continue_together() -> bool:
    """Return whether the processes can continue together, also after an error."""
    return process_state().num_processes == 1 or torch.distributed.is_initialized()


def _recreate_group(error: BaseException) -> str | None:
    """Abort and recreate the process group; return the first error if it is another process's."""
    state, backend = process_state(), torch.distributed.get_backend()
    rank = state.process_index
    shared_store = distributed_c10d._get_default_store()
    store = distributed_c10d.PrefixStore("failed", shared_store)
    order = store.add("order", 1)

    def report(stop: bool) -> None:
        store.set(str(rank), json.dumps([order, stop, _message(error)]))

    report(not isinstance(error, Exception) or backend != "gloo")
    distributed_c10d._abort_process_group()
    names = [str(number) for number in range(state.num_processes)]
    try:
        store.wait(names, GRACE)
    except RuntimeError:  # some wait where they cannot be interrupted, until this process exits
        report(True)
        return None
    reports = sorted((*json.loads(store.get(name)), int(name)) for name in names)
    if not any(stop for _, stop, _, _ in reports):
        torch.distributed.init_process_group(
            backend,
            store=distributed_c10d.PrefixStore("again", shared_store),
            rank=rank,
            world_size=state.num_processes,
            timeout=PATIENCE,
        )
    _, _, message, number = reports[0]
    return None if number == rank else f"process {number}: {message}"


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, CollabCompressError) else f"{type(error).__name__}: {error}"


def _known_everywhere(error: Exception) -> Exception:
    setattr(error, EVERYWHERE, True)
    return error
