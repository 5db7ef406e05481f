"""The command run in this process, what it prints, and the model that its printed lines load."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from collab_compress_cli import start
from commands import ran
from transformers import BertForSequenceClassification, PreTrainedModel

from collab_compress.calibration import builtin


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a sixteenth of the built-in texts, which tiny models read."""
    lines = builtin._lines
    monkeypatch.setattr(builtin, "_lines", lambda name: lines(name)[::16])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: ran(start.compress, arguments, capsys)


@pytest.fixture
def succeeds(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    def printed(*arguments: object) -> str:
        """Run a command that must succeed; return its standard output."""
        code, output, error = run(*arguments)
        assert code == 0, error
        return output

    return printed


@pytest.fixture
def fails(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., str]:
    def message(*arguments: object) -> str:
        """Run a command that must fail with one line and leave nothing behind; return the line."""
        before = sorted(os.listdir(tmp_path))
        code, printed, error = run(*arguments)
        assert (code, printed) == (2, "")
        (line,) = error.splitlines()
        assert sorted(os.listdir(tmp_path)) == before
        return line

    return message


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], PreTrainedModel]:
    def load(printed: str) -> PreTrainedModel:
        """Return the model that the printed lines load."""
        namespace = {}
        lines = printed.split("To use it:\n")[1].strip().splitlines()
        assert len(lines) == 3
        exec("\n".join(line.strip() for line in lines), namespace)
        return namespace["model"].eval()

    return load


@pytest.fixture(scope="session")
def saved_tiny(
    make_tiny: Callable[..., PreTrainedModel], minilm_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "tiny"
    model = make_tiny("bert", BertForSequenceClassification)
    model.resize_token_embeddings(30522)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copyfile(minilm_path / name, directory / name)
    return directory


@pytest.fixture
def model_dir(saved_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny classifier with MiniLM's tokenizer, `tiny` in the current directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(saved_tiny, tmp_path / "tiny")
