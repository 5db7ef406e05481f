"""Where commands write: places that collide, and a text file that is edited in place."""

import os
from pathlib import Path

import pytest
from collab_compress_cli.outputs import check_outputs, edit

from collab_compress.errors import CheckpointError, CollabCompressError


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"--output": "out", "--json": "out"}, "--output and --json are both out"),
        ({"--output": "out", "--json": "new/../out"}, "--output and --json are both"),
        ({"--json": "out/report.json", "--output": "out"}, "--json out/report.json lies in --output out"),
        ({"--pages": "a", "--records": "a/b/c"}, "--records a/b/c lies in --pages a"),
        ({"--output": "read/out", "--json": None}, "read/out lies in read, which is read"),
        ({"--json": "read/text"}, "exists"),
    ],
)
def test_places_that_collide(tmp_path, monkeypatch, outputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "text").write_text("x")
    paths = {option: None if path is None else Path(path) for option, path in outputs.items()}
    with pytest.raises(CollabCompressError, match=message):
        check_outputs(paths, Path("read"), None)
    check_outputs({"--output": Path("out"), "--json": Path("out.json"), "--pages": None}, Path("read"))


def test_an_edited_file_keeps_its_mode_and_links(tmp_path):
    path, link = tmp_path / "page.md", tmp_path / "link.md"
    path.write_bytes(b"a long text\r\n")
    path.chmod(0o600)
    os.link(path, link)
    edit(path, "short\r\n")
    assert link.read_bytes() == b"short\r\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link.md", "page.md"]


def test_what_is_not_edited(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("text")
    path.chmod(0o444)
    with pytest.raises(CheckpointError, match="write-protected"):
        edit(path, "other")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none"):
        with pytest.raises(CheckpointError, match="expected a file that exists"):
            edit(tmp_path / name, "other")
    assert path.read_text() == "text"
    path.chmod(0o644)
    with pytest.raises(UnicodeEncodeError):
        edit(path, "no \ud800")
    assert path.read_text() == "text"
