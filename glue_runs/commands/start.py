"""Entry points of the commands: each reads its arguments or prints its help, then imports what it runs."""

import sys

from collab_compress_cli.command import command, errors_in_one_line, prepare_process, print_version
from collab_compress_cli.start import Words

from .arguments import EvaluateArguments, ResultsArguments
from .help import help_text


def evaluate(argv: Words = None) -> None:
    """Run `collab-evaluate`."""
    with command("collab-evaluate", EvaluateArguments, argv, steps=False) as arguments:
        from .evaluate import run

        run(arguments)


def results(argv: Words = None) -> None:
    """Run `collab-results`."""
    with command("collab-results", ResultsArguments, argv, steps=False) as arguments:
        from .results import run

        run(arguments)


def run() -> None:
    """Run `collab-run` with the words of the process."""
    with errors_in_one_line("collab-run", hold_warnings=False):
        _begin("collab-run")
        from .run import main
    main()


def sweep() -> None:
    """Run `collab-sweep` with the words of the process."""
    with errors_in_one_line("collab-sweep", hold_warnings=False):
        _begin("collab-sweep")
        from .run import sweep_main
    sweep_main()


def _begin(name: str) -> None:
    """Print help or version and exit, or prepare for large libraries."""
    if "--version" in sys.argv:
        print_version(name)
    if {"-h", "--help"} & set(sys.argv):
        print(help_text(name))
        sys.exit()
    prepare_process()
