"""The command run in this process, and the model that its printed lines load."""

import sys
from collections.abc import Callable

import pytest
from collab_compress_cli import compress as command
from transformers import PreTrainedModel


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_command(*arguments: object) -> tuple[int, str, str]:
        """Run the command; returns exit code, standard output, standard error."""
        monkeypatch.setattr(sys, "argv", ["collab-compress", *map(str, arguments)])
        try:
            command.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run_command


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], PreTrainedModel]:
    def load(printed: str) -> PreTrainedModel:
        """The model that the printed lines load."""
        namespace = {}
        lines = printed.split("To use it:\n")[1].strip().splitlines()
        assert len(lines) == 3
        exec("\n".join(line.strip() for line in lines), namespace)
        return namespace["model"].eval()

    return load
