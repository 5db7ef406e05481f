"""Entry points of the commands: signals stop them, and help is printed, before large libraries are loaded.

Waiting threads of PyTorch spin for a moment only, because other programs may use the cores too.

What takes time to import is imported in functions, so that signals are handled from the first moment.
"""

import os
import signal
import sys
import warnings
from functools import partial
from importlib import import_module, reload
from typing import Any

OPTIONS_ONLY = "COLLAB_COMPRESS_OPTIONS_ONLY"  # keeps the library from importing torch and Transformers
COMMANDS = {
    "collab-analyze": "analyze.main",
    "collab-compress": "compress.main",
    "collab-expand": "edit.expand_main",
    "collab-merge": "edit.merge_main",
    "collab-prune": "edit.prune_main",
}
"""Command → the function that runs it, in this package."""
SPINNING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}  # of GNU's OpenMP in turns, of LLVM's and Intel's in ms
WAITING = (*SPINNING, "OMP_WAIT_POLICY")  # a user who sets one of these variables decides


def start(name: str, package: str = __package__) -> None:
    """Run a command with the arguments of the process.

    Args:
        name: of the command.
        package: with its entry in `start.COMMANDS`, its arguments in `arguments`, and its help in `help`.
    """
    from .progress import progress

    def stop(*_: object) -> None:
        """Exit at once: nothing is written before libraries are loaded."""
        progress.clear()
        os.write(2, f"{name}: interrupted; nothing half-written is left\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    _open_streams()
    from importlib.metadata import version

    from .command import errors_in_one_line

    with errors_in_one_line(name, stop):
        if sys.argv[1:] == ["--version"]:
            print(f"{name} {version('collab-compress')}")
            return
        if {"-h", "--help"} & set(sys.argv[1:]):
            print_help(name, package)
            return
        arguments = parsed(name, package)
        if not sys.warnoptions:  # PYTHONWARNINGS=default shows them
            warnings.simplefilter("ignore")
        if package == __package__ and "--quiet" not in sys.argv:  # experiments have progress bars of their own
            progress.begin(name)
            progress("loading PyTorch and Transformers")
        if not any(variable in os.environ for variable in WAITING):
            os.environ |= SPINNING  # read when torch is loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ["RUST_BACKTRACE"] = "0"  # of tokenizers, which print it themselves
        library = import_module("collab_compress")
        if not hasattr(library, "compress"):  # only its options are loaded
            reload(library)
        module, function = import_module(".start", package).COMMANDS[name].split(".")
        main = getattr(import_module(f".{module}", package), function)
    main() if arguments is None else main(arguments)


def parsed(name: str, package: str = __package__) -> Any:
    """Return the arguments of a command, read without importing torch and Transformers; None for recipes."""
    os.environ[OPTIONS_ONLY] = "1"
    from .arguments import check_places
    from .command import arguments_of, parse

    arguments_class = arguments_of(name, import_module(".arguments", package))
    result = None
    if arguments_class is not None:
        result = parse(arguments_class, name, sys.argv[1:])
        check_places(result)
    del os.environ[OPTIONS_ONLY]
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


def print_help(name: str, package: str) -> None:
    """Print the help of a command, without importing torch and Transformers."""
    os.environ[OPTIONS_ONLY] = "1"  # this process ends when the help is printed
    print(import_module(".help", package).help_text(name, import_module(".arguments", package)))


analyze = partial(start, "collab-analyze")
compress = partial(start, "collab-compress")
expand = partial(start, "collab-expand")
merge = partial(start, "collab-merge")
prune = partial(start, "collab-prune")
