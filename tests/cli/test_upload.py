"""Putting a result on the hub, whose client is replaced by one that takes notes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from collab_compress_cli import model as command_model
from collab_compress_cli.start import expand

from collab_compress import Compression, Solver, compress


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


@pytest.fixture
def small(make_tiny, tmp_path):
    """A converted model in a folder."""
    model = make_tiny("bert")
    compress(model, Compression(8, solver=Solver(sweeps=2)), calibration=None)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_command_puts_its_result_on_the_hub(hub, small, tmp_path, capsys):
    output = tmp_path / "out"
    expand([str(small), "--output", str(output), "--push-to-hub", "me/small"])
    assert hub.received == {path.name: path.read_bytes() for path in output.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "collab_compress.json"} <= set(hub.received)
    assert b"# out" in hub.received["README.md"]
    assert capsys.readouterr().out.endswith("On the hub: hub/me/small\n")


def test_what_the_hub_does_not_take(hub, small, tmp_path, capsys):
    output = tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        expand([str(small), "--output", str(output), "--push-to-hub", "other/small", "--quiet"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"saved to {output}, but the hub does not take other/small: 403 Forbidden: not yours" in printed.err
    assert (output / "config.json").is_file()
