import os
import subprocess
import sys

import pytest

from collab_compress.checkpoint.directory import whole_directory
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
        "import os, signal, sys; from pathlib import Path\n"
        "from collab_compress.checkpoint.directory import whole_directory\n"
        "with whole_directory(Path(sys.argv[1])) as d:\n"
        "    (d / 'file').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], check=False)
    assert not (tmp_path / "model").exists()
    with whole_directory(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == ["model"]
