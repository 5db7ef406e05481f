"""Where the commands start: signals stop them quietly, and help is printed, before large libraries are loaded.

What takes time to import is imported in functions, so that signals are handled from the first moment.
"""

import os
import signal
import sys

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
    _open_streams()
    from importlib import import_module
    from importlib.metadata import version

    from .command import stopping_in_one_line

    with stopping_in_one_line(name, stop):
        if sys.argv[1:] == ["--version"]:
            print(f"{name} {version('collab-compress')}")
            return
        if {"-h", "--help"} & set(sys.argv[1:]):
            print_help(name)
            return
        _quiet_libraries()
        main = import_module(f".{module}", __package__).main
    main()


def _open_streams() -> None:
    """Open standard streams that are closed, and let the others print what their encoding has no character for."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            setattr(sys, name, open(descriptor, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number:
            stream.reconfigure(errors="backslashreplace")


def _quiet_libraries() -> None:
    """Silence warnings of libraries, which tell a user of a command nothing; `PYTHONWARNINGS=default` shows them."""
    import warnings

    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def print_help(name: str) -> None:
    """Print the help of a command, without torch and Transformers."""
    os.environ["COLLAB_COMPRESS_OPTIONS_ONLY"] = "1"  # this process ends when the help is printed
    from .help import help_text

    print(help_text(name))
