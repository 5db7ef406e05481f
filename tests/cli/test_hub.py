"""A hub on this machine, which the hub's own client asks: nothing of ours or of the client is replaced."""

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from collab_compress_cli.pretrained import EMBEDDED, EMBEDDED_REPOSITORY, SHORT_NAMES, find_directory
from huggingface_hub import constants

from collab_compress.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WANTED = {"config.json": b"{}", "model.safetensors": b"weights", "vocab.txt": b"words", "README.md": b"card"}
WANTED |= {"LICENSE": b"terms", "1_Pooling/config.json": b"{ }"}
FILES = WANTED | {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"raise", "onnx/config.json": b"{}"}
MODELS = {"someone/tiny", SHORT_NAMES["bert-base"], EMBEDDED_REPOSITORY}


class Hub(BaseHTTPRequestHandler):
    """Lists and serves the files of a few models, of which each has the same."""

    protocol_version = "HTTP/1.1"
    broken = gated = silent = False

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        model = next((name for name in MODELS if name in path), None)
        if self.silent:
            self.close_connection = True
            return None
        if self.broken:
            return self.answer(500, b"")
        if self.gated and "/resolve/" in path:  # what files there are, anyone may know
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if model is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.endswith("/revision/v9"):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if f"/tree/{COMMIT}" in path:
            listed = [
                {"type": "file", "path": name, "size": len(text), "oid": self.oid(text)}
                for name, text in FILES.items()
            ]
            return self.answer(200, json.dumps(listed).encode())
        if path.startswith("api/models/"):
            listed = [{"rfilename": name} for name in FILES]
            return self.answer(200, json.dumps({"id": model, "sha": COMMIT, "siblings": listed}).encode())
        text = FILES[path.split(f"/resolve/{COMMIT}/")[1]]
        return self.answer(200, text, {"ETag": f'"{self.oid(text)}"', "X-Repo-Commit": COMMIT})

    @staticmethod
    def oid(text):
        return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[type[Hub]]:
    handler = type("OneHub", (Hub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_name_on_the_hub_gives_the_files_that_are_needed(hub, monkeypatch):
    steps = []
    monkeypatch.setattr("collab_compress_cli.pretrained.progress", steps.append)
    folder = find_directory("someone/tiny")
    assert steps == ["fetching someone/tiny from the hub, or from its cache"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files == WANTED
    hub.broken = True  # from now on it comes from the cache
    assert find_directory("someone/tiny") == folder


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("someone/other", {}, "someone/other is neither a directory nor a model on the hub"),
        ("someone/tiny", {"silent": True}, "cannot download someone/tiny: .*disconnected"),
        ("someone/tiny", {"gated": True}, "someone/tiny is gated; request access on its page"),
    ],
)
def test_what_the_hub_does_not_give(hub, name, state, message):
    for attribute, value in state.items():
        setattr(hub, attribute, value)
    with pytest.raises(CheckpointError, match=message):
        find_directory(name)


def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot download someone/tiny: .*Not a directory"):
        find_directory("someone/tiny")


def test_a_revision_is_of_the_hub(hub, tmp_path):
    for name in (str(tmp_path), EMBEDDED):
        with pytest.raises(CheckpointError, match="is a local model without revisions"):
            find_directory(name, "v1")
    for name in ("someone/tiny", "bert-base", EMBEDDED_REPOSITORY):
        assert (find_directory(name, COMMIT) / "config.json").is_file()
    with pytest.raises(CheckpointError, match="someone/tiny has no revision 'v9' on the hub"):
        find_directory("someone/tiny", "v9")


def test_a_router_is_refused_with_its_towers(hub, monkeypatch):
    monkeypatch.delitem(FILES, "config.json")
    monkeypatch.setitem(FILES, "modules.json", b"[]")
    monkeypatch.setitem(FILES, "query_0_Transformer/config.json", b'{"model_type": "bert"}')
    message = "it holds models in [^,]*query_0_Transformer: pass one of them, and put the result in its place$"
    with pytest.raises(CheckpointError, match=message):
        find_directory("someone/tiny")
