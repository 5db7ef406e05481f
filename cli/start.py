"""Entry points of the commands: signals stop them, and help is printed, before large libraries are loaded.

What takes time to import is imported in functions, so that signals are handled from the first moment.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import reload
from typing import Any

OPTIONS_ONLY = "COLLAB_COMPRESS_OPTIONS_ONLY"  # keeps the library from importing torch and Transformers
COMMANDS = {
    "collab-analyze": "analyze.main",
    "collab-compress": "compress.main",
    "collab-evaluate": "evaluate.main",
    "collab-expand": "edit.expand_main",
    "collab-merge": "edit.merge_main",
    "collab-prune": "edit.prune_main",
    "collab-recover": "recover.main",
    "collab-results": "results.main",
    "collab-run": "run.main",
    "collab-sweep": "run.sweep_main",
}
"""Command → the function that runs it, in this package."""


def start(name: str) -> None:
    """Run a command with the arguments of the process."""

    def stop(*_: object) -> None:
        """Exit at once: nothing is written before libraries are loaded."""
        os.write(2, f"{name}: interrupted; nothing half-written is left\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    _open_streams()
    from importlib import import_module
    from importlib.metadata import version

    from .command import errors_in_one_line

    with errors_in_one_line(name, stop):
        if sys.argv[1:] == ["--version"]:
            print(f"{name} {version('collab-compress')}")
            return
        if {"-h", "--help"} & set(sys.argv[1:]):
            print_help(name)
            return
        arguments = parsed(name)
        if not sys.warnoptions:  # PYTHONWARNINGS=default shows them
            warnings.simplefilter("ignore")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ["RUST_BACKTRACE"] = "0"  # of tokenizers, which print it themselves
        module, function = COMMANDS[name].split(".")
        main = getattr(import_module(f".{module}", __package__), function)
    main() if arguments is None else main(arguments)


def parsed(name: str) -> Any:
    """Return the arguments of a command, read without importing torch and Transformers; None for recipes."""
    os.environ[OPTIONS_ONLY] = "1"
    import collab_compress

    from . import arguments
    from .command import parse

    words: Sequence[str] = sys.argv[1:]
    arguments_class = getattr(arguments, f"{name.removeprefix('collab-').capitalize()}Arguments", None)
    result = None
    if arguments_class is not None:
        words = arguments.with_steps(words) if name == "collab-compress" else words
        result = parse(arguments_class, name, words)
        arguments.check_places(result)
    del os.environ[OPTIONS_ONLY]
    if not hasattr(collab_compress, "compress"):
        reload(collab_compress)
    return result


def _open_streams() -> None:
    """Open standard streams that are closed, and escape what the encoding of the others cannot print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is that of this stream
            setattr(sys, name, open(descriptor, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number:
            stream.reconfigure(errors="backslashreplace")


def print_help(name: str) -> None:
    """Print the help of a command, without importing torch and Transformers."""
    os.environ[OPTIONS_ONLY] = "1"  # this process ends when the help is printed
    from .help import help_text

    print(help_text(name))


analyze = partial(start, "collab-analyze")
compress = partial(start, "collab-compress")
evaluate = partial(start, "collab-evaluate")
expand = partial(start, "collab-expand")
merge = partial(start, "collab-merge")
prune = partial(start, "collab-prune")
recover = partial(start, "collab-recover")
results = partial(start, "collab-results")
run = partial(start, "collab-run")
sweep = partial(start, "collab-sweep")
