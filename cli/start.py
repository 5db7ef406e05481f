"""Where the commands start: an interrupt stops them quietly before the libraries that do the work are loaded."""

import os
import signal
import sys
from importlib import import_module
from importlib.metadata import version

from .command import stopping_in_one_line


def compress() -> None:
    """Run `collab-compress`."""
    _start("collab-compress", "compress")


def analyze() -> None:
    """Run `collab-analyze`."""
    _start("collab-analyze", "analyze")


def results() -> None:
    """Run `collab-results`."""
    _start("collab-results", "results")


def _start(name: str, module: str) -> None:
    def stop(*_: object) -> None:
        """Stop at once: nothing is written yet, or all is."""
        os.write(2, f"{name}: interrupted; nothing half-written is left\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if sys.argv[1:] == ["--version"]:
        print(f"{name} {version('collab-compress')}")
        return
    with stopping_in_one_line(name, stop):
        main = import_module(f".{module}", __package__).main
    main()
