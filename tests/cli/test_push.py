"""`xtrain push` against a hub on this machine."""

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from xtrain.cli.main import main

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
WEIGHTS = bytes(range(256)) * 40


class _Hub(ThreadingHTTPServer):
    """The requests of an upload. large: contents by SHA-256. files: committed contents by place; large ones by digest.
    spoils: place of a file that the commit changes. fails: it does not describe files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repos: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.files: dict[str, tuple[bytes, bool]] = {"old.txt": (b"kept", False)}
        self.spoils = ""
        self.fails = False

    @property
    def place(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _given(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size + 2)[:-2]
        self.rfile.readline()
        return found

    def do_GET(self) -> None:
        hub: Any = self.server
        name = self.path.removeprefix("/api/models/")
        if name not in hub.repos:
            self._answer({"error": "Repository Not Found"}, 401)
            return
        self._answer({"id": name, "modelId": name, "siblings": [], "private": hub.repos[name]})

    def do_PUT(self) -> None:
        hub: Any = self.server
        hub.large[self.path.rpartition("/")[2]] = self._given()
        self._answer({})

    def do_POST(self) -> None:
        hub: Any = self.server
        given, path = self._given(), self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_good":
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(given)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repos.setdefault(name, asked.get("private", asked.get("visibility") == "private"))
            self._answer({"url": f"{hub.place}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._answer({"warnings": [], "errors": []})
        elif "/preupload/" in path:
            names = [each["path"] for each in json.loads(given)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in names}
            self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(given)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{hub.place}/store/{each['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            for line in map(json.loads, given.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"]), False
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.large[value["oid"]], True
            self._answer({"commitUrl": f"{hub.place}/org/name/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            assert path.endswith(f"/paths-info/{COMMIT}"), path
            if hub.fails:
                self._answer({}, 500)
                return
            self._answer([_described(name, *hub.files[name], name == hub.spoils) for name in _paths(given)])


def _paths(given: bytes) -> list[str]:
    from urllib.parse import parse_qs

    return json.loads(given)["paths"] if given.startswith(b"{") else parse_qs(given.decode())["paths"]


def _described(name: str, content: bytes, large: bool, spoilt: bool) -> dict[str, Any]:
    content = b"spoilt" if spoilt else content
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found = {"type": "file", "path": name, "size": len(content), "oid": blob}
    digest = hashlib.sha256(content).hexdigest()
    return found | ({"lfs": {"oid": digest, "size": len(content), "pointerSize": 100}} if large else {})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    server = _Hub()
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.place)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tuned"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "more" / "README.md").write_text("a model")
    (folder / ".env").write_text("SECRET=1")
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_and_a_file(hub: _Hub, capsys: pytest.CaptureFixture[str]):
    assert main(["push", "tuned", "org/name"]) == 0
    assert hub.files == {
        "old.txt": (b"kept", False), "config.json": (b"{}", False), "model.safetensors": (WEIGHTS, True),
        "more/README.md": (b"a model", False),
    }  # fmt: skip
    said = capsys.readouterr().out
    assert said == f"uploaded 3 files, 10.0 KiB, to {hub.place}/org/name, private; digests compared\n"
    Path("m.gguf").write_bytes(WEIGHTS[1:])
    assert main(["push", "m.gguf", "org/other", "--public"]) == 0
    assert hub.files["m.gguf"] == (WEIGHTS[1:], True) and hub.repos == {"org/name": True, "org/other": False}
    assert ", public; digests" in capsys.readouterr().out


@pytest.mark.parametrize("spoilt", ["config.json", "model.safetensors"])
def test_another_file_than_was_sent_is_noticed(hub: _Hub, spoilt: str, capsys: pytest.CaptureFixture[str]):
    hub.spoils = spoilt
    assert main(["push", "tuned", "org/name"]) == 3
    said = f"xtrain push: {spoilt} of commit 89abcdef0123 differs from the file; push it again\n"
    assert said in capsys.readouterr().err


def test_files_that_were_not_compared_are_said(hub: _Hub, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fails = True
    assert main(["push", "tuned", "org/name"]) == 3
    said = "xtrain push: org/name has the files in commit 89abcdef0123, and they were not compared: "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("words", "status", "said"), [
    (["tuned", "name"], 2, "'name' is not a repository: write organisation/name"),
    (["tuned/more", "org/name"], 2, "tuned/more is no exported model; `xtrain export RUN --to FOLDER` writes one"),
    (["none.gguf", "org/name"], 2, "none.gguf is no exported model"),
])  # fmt: skip
def test_what_is_not_uploaded(hub: _Hub, words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["push", *words]) == status
    assert said in capsys.readouterr().err and not hub.repos


def test_a_hub_that_does_not_answer(hub: _Hub, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", "tuned", "org/name"]) == 3
    assert "xtrain push: org/name was not uploaded: " in capsys.readouterr().err


@pytest.mark.parametrize("token", ["", "hf_bad"])
def test_without_a_login_it_is_said(hub: _Hub, token: str, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HF_TOKEN", token)
    assert main(["push", "tuned", "org/name"]) == 3
    assert "log in with `hf auth login`" in capsys.readouterr().err and not hub.repos
