import json
import os
import resource
from functools import partial

import pytest
from safetensors import SafetensorError

from collab_compress.checkpoint.files import (
    atomic_directory,
    atomic_file,
    refuse_place,
    write_atomically,
    write_json,
    write_new,
)
from collab_compress.errors import CheckpointError


def test_a_file_keeps_its_permissions(tmp_path):
    (tmp_path / "private").write_text("before", encoding="utf-8")
    (tmp_path / "private").chmod(0o600)
    write_atomically(tmp_path / "private", "after")
    assert (tmp_path / "private").read_text(encoding="utf-8") == "after"
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["private"]


def test_appears_whole(tmp_path):
    with atomic_directory(tmp_path / "deep" / "model") as directory:
        (directory / "file").write_text("x", encoding="utf-8")
        assert not (tmp_path / "deep" / "model").exists()
    assert (tmp_path / "deep" / "model" / "file").read_text(encoding="utf-8") == "x"
    assert os.listdir(tmp_path / "deep") == ["model"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):

    def fails():
        with atomic_directory(tmp_path / "deep" / "er" / "model") as directory:
            (directory / "file").write_text("x", encoding="utf-8")
            raise error

    with pytest.raises(error):
        fails()
    assert os.listdir(tmp_path / "deep" / "er") == []


@pytest.mark.parametrize("atomic", [atomic_directory, atomic_file])
def test_leftovers_of_a_killed_writer_do_no_harm(tmp_path, atomic):
    """A restarted pod has the host name and the process number of the one that was killed, as both have here."""
    killed = atomic(tmp_path / "model")
    killed.__enter__()
    with atomic(tmp_path / "model") as partial_path:
        if atomic is atomic_file:
            partial_path.touch()
    assert (tmp_path / "model").exists()


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "er" / "report.json"
    for value in ({"rank": 8}, {"folder": tmp_path, "mean": [0.5, None]}):
        write_json(path, value)
        assert os.listdir(path.parent) == ["report.json"]
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {"folder": str(tmp_path), "mean": [0.5, None]}
    assert text.endswith("}\n")


@pytest.mark.parametrize("place", ["file/report.json", "folder"])
def test_json_without_a_place_leaves_nothing(tmp_path, place):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"cannot write .*{place}: "):
        write_json(tmp_path / place, {})
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []


def kinds(folder):
    """Create one path of every kind that an output must not replace."""
    (folder / "file").write_text("theirs", encoding="utf-8")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    return ("file", "folder", "link", "dangling", "circle", "pipe", "new/..")


def test_existing_paths_of_any_kind_are_not_replaced(tmp_path):
    for name in kinds(tmp_path):
        before = sorted(os.listdir(tmp_path))
        for refuse in (
            refuse_place,
            partial(write_new, text="ours"),
            lambda path: atomic_directory(path).__enter__(),
        ):
            with pytest.raises(CheckpointError, match="exists; choose another output"):
                refuse(tmp_path / name)
        assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text(encoding="utf-8") == "theirs"
    assert os.readlink(tmp_path / "link") == "file"


@pytest.mark.parametrize("name", ["folder", "link", "dangling", "circle", "pipe"])
def test_only_regular_files_are_overwritten(tmp_path, name):
    kinds(tmp_path)
    with pytest.raises(CheckpointError, match="no regular file"):
        write_atomically(tmp_path / name, "ours")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "theirs"


def test_places_that_are_refused_before_the_work(tmp_path):
    kinds(tmp_path)
    for place, words in (
        ("folder/out", "lies in .*folder, which is read"),
        ("folder/deep/er/out", "lies in .*folder, which is read"),
        ("file/out", "file is not a directory"),
        ("circle/out", "circle is not a directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            refuse_place(tmp_path / place, tmp_path / "folder")
    refuse_place(tmp_path / "new" / "out", tmp_path / "folder")
    assert "new" not in os.listdir(tmp_path)


@pytest.mark.parametrize("error", [SafetensorError, Exception])
def test_a_full_disk_is_reported_whatever_library_raises(tmp_path, error):
    for write in (atomic_directory, atomic_file):
        with pytest.raises(CheckpointError, match=r"cannot write .*out: .*No space left"), write(tmp_path / "out"):
            raise error("I/O error: No space left on device (os error 28)")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_while_a_model_is_saved(make_tiny, tmp_path):
    """Imitate a full disk: no file may grow beyond 4 KB."""
    model, before = make_tiny("bert"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with (
            pytest.raises(CheckpointError, match=r"cannot write .*out"),
            atomic_directory(tmp_path / "out") as directory,
        ):
            model.save_pretrained(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []
