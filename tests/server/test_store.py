"""The store of a server: rows that last, damage of any file, repair, journals of before."""

import gc
import hashlib
import random
import shutil
import sqlite3
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy_engine import NumpyEngine
from server_client import Client, Served, row

from xtrain.server import database
from xtrain.server.access import Keys, ServerLimits
from xtrain.server.database import Database, Rows, StoreFailed, create, examine
from xtrain.server.loading import ChangedEntry, OldDone
from xtrain.server.serving import Address, CannotServe, serve
from xtrain.server.state import (
    Accepted,
    Done,
    FolderEntry,
    ModelEntry,
    QueuedWork,
    Removed,
    SavedEntry,
    Session,
    encoded,
    key_of,
)
from xtrain.server.store import ASIDE, Store, StoreDamaged, StoreInUse, repair


def accepted(model: str, seq: int, body: bytes = b"body") -> Accepted:
    return Accepted(f"{model}/{seq}", "optim_step", model, seq, b"", "me", 0.0, 0, body)


def stored(folder: Path, works: int) -> tuple[Store, list[QueuedWork]]:
    """A store with a model that was changed by so many requests, all but the last of which are done."""
    store = Store(folder)
    store.change(Session("s", "me", 0.0), ModelEntry("m", "s", "me", "base", None, 0.0))
    found = [store.accept(accepted("m", seq, bytes([seq]) * seq), None) for seq in range(1, works + 1)]
    for work in found[:-1]:
        store.finish(work, Done(work.id, 0.0, False, "", b"result", repeated=True))
    return store, found


class Held:
    """Commits wait until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, commit = threading.Event(), Database._commit

        def held(store: Database, batch: Iterable[Rows]) -> None:
            self.free.wait(20)
            commit(store, batch)

        monkeypatch.setattr(Database, "_commit", held)


# what lasts


def test_a_request_is_read_once_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: the engine was lost right after a request was done whose row is still to be written."""
    store, _ = stored(tmp_path, 2)
    store.settle()
    held = Held(monkeypatch)
    late = store.accept(accepted("m", 3, b"late"), None)
    store.finish(late, Done(late.id, 0.0, False, "", b"", repeated=True))
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(store.done("m", 3).body))
    reading.start()
    reading.join(0.2)
    assert reading.is_alive()
    held.free.set()
    reading.join(10)
    assert found == [b"late"]
    store.close()


def test_what_is_not_needed_has_no_row(tmp_path: Path) -> None:
    store, works = stored(tmp_path, 5)
    store.drop(works[:2])
    store.change(ModelEntry("m", "s", "me", "base", None, 0.0, next=5, snapshot_seq=2))
    store.finish(works[4], Done(works[4].id, 0.0, False, "", b"fifth"))
    store.close()
    kept = dict(examine(tmp_path, []))
    assert sorted(kept) == sorted(
        ["Session/s", "ModelEntry/m", *(f"{kind}/m/{seq}" for kind in ("Accepted", "Done") for seq in (3, 4, 5))]
    )
    bodies = {seq: msgspec.msgpack.decode(kept[f"Accepted/m/{seq}"])["body"] for seq in (3, 4, 5)}
    assert bodies == {3: b"\3" * 3, 4: b"\4" * 4, 5: b""}
    again = Store(tmp_path)
    assert again.state.models["m"].next == 6 and set(again.state.history["m"]) == {3, 4}
    assert [again.done("m", seq).body for seq in (3, 4)] == [b"\3" * 3, b"\4" * 4]
    results = {work.id: again.result(work) for work in again.state.works.values()}
    bodies = {id: done.body for id, done in results.items() if done is not None}
    assert bodies == {"m/3": b"result", "m/4": b"result", "m/5": b"fifth"}
    assert again.state.results == len(b"result" * 2 + b"fifth") and not again.state.waiting
    again.state.change(Removed("ModelEntry", "m"))
    assert not again.state.models and not again.state.history
    again.close()


def test_what_waits_has_its_body_after_a_restart(tmp_path: Path) -> None:
    store, _ = stored(tmp_path, 3)
    store.close()
    again = Store(tmp_path)
    assert [work.entry.body for work in again.state.waiting.values()] == [b"\3" * 3]
    again.close()


def test_what_is_done_takes_no_memory_for_its_result(tmp_path: Path) -> None:
    """However large it is: it is read from the file, as often as somebody asks."""
    large = b"x" * 2**20
    store, works = stored(tmp_path, 2)
    tracemalloc.start()
    try:
        store.finish(works[1], Done(works[1].id, 0.0, False, "", large, repeated=True))
        works[1].promise.result(20)
        store.settle()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 2**18
        for _ in range(2):
            found = store.result(works[1])
            assert found is not None and found.body == large
    finally:
        tracemalloc.stop()
    assert works[1].lasting is works[1].promise is works[0].promise  # no lock for each
    store.close()


def test_a_disk_that_refuses_ends_the_server(tmp_path: Path) -> None:
    """Nothing is promised any more, and health says so."""
    served = Served(tmp_path)
    client = served.model()
    pages = served.server.store._database._reader.execute("PRAGMA page_count").fetchone()[0]
    served.server.store._database._writer.execute(f"PRAGMA max_page_count = {pages + 5}")
    with pytest.raises(AssertionError, match="503"):
        for _ in range(50):
            client.pass_([row(1, 200)])
    assert served.call("GET", "healthz").status_code == 503
    assert served.ended[0] is not None and "store.db cannot be written: database or disk is full" in served.ended[0]
    served.close()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with Served(tmp_path):
        with pytest.raises(StoreInUse):
            Served(tmp_path)
        with pytest.raises(StoreInUse):
            repair(tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in its place")
    with pytest.raises(CannotServe, match="weights cannot be read and written"):
        serve(NumpyEngine(), tmp_path, Address(), Keys({"me": "tml-a"}))


# weights


def saved(store: Store, name: str, folder: str) -> SavedEntry:
    store.weights(folder).mkdir()
    (store.weights(folder) / "state").write_text(folder)
    store.seal(folder)
    return SavedEntry(f"tinker://m/weights/{name}", folder, "m", "me", "weights", 0.0, "base", None, 0)


def test_weights_are_removed_once_nothing_that_lasts_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure before that would leave a checkpoint without its weights."""
    store, forgotten = Store(tmp_path), list[Path]()
    store.change(saved(store, "n", "a"))
    store.remove_unused(forgotten.append)
    assert store.weights("a").exists()
    held = Held(monkeypatch)
    store.change(Removed("SavedEntry", "tinker://m/weights/n"))
    looking = threading.Thread(target=lambda: store.remove_unused(forgotten.append))
    looking.start()
    looking.join(0.2)
    assert looking.is_alive() and not forgotten and store.weights("a").exists()
    held.free.set()
    looking.join(10)
    assert forgotten == [store.weights("a")] and not store.weights("a").exists()
    store.close()
    assert not list(examine(tmp_path, []))


def test_weights_that_nothing_has_referred_to_are_set_aside_for_a_week(tmp_path: Path) -> None:
    clock = [1e9]
    store = Store(tmp_path, lambda: clock[0])
    store.change(saved(store, "n", "used"))
    saved(store, "n", "sealed")
    store.weights("unknown").mkdir()
    store.remove_unused(lambda path: None)
    assert len(list((tmp_path / "weights").iterdir())) == 3
    store.close()
    store = Store(tmp_path, lambda: clock[0])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["used"]
    assert {path.name for path in tmp_path.glob("aside/*/weights/*")} == {"sealed", "unknown"}
    for seconds, count in ((ASIDE, 2), (2, 0)):
        clock[0] += seconds
        store.remove_unused(lambda path: None)
        assert len(list(tmp_path.glob("aside/*/weights/*"))) == count
    store.close()
    assert [key for key, _ in examine(tmp_path, [])] == ["FolderEntry/used", "SavedEntry/tinker://m/weights/n"]


# damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A server that was stopped, and one that was killed."""
    stopped, killed = (tmp_path_factory.mktemp("whole") / name for name in ("stopped", "killed"))
    served = Served(stopped, limits=ServerLimits(poll=5.0, snapshot_steps=6))
    clients = [served.model(seed=seed) for seed in range(3)]
    for number, client in enumerate(clients):
        client.train([row(number)], 3 + number)
        assert "path" in client.result(client.send("save_weights", path="one"))
        assert "path" in client.result(client.send("save_weights_for_sampler", path="two"))
        client.result(client.pass_([row(7)]))
    served.server.store.settle()
    shutil.copytree(stopped, killed)
    served.close()
    return {"stopped": stopped, "killed": killed}


def files_of(folder: Path) -> dict[str, str]:
    """The contents of all files that stay as they are when a store is looked at."""
    shared = {f"{database.FILE}-shm", "lock"}
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in shared]
    return {str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() for path in paths}


def damaged(folder: Path, rng: random.Random) -> str:
    """Flip a bit of a file, cut it, or remove it."""
    names = [name for name in sorted(files_of(folder)) if name != "status.json" and (folder / name).stat().st_size]
    own = [name for name in names if name.startswith((database.FILE, database.MARK))]
    path = folder / rng.choice(own if rng.random() < 0.7 else names)
    how, content = rng.choice(("flip", "flip", "cut", "lost", "zeros")), bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if how == "lost":
        path.unlink()
        return f"{path.name} is lost"
    if how == "cut":
        del content[at:]
    elif how == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{path.name}: {how} at {at}"


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 240))])
def test_damage_is_said_and_nothing_is_deleted(whole: dict[str, Path], tmp_path: Path, seed: int) -> None:
    """A store either is as before, or is refused with its files as they were; repaired, it has all that is whole."""
    rng, folder = random.Random(seed), tmp_path / "store"
    shutil.copytree(whole["killed" if seed % 2 else "stopped"], folder)
    rows, weights = dict(examine(folder, [])), {path.name for path in (folder / "weights").iterdir()}
    what = damaged(folder, rng)
    before = files_of(folder)
    try:
        store = Store(folder)
    except StoreDamaged as error:
        assert files_of(folder) == before, what
        for place in error.damage:
            assert any(name in place for name in ("store.db", "weights/", "confirmed", "row", "request")), place
        assert set(error.damage) <= set(repair(folder)), what
        (kept,) = (folder / "damaged").iterdir()
        for name in (database.FILE, database.WAL, database.MARK):  # as they were
            assert (kept / name).exists() == (name in before)
            assert not (kept / name).exists() or files_of(kept)[name] == before[name]
        Store(folder).close()
    else:
        store.close()
        assert dict(examine(folder, [])) == rows, f"{what} was not noticed"
    there = {path.name for path in (*folder.glob("weights/*"), *folder.glob("damaged/*/weights/*"))}
    assert there == weights, what
    served = Served(folder)
    for model in list(served.server.store.state.models.values()):
        for work in [work for work in served.server.store.state.works.values() if work.entry.queue == model.id]:
            served.result(work.id)  # where its result was lost it is done again
        client = Client(served, model.id, seq=served.server.store.state.models[model.id].next - 1)
        found = client.result(client.pass_([row(1)], forward=True))
        assert isinstance(found, bytes) or (model.damaged and "was lost" in found["error"]), found
    served.close()
    assert repair(folder) == []


def test_damage_of_one_row_costs_that_row(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(whole["stopped"], folder)
    rows = dict(examine(folder, []))
    (first, *others) = [key for key in rows if key.startswith("SavedEntry/") and "/weights/" in key]
    raw = (folder / database.FILE).read_bytes()
    at = raw.index(rows[first]) + 40
    (folder / database.FILE).write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(
        CannotServe, match=r"store.db, row \d+ \(`SavedEntry/tinker.*`\): its checksum is wrong"
    ) as refused:
        serve(NumpyEngine(), folder, Address(), Keys({"me": "tml-a"}))
    assert "--repair" in str(refused.value) and "nothing was changed" in str(refused.value)
    assert len(repair(folder)) == 1
    assert dict(examine(folder, [])).keys() == rows.keys() - {first, f"FolderEntry/{folder_in(rows[first])}"}
    assert [path.name for path in folder.glob("damaged/*/weights/*")] == [folder_in(rows[first])]
    with Served(folder) as served:
        for number, key in enumerate(others):
            path = key.removeprefix("SavedEntry/")
            session = served.session()
            body = {"path": path, "optimizer": True, "session_id": session, "model_seq_id": number}
            assert "error" not in served.result(served.post("load_weights", **body))


def folder_in(content: bytes) -> str:
    return msgspec.msgpack.decode(content)["folder"]


def test_a_head_that_is_damaged_costs_nothing(whole: dict[str, Path], tmp_path: Path) -> None:
    for number, seed in enumerate(range(12)):
        folder = tmp_path / f"{number}"
        shutil.copytree(whole["stopped"], folder)
        rows, content = dict(examine(folder, [])), bytearray((folder / database.FILE).read_bytes())
        content[random.Random(seed).randrange(24)] ^= 255
        (folder / database.FILE).write_bytes(content)
        repair(folder)
        assert dict(examine(folder, [])) == rows


def test_a_row_that_has_changed_on_the_disk_ends_the_server(tmp_path: Path) -> None:
    failed: list[str] = []
    store = Store(tmp_path, failed=failed.append)
    work = store.accept(accepted("m", 1), None)
    store.finish(work, Done(work.id, 0.0, False, "", b"result"))
    store.settle()
    store._database._writer.execute("UPDATE rows SET content = x'00' WHERE key = 'Done/m/1'")
    with pytest.raises(StoreFailed):
        store.result(work)
    assert failed and "row Done/m/1 cannot be read: its checksum is wrong" in failed[0]
    store.close()


@pytest.mark.parametrize("thing", [
    SavedEntry("tinker://m/weights/n", "../..", "m", "me", "weights", 0.0, "base", None, 0),
    SavedEntry("tinker://m/weights/../n", "a", "m", "me", "weights", 0.0, "base", None, 0),
    SavedEntry("/etc/passwd", "a", "m", "me", "weights", 0.0, "base", None, 0),
    ModelEntry("m", "s", "me", "base", None, 0.0, snapshot="/etc"),
    ModelEntry("m\n", "s", "me", "base", None, 0.0),
    Session("../s", "me", 0.0, metadata={"a": 1}),  # pyright: ignore[reportArgumentType]
    FolderEntry("a/b", {}),
], ids=lambda thing: type(thing).__name__)  # fmt: skip
def test_names_that_cannot_be_are_damage(tmp_path: Path, thing: SavedEntry) -> None:
    """Whoever can write a row can write its checksum."""
    (tmp_path / "weights").mkdir()
    create(tmp_path, {key_of(thing): encoded(thing)})
    with pytest.raises(StoreDamaged, match="row `"):
        Store(tmp_path)


def test_files_outside_a_folder_are_none_of_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.change(saved(store, "n", "a"), FolderEntry("a", {"../../store.db": (1, 1)}))
    store.close()
    with pytest.raises(StoreDamaged, match=r"weights/a: `../../store.db` is not a file name"):
        Store(tmp_path)


def test_a_file_of_another_version_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    create(tmp_path, {})
    connection = sqlite3.connect(tmp_path / database.FILE)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(StoreDamaged, match=r"store.db has version 2 in its head, not 1"):
        Store(tmp_path)


# journals of before there was a database


def framed(*entries: object) -> bytes:
    contents = [msgspec.msgpack.encode(entry) for entry in entries]
    return b"".join(struct.pack("<II", len(one), zlib.crc32(one)) + one for one in contents)


def journal_in(folder: Path, *, owner: str = "first") -> bytes:
    """A journal with a session, a model, what it was trained by, a checkpoint, a result that is not kept."""
    with Served(folder / "new", keys=Keys({owner: "tml-test"})) as served:
        client = served.model()
        client.train([row(1)], 2)
        client.result(client.send("save_weights", path="one"))
        client.result(client.pass_([row(2)]))
        store = served.server.store
        tables = (store.state.sessions, store.state.models, store.state.checkpoints)
        entries: list[object] = [ChangedEntry([one for table in tables for one in table.values()])]
        for work in store.state.works.values():
            done = store.result(work)
            assert done is not None
            body = store.done(client.id, work.entry.seq).body if store.state.repeats(work.entry) else b""
            entries.append(msgspec.structs.replace(work.entry, body=body))
            entries.append(OldDone(*msgspec.structs.astuple(done), kept=work.entry.seq != 2))
        shutil.copytree(folder / "new" / "weights", folder / "weights")
    (folder / "journal").mkdir()
    content = framed(*entries)
    (folder / "journal" / "journal-000007.bin").write_bytes(content)
    shutil.rmtree(folder / "new")
    return content


def test_a_journal_of_before_is_read_once(tmp_path: Path) -> None:
    journal_in(tmp_path)
    (tmp_path / "journal" / "journal-abc.bin").write_bytes(b"stray")
    with Served(tmp_path, keys=Keys({"owner": "tml-test"})) as served:  # of a server that had no key
        (model,) = served.server.store.state.models.values()
        client = Client(served, model.id, seq=model.next - 1)
        assert client.result(client.step())["metrics"]["step"] == 3
        path = f"tinker://{model.id}/weights/one"
        body = {"path": path, "optimizer": True, "session_id": model.session, "model_seq_id": 1}
        assert "error" not in served.result(served.post("load_weights", **body))
        logprobs = client.logprobs([row(3)])
    assert {path.name for path in (tmp_path / "journal.converted").iterdir()} == {
        "journal-000007.bin",
        "journal-abc.bin",
    }
    with Served(tmp_path, keys=Keys({"owner": "tml-test"})) as served:
        np.testing.assert_array_equal(Client(served, model.id, seq=client.seq).logprobs([row(3)]), logprobs)


def test_a_journal_of_before_that_is_damaged_is_refused_and_repaired(tmp_path: Path) -> None:
    content = journal_in(tmp_path)
    path = tmp_path / "journal" / "journal-000007.bin"
    second = 8 + struct.unpack("<I", content[:4])[0]
    for change, said in (
        (content[:-3], f"byte {content.rindex(struct.pack('<I', len(content) - frame_before(content)))}"),
        (content[: second + 9] + bytes([content[second + 9] ^ 1]) + content[second + 10 :], f"byte {second}:"),
        (content + bytes(16), f"byte {len(content)}:"),
        (content + framed({"type": "Later"}), f"byte {len(content)}: "),
    ):
        path.write_bytes(change)
        before = files_of(tmp_path)
        with pytest.raises(StoreDamaged, match=f"journal-000007.bin, {said.split(':')[0]}"):
            Store(tmp_path)
        assert files_of(tmp_path) == before
    (tmp_path / "journal" / "journal-000008.bin").touch()
    with pytest.raises(StoreDamaged, match=r"journal-000008.bin is empty, and has another before it"):
        Store(tmp_path)
    assert len(repair(tmp_path)) == 2
    with Served(tmp_path, keys=Keys({"owner": "tml-test"})) as served:
        (model,) = served.server.store.state.models.values()
        client = Client(served, model.id, seq=model.next - 1)
        assert client.result(client.step())["metrics"]["step"] == 3
    assert len(list(tmp_path.glob("damaged/*/journal/*"))) == 2


def frame_before(content: bytes) -> int:
    """Where the content of the last frame begins."""
    at = 0
    while True:
        begin, at = at + 8, at + 8 + struct.unpack("<I", content[at : at + 4])[0]
        if at == len(content):
            return begin
