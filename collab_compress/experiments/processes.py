"""What processes that run an experiment together do once for all of them."""

from collections.abc import Callable

from accelerate.utils import broadcast_object_list

from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.processes import processes


def once(work: Callable[[], object]) -> None:
    """Let the main process do something while the others wait; if it fails on purpose, it fails in all of them.

    Raises:
        RecipeError: what went wrong.
    """
    state, failed = processes(), [None]
    error: CollabCompressError | None = None
    if state.is_main_process:
        try:
            work()
        except CollabCompressError as found:
            error, failed = found, [str(found)]  # type: ignore[list-item]
    if state.num_processes > 1:
        broadcast_object_list(failed)
    if error is not None:
        raise error
    if failed[0] is not None:
        raise RecipeError(failed[0])
