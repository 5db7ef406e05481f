"""Functions that run in one or in all of the processes that `torchrun` or `accelerate launch` started together.

An error of the main process, or of any process in a function that runs in all, is an error of all of them. After
any other error a process exits, and its launcher stops the others.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from accelerate.utils import broadcast_object_list, gather_object
from collab_compress_cli.distributed import process_state

from collab_compress.errors import CollabCompressError, RecipeError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_main_process(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that runs in the main process while the others wait, and has its result in all of them."""

    @wraps(work)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        state = process_state()
        if state.num_processes == 1:
            return work(*args, **kwargs)
        outcome: list[Any] = [None, None]  # the result, the error's message
        error: Exception | None = None
        if state.is_main_process:
            try:
                outcome[0] = work(*args, **kwargs)
            except Exception as raised:
                error, outcome[1] = raised, message_of(raised)
        broadcast_object_list(outcome)
        result, message = outcome
        if message is not None:
            raise error or RecipeError(message)
        return result  # type: ignore[no-any-return]

    return run


def on_every_process(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function, itself without communication, that fails in all processes if it fails in one."""

    @wraps(work)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if process_state().num_processes == 1:
            return work(*args, **kwargs)
        error: Exception | None = None
        try:
            result = work(*args, **kwargs)
        except Exception as raised:
            error = raised
        messages = gather_object([None if error is None else message_of(error)])
        for number, message in enumerate(messages):
            if message is not None:
                raise error or RecipeError(f"process {number}: {message}")
        return result

    return run


def message_of(error: Exception) -> str:
    """Return the message of an error, with its type where it is none of this project's."""
    return str(error) if isinstance(error, CollabCompressError) else f"{type(error).__name__}: {error}"
