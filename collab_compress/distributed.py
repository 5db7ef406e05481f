"""Processes that `torchrun` or `accelerate launch` started together."""

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
PATIENCE = timedelta(days=2)  # while one process converts, scores or writes, the others wait


def process_state() -> PartialState:
    """Return the processes that run this together; without a GPU they meet on the CPU.

    Raises:
        CollabCompressError: the environment names processes that were not started.
    """
    names = [name for name in LAUNCHED if name in os.environ]  # Accelerate sets others itself
    try:
        return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
    except (KeyError, ValueError, torch.distributed.DistError) as error:
        if not names:
            raise
        raise CollabCompressError(
            f"the environment says that several processes were started ({', '.join(names)}), but they cannot meet: "
            f"{one_line(error)}; unset these variables, or start with torchrun"
        ) from error


def end_processes() -> None:
    """End what the processes share, if anything; one that exits without may be aborted by the threads of it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


Done = TypeVar("Done")
EVERYWHERE = "_known_to_all_processes"
GRACE = timedelta(seconds=10)
"""How long one that failed waits for the others to notice."""


def on_main_process(work: Callable[[], Done]) -> Done:
    """Run a function in the main process while the others wait, and return its result in all of them.

    Raises:
        RecipeError: what went wrong in the main process, which raises the error itself.
    """
    state = process_state()
    if state.num_processes == 1:
        return work()
    told: list[Any] = [None, None]
    error: Exception | None = None
    if state.is_main_process:
        try:
            told[0] = work()
        except Exception as found:
            error, told[1] = found, _words(found)
    broadcast_object_list(told)
    if told[1] is not None:
        raise _known(error or RecipeError(told[1]))
    done: Done = told[0]
    return done


def on_every_process(work: Callable[[], Done]) -> Done:
    """Run a function without communication in each process; if it fails in one, it fails in all.

    Raises:
        RecipeError: what went wrong in another process; one's own error is raised itself.
    """
    state = process_state()
    if state.num_processes == 1:
        return work()
    error: Exception | None = None
    try:
        done = work()
    except Exception as found:
        error = found
    said = gather_object([None if error is None else _words(error)])
    for number, words in enumerate(said):
        if words is not None:
            raise _known(error or RecipeError(f"process {number}: {words}"))
    return done


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error of one process in all of them, also in those that wait for it, so that they can continue.

    What the processes share is closed, which ends the waiting of the others, and opened anew when all have said what
    went wrong. Where the others cannot be woken, as in the middle of a training step or in NCCL, they are not met
    again (`can_meet`): the process that failed is to end, which ends the waiting of the others.

    Raises:
        RecipeError: what went wrong in the process that failed first, which raises the error itself.
    """
    alone = process_state().num_processes == 1
    try:
        yield
    except BaseException as error:
        if alone or getattr(error, EVERYWHERE, False) or not can_meet():
            raise
        if (first := _part(error)) is None:
            raise
        raise RecipeError(first) from error


def can_meet() -> bool:
    """Return whether the processes can continue together, also after an error."""
    return process_state().num_processes == 1 or torch.distributed.is_initialized()


def _part(error: BaseException) -> str | None:
    """Close what the processes share, and open it anew; gives what another said that failed before this one."""
    state, backend = process_state(), torch.distributed.get_backend()
    shared = distributed_c10d._get_default_store()
    store = distributed_c10d.PrefixStore("failed", shared)
    place, own = store.add("order", 1), state.process_index

    def say(stop: bool) -> None:
        store.set(str(own), json.dumps([place, stop, _words(error)]))

    say(not isinstance(error, Exception) or backend != "gloo")
    distributed_c10d._abort_process_group()
    names = [str(number) for number in range(state.num_processes)]
    try:
        store.wait(names, GRACE)
    except RuntimeError:  # some wait where they cannot be told, until this process is gone
        say(True)
        return None
    said = sorted((*json.loads(store.get(name)), int(name)) for name in names)
    if not any(stop for _, stop, _, _ in said):
        torch.distributed.init_process_group(
            backend, store=distributed_c10d.PrefixStore("again", shared), rank=own,
            world_size=state.num_processes, timeout=PATIENCE,
        )  # fmt: skip
    _, _, words, number = said[0]
    return None if number == own else f"process {number}: {words}"


def _words(error: BaseException) -> str:
    known = isinstance(error, CollabCompressError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _known(error: Exception) -> Exception:
    setattr(error, EVERYWHERE, True)
    return error
