"""Sources whose patterns are URLs: the tokens of the same files on this machine, whatever the connection does."""

import gzip
import hashlib
import http.server
import os
import pickle
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from tokenising import contents

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.sources import remote
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.token_store import TokenStore

LINES = [f'{{"text": "document {number} {"é" * number}"}}\n' for number in range(300)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.0)


def read(kind: str, *patterns: str, base: Path) -> DataSource:
    reads = {"tokens": "tokens"} if kind == "tokens" else {"text": "text"}
    options = {"dtype": None, "separator": 0} if kind == "tokens" else {}
    return open_source(kind, patterns=patterns, options=options, reads=reads, base=base, objects=base / "objects")


def build(source: DataSource, cache: Path, progress: Any = None) -> TokenStore:
    return build_store(source, DocumentEncoder(ByteTokenizer(), {}), cache, jobs=1, progress=progress)


def tokens(source: DataSource, cache: Path) -> list[list[int]]:
    store = build(source, cache)
    return [store.document(number).tolist() for number in range(store.num_documents)]


def write_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["one", "two ö", "three"] * 50}), path, row_group_size=40)


def write_kinds(folder: Path) -> dict[str, tuple[str, str]]:
    """Write files of each kind; return name → (kind, pattern)."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(LINES[:200]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(LINES[200:]).encode()))
    (folder / "x.txt").write_text("the first text")
    (folder / "y.txt").write_text("the second text")
    for name in ("t", "u"):
        write_parquet(folder / f"{name}.parquet")
    with tarfile.open(folder / "s.tar", "w") as archive:
        archive.add(folder / "x.txt", "0.text")
    np.save(folder / "m.npy", np.array([5, 6, 0, 7, 8, 9, 0], dtype=np.uint16))
    ids = np.array([5, 6, 7, 8, 9], dtype=np.uint16)
    (folder / "n.bin").write_bytes(ids.tobytes())
    head = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([8]) + np.array([2, 3], "<u8").tobytes()
    arrays = (np.array([2, 3], "<i4"), np.array([0, 4], "<i8"), np.array([0, 1, 2], "<i8"))
    (folder / "n.idx").write_bytes(head + b"".join(map(np.ndarray.tobytes, arrays)))
    store = read("text", str(folder / "*.txt"), base=folder)
    build(store, folder / "stores")
    (folder / "stores/files.json").unlink(missing_ok=True)  # written for files that are older than a tick of the clock
    return {
        "lines, one file packed": ("jsonl", "*.jsonl*"),
        "texts": ("text", "*.txt"),
        "tables": ("parquet", "*.parquet"),
        "archives": ("webdataset", "*.tar"),
        "an array of tokens": ("tokens", "m.npy"),
        "tokens and their index": ("tokens", "n.bin"),
        "both matched": ("tokens", "n.*"),
        "token stores": ("tokens", "stores/*"),
    }


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_objects_have_the_tokens_of_files(tmp_path: Path, memory: Any):
    kinds = write_kinds(tmp_path / "in")
    memory.put(str(tmp_path / "in"), "/corpus", recursive=True)
    for name, (kind, pattern) in kinds.items():
        here = tokens(read(kind, pattern, base=tmp_path / "in"), tmp_path / "here")
        there = read(kind, f"memory://corpus/{pattern}", base=tmp_path)
        assert tokens(there, tmp_path / "there") == here and here, name
        del there
        assert not [*(tmp_path / "objects").iterdir()], name


@pytest.mark.parametrize(("kind", "end", "line"), [("jsonl", "jsonl", ":1"), ("text", "txt", "")])
def test_other_processes_name_the_objects(tmp_path: Path, memory: Any, kind: str, end: str, line: str):
    for number, text in enumerate(("good", "\\x", "good too")):
        content = f'{{"text": "{text}"}}\n'.encode() if kind == "jsonl" else text.encode() if number != 1 else b"\xff"
        memory.pipe(f"/c/{number}.{end}", content)
    source = read(kind, f"memory://c/*.{end}", base=tmp_path)
    units = [*source.units()]
    other = pickle.loads(pickle.dumps(source))
    origins = [record.origin for unit in units for record in other.read(pickle.loads(pickle.dumps(unit)))]
    assert origins == [f"memory:///c/{number}.{end}{line}" for number in range(3)]


def test_files_and_objects_of_one_source(tmp_path: Path, memory: Any):
    (tmp_path / "own.jsonl").write_text(LINES[0])
    memory.pipe("/c/far.jsonl", LINES[1].encode())
    source = read("jsonl", "memory://c/*.jsonl", "own.jsonl", base=tmp_path)
    assert source.num_files == 2 and source.num_bytes() == len(LINES[0]) + len(LINES[1].encode())
    assert len(tokens(source, tmp_path)) == 2


def test_copies_go_as_they_are_read(tmp_path: Path, memory: Any):
    for number in range(12):
        memory.pipe(f"/c/{number:02}.jsonl", LINES[number].encode())
    copies = [len([*tmp_path.glob("objects/*/*/*")]) for _ in read("jsonl", "memory://c/*", base=tmp_path).units()]
    assert len(copies) == 12 and max(copies) <= remote.AHEAD + 1


class Server(http.server.ThreadingHTTPServer):
    """A web server of one file. faults: what its next answers to GET do instead of answering whole."""

    content = "".join(LINES).encode()
    faults: list[str]
    ranges = True
    says = True
    """Tells length and ETag."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/all.jsonl"


class Answers(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        if self.path != "/all.jsonl":
            self.send_error(404)
            return
        self._head(200, len(self.server.content))

    def do_GET(self) -> None:
        if self.path != "/all.jsonl":
            self.send_error(404)
            return
        first, last = 0, len(self.server.content) - 1
        if self.server.ranges and (asked := self.headers.get("Range")):
            begin, end = asked.removeprefix("bytes=").split("-")
            first, last = int(begin), min(int(end or last), last)
        body = self.server.content[first : last + 1]
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "refuse":
            self.send_error(503)
            return
        if self.server.ranges:
            self._head(206, len(body), f"bytes {first}-{last}/{len(self.server.content)}")
        else:
            self._head(200, len(body))
        self.wfile.write(body[: len(body) // 3] if fault == "cut" else body)
        if fault == "cut":
            time.sleep(0.3)  # the client reads what it gets
        self.close_connection = bool(fault) or not self.server.says

    def _head(self, status: int, length: int, part: str = "") -> None:
        self.send_response(status)
        if self.server.says:
            self.send_header("Content-Length", str(length))
            self.send_header("ETag", hashlib.sha256(self.server.content).hexdigest())
        else:
            self.send_header("Connection", "close")
        if part:
            self.send_header("Content-Range", part)
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answers) as server:
        server.faults = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("faults", "settings"),
    [
        ([], {}),
        (["cut", "cut", "refuse", "", "cut", "cut", "", "cut", "cut"], {}),
        (["cut"], {"ranges": False}),
        ([], {"ranges": False, "says": False}),
    ],
    ids=["no faults", "cuts and refusals", "no ranges", "no length"],
)
def test_a_bad_connection_changes_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, faults: list[str], settings: dict[str, bool]
):
    monkeypatch.setattr(remote, "BLOCK", 1 << 12)
    (tmp_path / "all.jsonl").write_bytes(server.content)
    expected = tokens(read("jsonl", "all.jsonl", base=tmp_path), tmp_path / "here")
    server.faults = faults
    for name, value in settings.items():
        setattr(server, name, value)
    assert tokens(read("jsonl", server.url, base=tmp_path), tmp_path / "there") == expected
    assert not server.faults


def test_what_is_wrong_with_an_object(tmp_path: Path, server: Server, memory: Any):
    def refused(url: str) -> str:
        with pytest.raises(DataError) as caught:
            tokens(read("jsonl", url, base=tmp_path), tmp_path)
        return str(caught.value)

    assert "nothing.jsonl: there is no such object" in refused(server.url.replace("all", "nothing"))
    assert "no object matches memory://c/*.jsonl" in refused("memory://c/*.jsonl")
    memory.pipe("/c/inner/a.jsonl", b"{}")
    assert "only folders match memory://c/inn*" in refused("memory://c/inn*")
    server.faults = ["refuse"] * 100
    assert f"{server.url}: cannot be read: 503" in refused(server.url)
    server.faults, server.content = [], b"{\n"
    assert f"{server.url}:1: invalid JSON" in refused(server.url)


def test_an_object_that_changes_while_it_is_read(tmp_path: Path, server: Server):
    source = read("jsonl", server.url, base=tmp_path)

    def replace(now: object) -> None:
        server.content = "".join(LINES[1:]).encode()

    with pytest.raises(DataError, match=r"have changed while they were read|when it was listed"):
        build(source, tmp_path, replace)
    again = read("jsonl", server.url, base=tmp_path)
    assert len(tokens(again, tmp_path)) == len(LINES) - 1


def test_objects_that_are_listed_again_are_named(tmp_path: Path, memory: Any):
    memory.pipe("/c/a.jsonl", b"{}\n")
    source = read("jsonl", "memory://c/*.jsonl", base=tmp_path)
    assert [record.origin for unit in source.units() for record in source.read(unit)] == ["memory:///c/a.jsonl:1"]
    memory.pipe("/c/b.jsonl", b"{}\n")
    assert source.remote is not None and len(source.remote.digests()) == 2
    origins = [record.origin for unit in source.units() for record in source.read(unit)]
    assert origins == ["memory:///c/a.jsonl:1", "memory:///c/b.jsonl:1"]


def test_versions_name_the_store_without_reading(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    store = build(read("jsonl", server.url, base=tmp_path), tmp_path)
    monkeypatch.setattr(remote, "_download", None)  # would fail
    again = build(read("jsonl", server.url, base=tmp_path), tmp_path)
    assert again.key == store.key
    monkeypatch.undo()
    server.content = server.content.replace(b"document 7 ", b"document 8 ")  # as long as before
    other = build(read("jsonl", server.url, base=tmp_path), tmp_path)
    assert other.key != store.key
    server.says = False
    silent = build(read("jsonl", server.url, base=tmp_path), tmp_path)
    server.content = server.content.replace(b"document 9 ", b"document 8 ")
    assert build(read("jsonl", server.url, base=tmp_path), tmp_path).key != silent.key


class Interrupted(Exception):
    pass


def test_an_interrupted_build_goes_on(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch):
    from xtrain.runtime.feed.tokenizing import tokenize

    monkeypatch.setattr(tokenize, "COMMIT_SECONDS", 0.0)
    for number in range(6):
        memory.pipe(f"/c/{number}.jsonl", "".join(LINES[50 * number : 50 * number + 50]).encode())
    pattern = "memory://c/*.jsonl"
    whole = build(read("jsonl", pattern, base=tmp_path), tmp_path / "whole")

    def stop(now: Any) -> None:
        if now.documents >= 150:
            raise Interrupted

    with pytest.raises(Interrupted):
        build(read("jsonl", pattern, base=tmp_path), tmp_path / "cut", stop)
    seen: list[Any] = []
    store = build(read("jsonl", pattern, base=tmp_path), tmp_path / "cut", seen.append)
    assert store.key == whole.key and any(now.resumed for now in seen)
    assert contents(tmp_path / "cut" / store.key) == contents(tmp_path / "whole" / whole.key)


@pytest.mark.slow
def test_an_s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    service = moto.ThreadedMotoServer(port=0)
    service.start()
    try:
        host, port = service.get_host_and_port()
        secrets = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**secrets, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            monkeypatch.setitem(os.environ, name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpus")
        kinds = write_kinds(tmp_path / "in")
        for path in (tmp_path / "in").rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "corpus", path.relative_to(tmp_path / "in").as_posix())
        for name, (kind, pattern) in kinds.items():
            here = tokens(read(kind, pattern, base=tmp_path / "in"), tmp_path / "here")
            there = read(kind, f"s3://corpus/{pattern}", base=tmp_path)
            assert tokens(there, tmp_path / "there") == here, name
    finally:
        service.stop()


def test_a_build_that_ends_stops_copying(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch):
    """The copies of later objects do not hold up an error of the first one."""
    memory.pipe("/c/0.jsonl", b"[")
    for number in range(1, 4):
        memory.pipe(f"/c/{number}.jsonl", LINES[number].encode() * 5000)
    monkeypatch.setattr(remote, "BLOCK", 1 << 6)
    continued = remote._continue

    def slowly(file: Any, out: Any, stopped: threading.Event) -> None:
        if not file.url.endswith("0.jsonl"):
            stopped.wait(60)
        continued(file, out, stopped)

    monkeypatch.setattr(remote, "_continue", slowly)
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"memory:///c/0\.jsonl"):
        tokens(read("jsonl", "memory://c/*.jsonl", base=tmp_path), tmp_path)
    assert time.monotonic() - begun < 30
