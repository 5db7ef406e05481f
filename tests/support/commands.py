"""Commands run in this process."""

from collections.abc import Callable

import pytest


def ran(
    main: Callable[[list[str]], None], arguments: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run a command; return exit code, standard output and standard error."""
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()
