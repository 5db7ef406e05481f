import json
import os
import subprocess
import sys

import psutil
import pytest

from collab_compress.checkpoint.directory import whole_directory, write_whole_json
from collab_compress.errors import CheckpointError


def test_appears_whole(tmp_path):
    with whole_directory(tmp_path / "deep" / "model") as directory:
        (directory / "file").write_text("x", encoding="utf-8")
        assert not (tmp_path / "deep" / "model").exists()
    assert (tmp_path / "deep" / "model" / "file").read_text(encoding="utf-8") == "x"
    assert os.listdir(tmp_path / "deep") == ["model"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):

    def fails():
        with whole_directory(tmp_path / "deep" / "er" / "model") as directory:
            (directory / "file").write_text("x", encoding="utf-8")
            raise error

    with pytest.raises(error):
        fails()
    assert os.listdir(tmp_path) == []


def test_what_exists_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists; choose another output"), whole_directory(tmp_path / "model"):
        pass


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot write"), whole_directory(tmp_path / "file" / "model"):
        pass


def test_a_killed_writer_leaves_no_result_and_the_next_clears_up(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from collab_compress.checkpoint.directory import whole_directory\n"
        "with whole_directory(Path(sys.argv[1])) as d:\n"
        "    (d / 'file').write_text('half'); os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], check=False)
    assert not (tmp_path / "model").exists()
    with whole_directory(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("pid", [4321, 10**12])
def test_who_writes_is_asked_without_a_signal(tmp_path, monkeypatch, pid):
    """On Windows `os.kill` ends the process, whatever the signal."""
    (tmp_path / f".model.partial-{pid}").mkdir()
    exists = psutil.pid_exists
    monkeypatch.setattr(psutil, "pid_exists", lambda number: number == 4321 or exists(number))
    if pid == 4321:
        monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    with whole_directory(tmp_path / "model"):
        pass
    assert sorted(os.listdir(tmp_path)) == [f".model.partial-{pid}", "model"]


def test_json_appears_whole_and_replaces(tmp_path):
    path = tmp_path / "deep" / "er" / "report.json"
    for value in ({"rank": 8}, {"folder": tmp_path, "mean": [0.5, None]}):
        write_whole_json(path, value)
        assert os.listdir(path.parent) == ["report.json"]
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {"folder": str(tmp_path), "mean": [0.5, None]}
    assert text.endswith("}\n")


def test_json_that_cannot_be_made_leaves_what_was_there(tmp_path):
    write_whole_json(tmp_path / "report.json", 1)
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        write_whole_json(tmp_path / "report.json", endless)
    assert os.listdir(tmp_path) == ["report.json"]
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == "1\n"


@pytest.mark.parametrize("place", ["file/report.json", "folder"])
def test_json_without_a_place_leaves_nothing(tmp_path, place):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"cannot write .*{place}: "):
        write_whole_json(tmp_path / place, {})
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []
