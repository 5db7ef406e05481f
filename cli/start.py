"""Where the commands start: help is told, and an interrupt stops them quietly, before large libraries are loaded."""

import os
import signal
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from .command import stopping_in_one_line

COMMANDS = {
    f"collab-{name}": name
    for name in ("analyze", "compress", "evaluate", "expand", "merge", "prune", "recover", "results", "run", "sweep")
}
"""Command → its module, and its function here."""


def analyze() -> None:
    """Run `collab-analyze`."""
    _start("analyze")


def compress() -> None:
    """Run `collab-compress`."""
    _start("compress")


def evaluate() -> None:
    """Run `collab-evaluate`."""
    _start("evaluate")


def expand() -> None:
    """Run `collab-expand`."""
    _start("expand")


def merge() -> None:
    """Run `collab-merge`."""
    _start("merge")


def prune() -> None:
    """Run `collab-prune`."""
    _start("prune")


def recover() -> None:
    """Run `collab-recover`."""
    _start("recover")


def results() -> None:
    """Run `collab-results`."""
    _start("results")


def run() -> None:
    """Run `collab-run`."""
    _start("run")


def sweep() -> None:
    """Run `collab-sweep`."""
    _start("sweep")


def _start(module: str) -> None:
    name = f"collab-{module}"

    def stop(*_: object) -> None:
        """Stop at once: nothing is written yet, or all is."""
        os.write(2, f"{name}: interrupted; nothing half-written is left\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if sys.argv[1:] == ["--version"]:
        print(f"{name} {version('collab-compress')}")
        return
    if {"-h", "--help"} & set(sys.argv[1:]):
        with stopping_in_one_line(name, stop):
            print(help_text(name))
        return
    with stopping_in_one_line(name, stop):
        main = import_module(f".{module}", __package__).main
    main()


def help_text(name: str) -> str:
    """Give the help of a command, which `python -m collab_compress_cli.help` has written beforehand."""
    return (Path(__file__).parent / "help_texts" / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
