"""What commands that write a folder have in common: quiet libraries, and one line when something stops them."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import transformers

from collab_compress import CollabCompressError
from collab_compress.processes import leave


@contextmanager
def stopping_in_one_line(name: str) -> Iterator[None]:
    """Turn errors into a line on standard error and exit code 2, and an interrupt or SIGTERM into one and 130."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except CollabCompressError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing half-written is left", file=sys.stderr)
        sys.exit(130)
    finally:
        leave()


def silence_libraries() -> None:
    """Keep Transformers' bars and messages, and the hub's, off the terminal."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _terminate(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
