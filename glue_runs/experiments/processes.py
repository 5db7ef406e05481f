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
        result, error = _attempt(work, *args, **kwargs) if state.is_main_process else (None, None)
        shared: list[Any] = [result, error and message_of(error)]
        broadcast_object_list(shared)
        if shared[1] is not None:
            raise error or RecipeError(shared[1])
        return shared[0]  # type: ignore[no-any-return]

    return run


def on_every_process(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function, itself without communication, that fails in all processes if it fails in one."""

    @wraps(work)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if process_state().num_processes == 1:
            return work(*args, **kwargs)
        result, error = _attempt(work, *args, **kwargs)
        for number, message in enumerate(gather_object([error and message_of(error)])):
            if message is not None:
                raise error or RecipeError(f"process {number}: {message}")
        return result  # type: ignore[return-value]

    return run


def _attempt(work: Callable[..., Result], *args: Any, **kwargs: Any) -> tuple[Result | None, Exception | None]:
    """Return the result of a function, or its error."""
    try:
        return work(*args, **kwargs), None
    except Exception as error:
        return None, error


def message_of(error: Exception) -> str:
    """Return the message of an error, with its type where it is none of this project's."""
    return str(error) if isinstance(error, CollabCompressError) else f"{type(error).__name__}: {error}"
