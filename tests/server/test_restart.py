"""What a server promises survives it: power failures at any moment, lost engines, journals of all lengths."""

import gc
import os
import random
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy_engine import NumpyEngine
from server_client import MODEL, Client, Served, row, samples

from xtrain.server import journal
from xtrain.server.engine import Adam, AdapterSettings, Capabilities, EngineLost, Pass, PassResult, UserError
from xtrain.server.entries import Accepted, Done, ModelEntry, Removed, SavedEntry
from xtrain.server.journal import RequestJournal
from xtrain.server.keys import Keys
from xtrain.server.limits import ServerLimits
from xtrain.server.serving import Address, CannotServe, serve
from xtrain.server.state import QueuedWork
from xtrain.server.store import Store, StoreInUse

LIMITS = ServerLimits(poll=5.0, snapshot_steps=5)


class Slow(NumpyEngine):
    """A pass takes a while, so that a power failure meets it in the middle."""

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        time.sleep(0.002)
        return super().forward_backward(passes)


class Disk:
    """Knows how much of each journal lasts, and copies a folder as a power failure leaves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, int] = {}  # by inode
        fsync = os.fsync

        def watched(fd: int) -> None:
            size = os.fstat(fd).st_size
            fsync(fd)
            self._synced[os.fstat(fd).st_ino] = size

        monkeypatch.setattr(journal.os, "fsync", watched)

    def after_power_failure(self, store: Store, to: Path, rng: random.Random) -> Path:
        """Of what was written and not made lasting a random part is there, and the end of that is not what was
        written. Weights that are removed meanwhile may be missing."""
        with store.changed:  # nothing new is referred to
            return self._copied(store.folder, to, rng)

    def _copied(self, folder: Path, to: Path, rng: random.Random) -> Path:
        for name in ("journal", "weights"):
            (to / name).mkdir(parents=True)
        for path in (folder / "weights").iterdir():
            with suppress(shutil.Error, FileNotFoundError):
                shutil.copytree(path, to / "weights" / path.name)
        for path in (folder / "journal").glob("journal-*"):
            content = path.read_bytes()
            lasting = self._synced.get(path.stat().st_ino, 0)
            kept = bytearray(content[: lasting + rng.randint(0, max(0, len(content) - lasting))])
            if len(kept) > lasting and rng.random() < 0.5:
                kept[-1] ^= 255
            (to / "journal" / path.name).write_bytes(kept)
        return to


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def rows_of(step: int, model: int) -> list[bytes]:
    return [row(100 * model + step, 5 + step % 3)]


def undisturbed(folder: Path, steps: int) -> list[np.ndarray]:
    with Served(folder) as served:
        clients = [served.model(seed=seed) for seed in range(2)]
        for step in range(steps):
            for number, client in enumerate(clients):
                client.pass_(rows_of(step, number))
                client.train(rows_of(step + 50, number))
        return [client.logprobs([row(7)]) for client in clients]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_power_failures_at_random_moments_change_nothing(tmp_path: Path, disk: Disk, seed: int) -> None:
    """Every second step the power fails: no step is lost, none is done twice, and the curve is the undisturbed one."""
    rng, steps, failures = random.Random(seed), 16, 0
    expected = undisturbed(tmp_path / "undisturbed", steps)
    served = Served(tmp_path / "0", Slow(), LIMITS)
    clients = [served.model(seed=number) for number in range(2)]

    def power_failure() -> None:
        nonlocal served, failures
        time.sleep(rng.random() * 0.01)
        failures += 1
        folder = disk.after_power_failure(served.server.store, tmp_path / f"{failures}", rng)
        served.close()
        served = Served(folder, Slow(), LIMITS)
        for client in clients:
            client.served = served

    for step in range(steps):
        asked: list[tuple[Client, Callable[[], Any], Any]] = []
        for number, client in enumerate(clients):
            for ask in requests_of(client, step, number):
                asked.append((client, ask, ask()))
                if rng.random() < 0.1:
                    power_failure()
        if rng.random() < 0.2:
            served.server.store.rewrite()
        if rng.random() < 0.5:
            served.later(0)  # weights that nothing refers to are removed
        for client, ask, promise in asked:
            if rng.random() < 0.1:
                power_failure()
            assert ask() == promise  # a client that had no answer sends it again
            found = client.result(promise)
            if not isinstance(found, bytes):
                assert found["metrics"]["step"] == step + 1
    assert failures > 3
    for client, numbers in zip(clients, expected, strict=True):
        np.testing.assert_array_equal(client.logprobs([row(7)]), numbers)
    served.close()


def requests_of(client: Client, step: int, number: int) -> list[Callable[[], Any]]:
    """Two passes and a step, each of which can be sent any number of times."""
    first = client.seq + 1
    client.seq += 3
    return [
        lambda: keeping(client, lambda: client.pass_(rows_of(step, number), seq=first)),
        lambda: keeping(client, lambda: client.pass_(rows_of(step + 50, number), seq=first + 1)),
        lambda: keeping(client, lambda: client.send("optim_step", seq=first + 2, adam_params={"learning_rate": 0.05})),
    ]


def keeping(client: Client, call: Callable[[], Any]) -> Any:
    seq = client.seq
    found = call()
    client.seq = seq
    return found


def test_checkpoints_samplers_and_sessions_are_there_after_a_restart(tmp_path: Path) -> None:
    with Served(tmp_path, limits=LIMITS) as served:
        client = served.model()
        client.train([row(1)], 2)
        path = client.result(client.send("save_weights", path="half"))["path"]
        promise = client.send("save_weights_for_sampler", sampling_session_seq_id=0)
        sampler = client.result(promise)["sampling_session_id"]
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "sampling_params": {"max_tokens": 6}}
        drawn = served.post("asample", sampling_session_id=sampler, seq_id=0, **body)
        before = served.result(drawn)
        logprobs = client.logprobs([row(2)])
    with Served(tmp_path, limits=LIMITS) as served:
        again = Client(served, client.id, seq=client.seq)
        assert served.result(drawn) == before and served.result(promise)["sampling_session_id"] == sampler
        np.testing.assert_array_equal(again.logprobs([row(2)]), logprobs)
        more = served.result(served.post("asample", sampling_session_id=sampler, seq_id=1, **body))
        assert len(samples(more)["samples"][0]["tokens"]) == 6
        created = served.post("load_weights", path=path, optimizer=True, session_id=client.session, model_seq_id=1)
        other = Client(served, served.result(created)["model_id"])
        np.testing.assert_array_equal(other.logprobs([row(2)]), logprobs)
        for one in (again, other):  # moments and step are those of the checkpoint
            one.train([row(3)])
        np.testing.assert_array_equal(other.logprobs([row(2)]), again.logprobs([row(2)]))


def test_a_stop_leaves_a_snapshot_and_no_work_to_repeat(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        client = served.model()
        client.train([row(1)], 3)
    engine = NumpyEngine()
    with Served(tmp_path, engine) as served:
        Client(served, client.id, seq=client.seq).logprobs([row(1)])
    assert [call.partition(" ")[0] for call in engine.calls] == ["create", "load", "forward"]


def test_what_changed_nothing_is_not_repeated(tmp_path: Path) -> None:
    engine = NumpyEngine()
    with Served(tmp_path) as served:
        client = served.model()
        client.logprobs([row(1)])
        client.result(client.pass_([row(2)]))
        client.result(client.pass_([row(2)], "no_such_loss"))
        client.logprobs([row(1)])
    with Served(tmp_path, engine) as served:
        again = Client(served, client.id, seq=client.seq)
        again.result(again.step())
        calls = list(engine.calls)
    assert [call.partition(" ")[0] for call in calls] == ["create", "forward_backward", "optim_step"]


def test_a_gradient_survives_a_stop(tmp_path: Path) -> None:
    with Served(tmp_path / "a") as served:
        client = served.model()
        client.train([row(1)])
        client.result(client.pass_([row(2)]))
    with Served(tmp_path / "a") as served, Served(tmp_path / "b") as other:
        client, whole = Client(served, client.id, seq=client.seq), other.model()
        whole.train([row(1)])
        whole.pass_([row(2)])
        norms = [one.result(one.step())["metrics"]["grad_norm"] for one in (client, whole)]
    assert norms[0] == norms[1] > 0


def test_a_gradient_that_was_dropped_is_dropped_again(tmp_path: Path) -> None:
    """A step that failed because its gradient was not finite has used it up: what came later goes on without it."""
    with Served(tmp_path, Overflowing()) as served:
        client = served.model()
        client.train([row(1)])
        client.pass_([row(2)] * 3)
        assert "not finite" in client.result(client.step())["error"]
        client.result(client.pass_([row(3)]))
        engine = served.engine
        gradient = engine.models[client.id].gradient["B"].copy()
    with Served(tmp_path, Overflowing()) as served:
        again = Client(served, client.id, seq=client.seq)
        again.logprobs([row(1)])
        np.testing.assert_array_equal(served.engine.models[client.id].gradient["B"], gradient)
        assert again.result(again.step())["metrics"]["grad_norm"] > 0


class Overflowing(NumpyEngine):
    """A pass of three rows has an infinite gradient, which a step drops."""

    def _pass(self, one: Pass) -> PassResult | UserError:
        if len(one.data) == 3:
            self.models[one.model].gradient["B"] += np.inf
        return super()._pass(one)

    def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
        gradient = self.models[model].gradient
        if all(np.isfinite(each).all() for each in gradient.values()):
            return super().optim_step(model, adam)
        for each in gradient.values():
            each[:] = 0
        raise UserError("the gradient is not finite")


@pytest.mark.parametrize("call", [2, 3, 4, 5])
def test_a_lost_engine_is_restored_and_the_request_is_done(tmp_path: Path, call: int) -> None:
    """A rank that ends: the server begins the engine anew, and nothing is lost or done twice."""
    expected = undisturbed(tmp_path / "undisturbed", 2)[0]
    engine = NumpyEngine()
    engine.lose = {call, call + 3}
    with Served(tmp_path / "lost", engine) as served:
        client = served.model(seed=0)
        for step in range(2):
            client.pass_(rows_of(step, 0))
            client.train(rows_of(step + 50, 0))
        np.testing.assert_array_equal(client.logprobs([row(7)]), expected)


class Late(NumpyEngine):
    """Cannot be started so many times."""

    late = 0

    def start(self) -> Capabilities:
        if self.late:
            self.late -= 1
            raise EngineLost("a rank ended")
        return super().start()


def test_an_engine_that_is_lost_while_it_is_started_is_started_again(tmp_path: Path) -> None:
    engine = Late()
    with Served(tmp_path, engine) as served:
        client = served.model()
        engine.lose, engine.late = {2}, 3
        client.train([row(1)])
        assert not engine.late and not served.ended


def test_a_server_whose_engine_does_not_start_says_so(tmp_path: Path) -> None:
    engine = Late()
    engine.late = 1
    with pytest.raises(CannotServe, match="has not started: a rank ended"):
        serve(engine, tmp_path, Address(), Keys({"me": "tml-a"}))


def test_what_was_done_is_done_again_by_a_server_of_shorter_texts(tmp_path: Path) -> None:
    """`max_tokens` and `rows` may change from start to start: a model does not go with what it was trained on."""

    class Short(NumpyEngine):
        def start(self) -> Capabilities:
            return evolve(super().start(), context=4, targets=4)

    found = []
    for name, engine in (("as it was", NumpyEngine()), ("shorter", Short())):
        with Served(tmp_path / name) as served:
            client = served.model(seed=1)
            client.result(client.pass_([row(1, 9)]))
        with Served(tmp_path / name, engine) as again:
            client = Client(again, client.id, seq=client.seq)
            assert "error" not in client.result(client.step())
            found.append(client.logprobs([row(2, 4)]))
            assert ("tokens" in str(client.result(client.pass_([row(1, 9)])))) == (name == "shorter")
    np.testing.assert_array_equal(*found)


def test_what_is_taken_no_more_is_an_error_after_a_restart(tmp_path: Path) -> None:
    """A version before this one had other limits."""
    with Served(tmp_path) as served:
        client = served.model()
        client.train([row(1)])
    store = Store(tmp_path)
    for seq, kind, body in ((3, "optim_step", b'{"model_id": 1}'), (4, "forward_backward", b"\xff")):
        store.accept(Accepted(f"old {seq}", kind, client.id, seq, b"", "me", 1e9, 1, body), None)
    store.close()
    with Served(tmp_path) as again:
        for seq in (3, 4):
            found = again.result(f"old {seq}")
            assert found["category"] == "user" and "this request is no longer taken" in found["error"]
        Client(again, client.id, seq=4).train([row(1)])


def test_a_request_that_always_ends_the_engine_is_an_error_of_the_server(tmp_path: Path) -> None:
    class Deadly(NumpyEngine):
        def _pass(self, one: Pass) -> PassResult | UserError:
            if len(one.data) == 3:
                raise ZeroDivisionError
            return super()._pass(one)

    with Served(tmp_path, Deadly()) as served:
        bad, good = served.model(), served.model()
        promises = [bad.pass_([row(1)] * 3), good.pass_([row(1)])]
        found = served.result(promises[0])
        assert found["category"] == "server" and "has changed nothing" in found["error"]
        assert isinstance(served.result(promises[1]), bytes)
        bad.train([row(1)])
        good.result(good.step())
        np.testing.assert_array_equal(bad.logprobs([row(2)]), good.logprobs([row(2)]))
        for _ in range(3):  # one after the other, with nothing between them
            assert served.result(bad.pass_([row(1)] * 3))["category"] == "server"
        np.testing.assert_array_equal(bad.logprobs([row(2)]), good.logprobs([row(2)]))
        assert served.call("GET", "healthz").status_code == 200


def test_more_models_than_fit_take_turns(tmp_path: Path) -> None:
    engine = NumpyEngine(models=2)
    with Served(tmp_path, engine) as served:
        first, second = served.model(seed=1), served.model(seed=2)
        first.train([row(1)])
        first.pass_([row(2)])
        third = served.model(seed=1)
        assert engine.models.keys() == {first.id, third.id}, "without a gradient nothing is computed again"
        third.train([row(1)])
        third.pass_([row(2)])
        for one in (first, third, second, first):  # the gradient comes back as well
            one.result(one.step())
        np.testing.assert_array_equal(len(engine.models), 2)
        third.result(third.step())
        np.testing.assert_array_equal(first.logprobs([row(5)]), third.logprobs([row(5)]))


def test_the_models_of_quiet_clients_leave_first(tmp_path: Path) -> None:
    engine = NumpyEngine(models=2)
    with Served(tmp_path, engine) as served:
        gone = served.model(seed=1)
        gone.train([row(1)])
        gone.pass_([row(2)])
        served.later(LIMITS.quiet + 1)
        here = served.model(seed=2)
        here.train([row(1)])
        later = served.model(seed=3)
        assert engine.models.keys() == {here.id, later.id}, "also with a gradient"
        gone.result(gone.step())
        gone.train([row(3)])
        alone = served.model(seed=1)
        for rows in (row(1), row(2), row(3)):
            alone.train([rows])
        np.testing.assert_array_equal(gone.logprobs([row(5)]), alone.logprobs([row(5)]))


def test_a_model_that_is_trained_itself_is_that_of_one_client(tmp_path: Path) -> None:
    class Whole(NumpyEngine):
        def start(self) -> Capabilities:
            return evolve(super().start(), rank=0)

        def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
            super().create_model(model, AdapterSettings(rank=8, seed=0))

    with Served(tmp_path, Whole(models=1), ServerLimits(poll=5.0, models=2)) as served:
        session, mine = served.session(), served.session()
        asked = {"model_seq_id": 0, "base_model": MODEL}
        first = served.post("create_model", session_id=session, **asked)
        assert "error" not in served.result(first)
        again = served.post("create_model", session_id=session, model_seq_id=1, base_model=MODEL)
        assert "end its session first" in served.result(again)["error"]
        refused = served.call("POST", "create_model", json={"session_id": mine} | asked)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "2"
        assert "another client trains the model" in refused.json()["error"]
        served.later(LIMITS.quiet + 1)  # its client has not come again
        assert "error" not in served.result(served.post("create_model", session_id=mine, **asked))
        third = served.call("POST", "create_model", json={"session_id": mine, "model_seq_id": 2, "base_model": MODEL})
        assert third.status_code == 429 and "2 models already" in third.json()["error"]


def test_a_model_without_room_is_restored_later(tmp_path: Path) -> None:
    class Full(NumpyEngine):
        full = False

        def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
            if self.full:
                raise UserError("no memory")
            super().create_model(model, adapter)

    engine = Full()
    with Served(tmp_path) as served:
        client = served.model()
        client.train([row(1)])
        logprobs = client.logprobs([row(2)])
    with Served(tmp_path, engine) as served:
        client = Client(served, client.id, seq=client.seq)
        engine.full = True
        found = client.result(client.pass_([row(2)], forward=True))
        assert found["category"] == "server" and "no room for this model now: no memory" in found["error"]
        engine.full = False
        np.testing.assert_array_equal(client.logprobs([row(2)]), logprobs)


def test_weights_are_removed_once_nothing_that_lasts_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure before that would leave a checkpoint without its weights."""
    store, free, fsync = Store(tmp_path), threading.Event(), os.fsync
    store.weights("a").mkdir()
    store.change(SavedEntry("tinker://m/weights/n", "a", "m", "me", "weights", 0.0, "base", None, 0))
    assert store.unused_weights() == []
    monkeypatch.setattr(journal.os, "fsync", lambda fd: (free.wait(10), fsync(fd)))
    store.change(Removed("SavedEntry", "tinker://m/weights/n"))
    found: list[Path] = []
    looking = threading.Thread(target=lambda: found.extend(store.unused_weights()))
    looking.start()
    looking.join(0.2)
    assert looking.is_alive() and not found
    free.set()
    looking.join(10)
    assert found == [store.weights("a")]
    store.close()


def accepted(model: str, seq: int, body: bytes = b"body") -> Accepted:
    return Accepted(f"{model}/{seq}", "optim_step", model, seq, b"", "me", 0.0, 0, body)


def stored(folder: Path, works: int) -> tuple[Store, list[QueuedWork]]:
    """A store with a model that was changed by so many requests, all but the last of which are done."""
    store = Store(folder)
    store.change(ModelEntry("m", "s", "me", "base", None, 0.0))
    found = [store.accept(accepted("m", seq, bytes([seq]) * seq), None) for seq in range(1, works + 1)]
    for work in found[:-1]:
        store.finish(work, Done(work.id, 0.0, False, "", b"result", repeated=True))
    return store, found


def test_a_request_is_read_from_the_journal_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: the engine was lost right after a request was done whose frame is still to be written."""
    store, _ = stored(tmp_path, 2)
    store.settle()
    free, write = threading.Event(), journal._write
    monkeypatch.setattr(journal, "_write", lambda fd, content: (free.wait(10), write(fd, content)))
    late = store.accept(accepted("m", 3, b"late"), None)
    store.finish(late, Done(late.id, 0.0, False, "", b"", repeated=True))
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(store.done("m", 3).body))
    reading.start()
    reading.join(0.2)
    assert reading.is_alive()
    free.set()
    reading.join(10)
    assert found == [b"late"]
    store.close()


def test_a_journal_is_not_rewritten_while_a_request_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was before it may be left out, and it is then elsewhere."""
    store, works = stored(tmp_path, 3)
    with store.changed:
        store.state.drop(works[0])
        del store.state.history["m"][1]
    rewriting, read = threading.Thread(target=store.rewrite), store._journal.read

    def meanwhile(at: int) -> bytes:
        rewriting.start()
        rewriting.join(0.2)
        return read(at)

    monkeypatch.setattr(store._journal, "read", meanwhile)
    assert store.done("m", 2).body == b"\2\2"
    rewriting.join(10)
    monkeypatch.undo()
    assert store.done("m", 2).body == b"\2\2"
    store.close()


def test_requests_are_taken_while_a_journal_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile, what is done and what is dropped: all is as without, also after the next start."""
    monkeypatch.setattr("xtrain.server.store.REST", 100)  # more comes than is copied under the lock
    store, works = stored(tmp_path, 4)
    with store.changed:  # what is left out moves all that is behind it
        store.state.drop(works[0])
        del store.state.history["m"][1]
    begun, free, frames = threading.Event(), threading.Event(), store._journal.frames

    def slow(end: int | None = None) -> Iterator[tuple[int, bytes]]:
        begun.set()
        assert free.wait(20)
        yield from frames(end)

    monkeypatch.setattr(store._journal, "frames", slow)
    store._least = 0
    store.rewrite_if_large()
    assert begun.wait(20)
    store.finish(works[3], Done(works[3].id, 0.0, False, "", b"fourth", repeated=True))
    late = [store.accept(accepted("m", seq, bytes([seq]) * 60), None) for seq in (5, 6)]
    store.finish(late[0], Done(late[0].id, 0.0, False, "", b"fifth", repeated=True))
    with store.changed:
        store.state.drop(works[1])
    late[1].lasting.result(20)
    free.set()
    store._rewriting.join()
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["journal-000002.bin"]
    seventh = store.accept(accepted("m", 7, b"seventh"), None)

    def check(store: Store, ids: set[str]) -> None:
        state = store.state
        assert ids <= set(state.works) and set(state.waiting) == {late[1].id, seventh.id}
        bodies = {id: found.body for id in ids - set(state.waiting) if (found := store.result(state.works[id]))}
        assert bodies == {"m/3": b"result", "m/4": b"fourth", "m/5": b"fifth"}
        assert [store.done("m", seq).body for seq in (2, 3, 4, 5)] == [
            bytes([seq]) * (60 if seq == 5 else seq) for seq in range(2, 6)
        ]
        assert state.models["m"].next == 6

    ids = {work.id for work in (*works[2:], *late, seventh)}
    check(store, ids)
    store.close()
    again = Store(tmp_path)
    assert [work.entry.body for work in again.state.waiting.values()] == [b"\6" * 60, b"seventh"]
    check(again, ids)
    again.rewrite()
    check(again, ids)
    again.close()


def test_a_store_is_closed_while_its_journal_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stored(tmp_path, 3)
    begun, frames = threading.Event(), store._journal.frames

    def slow(end: int | None = None) -> Iterator[tuple[int, bytes]]:
        begun.set()
        while not store._closing:
            time.sleep(0.001)
        yield from frames(end)

    monkeypatch.setattr(store._journal, "frames", slow)
    store._least = 0
    store.rewrite_if_large()
    assert begun.wait(20)
    store.close()
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["journal-000001.bin"]
    again = Store(tmp_path)
    assert len(again.state.works) == 3
    again.close()


def test_what_is_done_takes_no_memory_for_its_result(tmp_path: Path) -> None:
    """However large it is: it is read from the journal, as often as somebody asks."""
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


def test_a_result_that_is_no_longer_kept_is_not_there_after_a_restart(tmp_path: Path) -> None:
    store, works = stored(tmp_path, 3)
    with store.changed:
        store.state.drop(works[0])
        store.rewrite()
    store.close()
    again = Store(tmp_path)
    assert set(again.state.works) == {"m/2", "m/3"} and ("m", 1) not in again.state.keys
    assert again.done("m", 1).body == b"\1" and again.state.results == len(b"result")
    again.close()


def test_a_journal_without_room_to_be_rewritten_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtrain.server.store.LEAST", 1)
    store, _ = stored(tmp_path, 3)
    store.settle()
    write = journal._write

    def full(fd: int, content: bytes) -> None:
        write(fd, content[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", full)
        store._least = 0
        store.rewrite_if_large()
        store._rewriting.join()
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["journal-000001.bin"]
    assert store.done("m", 2).body == b"\2\2"
    store.accept(accepted("m", 4), None)
    store.close()
    again = Store(tmp_path)
    assert len(again.state.works) == 4
    again.close()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with Served(tmp_path), pytest.raises(StoreInUse):
        Served(tmp_path)


def test_a_disk_that_refuses_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is promised any more, and health says so."""
    served = Served(tmp_path)
    client = served.model()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "fsync", full)
    posted = served.call("POST", "session_heartbeat", json={"session_id": client.session})
    assert posted.status_code == 200
    with pytest.raises(AssertionError, match="503"):
        for _ in range(20):
            client.pass_([row(1)])
    assert served.call("GET", "healthz").status_code == 503 and served.ended[0] is not None
    monkeypatch.undo()
    served.close()


def test_a_journal_is_read_up_to_the_first_frame_that_is_not_whole(tmp_path: Path) -> None:
    contents = [bytes([number]) * number for number in range(1, 30)]
    one = RequestJournal(tmp_path)
    positions = [one.append(content) for content in contents]
    one.close()
    (path,) = tmp_path.glob("journal-*")
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        again = RequestJournal(tmp_path)
        kept = [content for _, content in again.frames()]
        end = [*positions, len(whole)]
        assert kept == contents[: sum(position <= cut for position in end) - 1]
        again.append(b"more")
        again.close()
        assert path.read_bytes().endswith(b"more")
    for at in range(positions[-1], len(whole)):  # whatever is changed in the last frame: that one is dropped
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        again = RequestJournal(tmp_path)
        assert [content for _, content in again.frames()] == contents[:-1]
        again.close()
    for zeros in (1, 7, 8, 9, 4096):  # as a power failure leaves them where a file has grown
        path.write_bytes(whole + bytes(zeros))
        again = RequestJournal(tmp_path)
        assert [content for _, content in again.frames()] == contents
        again.close()
        assert path.read_bytes() == whole
    assert not list(tmp_path.glob("*.damaged"))


def test_a_journal_that_is_damaged_inside_is_kept_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = RequestJournal(tmp_path)
    positions = [one.append(bytes([number]) * 9) for number in range(1, 9)]
    one.close()
    (path,) = tmp_path.glob("journal-*")
    content = bytearray(path.read_bytes())
    content[positions[3] + 12] ^= 1
    path.write_bytes(content)
    again = RequestJournal(tmp_path)
    assert len(list(again.frames())) == 3
    again.close()
    assert path.with_suffix(".damaged").read_bytes() == content
    assert f"damaged at byte {positions[3]}" in caplog.text


def test_a_journal_of_another_version_is_said_and_left_as_it_is(tmp_path: Path) -> None:
    one = RequestJournal(tmp_path / "journal")
    one.append(b"another version")
    one.close()
    (path,) = (tmp_path / "journal").iterdir()
    before = path.read_bytes()
    with pytest.raises(CannotServe, match=r"journal, byte 0: .*left as it is"):
        serve(NumpyEngine(), tmp_path, Address(), Keys({"me": "tml-a"}))
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("in its place")
    with pytest.raises(CannotServe, match="journal cannot be read and written"):
        serve(NumpyEngine(), tmp_path, Address(), Keys({"me": "tml-a"}))
