"""Putting a result on the hub, whose client is replaced by one that takes notes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from collab_compress_cli import model as command_model


class Api:
    """Stand in for the methods used of the hub's client."""

    endpoint = "hub"
    received: dict[str, bytes]

    def create_repo(self, name, *, exist_ok):
        assert exist_ok
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, repo_id, commit_message):
        if repo_id == "other/small":
            raise OSError("403 Forbidden:\nnot yours")
        type(self).received = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(command_model, "HfApi", Api)
    return Api


def test_a_command_puts_its_result_on_the_hub(hub, succeeds, model_dir):
    printed = succeeds("tiny", "--mix", "--output", "out", "--push-to-hub", "me/small")
    assert hub.received == {path.name: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    assert {"README.md", "config.json", "model.safetensors", "collab_compress.json"} <= set(hub.received)
    assert b"# out" in hub.received["README.md"]
    assert printed.endswith("On the hub: hub/me/small\n")


def test_what_the_hub_does_not_take(hub, run, model_dir):
    error = "saved to out, but the hub does not take other/small: 403 Forbidden: not yours"
    outcome = run("tiny", "--mix", "--output", "out", "--push-to-hub", "other/small", "--quiet")
    assert outcome == (2, "", f"collab-compress: {error}\n")
    assert Path("out/config.json").is_file()
