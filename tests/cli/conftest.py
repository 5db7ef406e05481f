"""The command run in this process, and the model that its printed lines load."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from collab_compress_cli import compress as command
from transformers import BertForSequenceClassification, PreTrainedModel


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
        """Return the model that the printed lines load."""
        namespace = {}
        lines = printed.split("To use it:\n")[1].strip().splitlines()
        assert len(lines) == 3
        exec("\n".join(line.strip() for line in lines), namespace)
        return namespace["model"].eval()

    return load


@pytest.fixture
def model_dir(make_tiny: Callable[..., PreTrainedModel], minilm_path: Path, tmp_path: Path) -> Path:
    """A tiny classifier with MiniLM's tokenizer."""
    directory = tmp_path / "tiny"
    model = make_tiny("bert", BertForSequenceClassification)
    model.resize_token_embeddings(30522)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copyfile(minilm_path / name, directory / name)
    return directory
