"""Weights that a client sends for sampling: the same samples as of an export, and archives that are refused."""

import hashlib
import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_client import Client, Sampling, Served, row, unnamed_of

from xtrain.server.access import ServerLimits


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server", limits=ServerLimits(poll=0.5)) as one:
        yield one


def exported(client: Client, folder: Path) -> Path:
    client.served.engine.export(client.id, folder)
    return folder


def archive(files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(data) * (kind == tarfile.REGTYPE), "state.npz"
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def put(served: Served, session: str, number: int, body: bytes, **more: Any) -> Any:
    digest = more.pop("sha256", hashlib.sha256(body).hexdigest())
    return served.call("PUT", f"sessions/{session}/samplers/{number}?sha256={digest}", content=body, **more)


def folder_archive(folder: Path) -> bytes:
    return archive({file.name: file.read_bytes() for file in folder.iterdir()})


def test_weights_that_a_client_sends_are_sampled_from(served: Served, tmp_path: Path) -> None:
    client = served.model()
    client.train([row(1, weights=np.ones(9, "<f4"))], 3)
    body = folder_archive(exported(client, tmp_path / "one"))
    found = put(served, client.session, 7, body)
    assert found.status_code == 200 and put(served, client.session, 7, body).json() == found.json()
    sent = Sampling(served, found.json()["sampling_session_id"])
    own = unnamed_of(client, 0).draw([5], seed=1)
    assert sent.draw([5], seed=1)["samples"][0]["tokens"] == own["samples"][0]["tokens"]
    client.train([row(2)], 3)
    other = put(served, client.session, 7, folder_archive(exported(client, tmp_path / "two")))
    assert other.status_code == 400 and "has other weights: use another number" in other.text
    assert served.call("DELETE", f"samplers/{sent.id}").status_code == 204
    sent.seq = 10
    assert served.call("GET", f"samplers/{sent.id}").status_code == 404
    until = time.monotonic() + 20
    while len([*(tmp_path / "server" / "weights").iterdir()]) > 1:  # that of the export
        served.later(1)
        time.sleep(0.02)
        assert time.monotonic() < until


def test_weights_are_there_after_a_restart(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        client = served.model()
        client.train([row(1)], 2)
        found = put(served, client.session, 0, folder_archive(exported(client, tmp_path / "one")))
        drawn = Sampling(served, found.json()["sampling_session_id"]).draw([5], seed=1)["samples"][0]["tokens"]
    with Served(tmp_path / "server") as again:
        sampling = Sampling(again, found.json()["sampling_session_id"])
        sampling.seq = 5
        assert sampling.draw([5], seed=1)["samples"][0]["tokens"] == drawn


GOOD = archive({"state.npz": b"x"})


@pytest.mark.parametrize(("body", "more", "status", "words"), [
    (GOOD, {"sha256": "0" * 64}, 422, "these are other weights"),
    (GOOD, {"sha256": "zz"}, 422, "needs `sha256`"),
    (b"no archive", {}, 422, "no archive of files"),
    (GOOD[:700], {}, 422, "no archive of files"),
    (archive({"../state.npz": b"x"}), {}, 422, "'../state.npz': names of files"),
    (archive({"a/b": b"x"}), {}, 422, "'a/b': names of files"),
    (archive({"/etc/x": b"x"}), {}, 422, "names of files"),
    (archive({"link": b""}, tarfile.SYMTYPE), {}, 422, "'link': names of files"),
    (archive({"link": b""}, tarfile.LNKTYPE), {}, 422, "'link': names of files"),
    (archive({"folder": b""}, tarfile.DIRTYPE), {}, 422, "'folder': names of files"),
    (archive({f"f{number}": b"" for number in range(1025)}), {}, 422, "more than 1024 files"),
], ids=range(11))  # fmt: skip
def test_archives_that_are_refused_leave_nothing(
    served: Served, tmp_path: Path, body: bytes, more: dict[str, Any], status: int, words: str
) -> None:
    found = put(served, served.session(), 0, body, **more)
    assert found.status_code == status and words in found.text
    assert not [*(tmp_path / "server" / "weights").iterdir()] and not (tmp_path / "etc").exists()


def test_others_sessions_and_disks_without_room_take_no_weights(served: Served) -> None:
    assert put(served, "s-unknown", 0, GOOD).status_code == 404
    session = served.session()
    served.server.limits = ServerLimits(free=2**60)
    found = put(served, session, 0, GOOD)
    assert found.status_code == 413 and "no room" in found.text


def test_a_seed_may_be_a_text_for_each_sample(served: Served) -> None:
    client = served.model()
    assert "has 1 texts for 2 samples" in unnamed_of(client, 0).error([3], {"num_samples": 2}, seed=["1 0 0"])
