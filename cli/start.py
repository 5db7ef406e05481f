"""Entry points of the commands: each reads its arguments, then imports what it runs."""

from collections.abc import Sequence

from .arguments import (
    AnalyzeArguments,
    CompressArguments,
    DistillArguments,
    ExpandArguments,
    MergeArguments,
    PruneArguments,
)
from .command import command

Words = Sequence[str] | None
"""Command-line words, or None for those of the process."""


def analyze(argv: Words = None) -> None:
    """Run `collab-analyze`."""
    with command("collab-analyze", AnalyzeArguments, argv) as arguments:
        from .analyze import run

        run(arguments)


def compress(argv: Words = None) -> None:
    """Run `collab-compress`."""
    with command("collab-compress", CompressArguments, argv) as arguments:
        from .compress import run

        run(arguments)


def distill(argv: Words = None) -> None:
    """Run `collab-distill`."""
    with command("collab-distill", DistillArguments, argv) as arguments:
        from .distill import run

        run(arguments)


def expand(argv: Words = None) -> None:
    """Run `collab-expand`."""
    with command("collab-expand", ExpandArguments, argv) as arguments:
        from .edit import run_expand

        run_expand(arguments)


def merge(argv: Words = None) -> None:
    """Run `collab-merge`."""
    with command("collab-merge", MergeArguments, argv) as arguments:
        from .edit import run_merge

        run_merge(arguments)


def prune(argv: Words = None) -> None:
    """Run `collab-prune`."""
    with command("collab-prune", PruneArguments, argv) as arguments:
        from .edit import run_prune

        run_prune(arguments)
