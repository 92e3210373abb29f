"""What a server promises survives it: power failures at any moment, lost engines, restarts."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy_engine import NumpyEngine
from server_client import MODEL, Client, Served, row, samples

from xtrain.server import database
from xtrain.server.access import Keys, ServerLimits
from xtrain.server.database import Database
from xtrain.server.engine_interface import Adam, AdapterSettings, Capabilities, EngineLost, Pass, PassResult, UserError
from xtrain.server.serving import Address, CannotServe, serve
from xtrain.server.state import Accepted
from xtrain.server.store import Store

LIMITS = ServerLimits(poll=5.0, snapshot_steps=5)


class Slow(NumpyEngine):
    """A pass takes a while, so that a power failure meets it in the middle."""

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        time.sleep(0.002)
        return super().forward_backward(passes)


class Disk:
    """Copies a folder as a power failure leaves it: what a commit was told of is there, and of the next a torn part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._committing, commit = threading.Lock(), Database._commit

        def watched(store: Database, batch: Iterable[database.Rows]) -> None:
            with self._committing:
                commit(store, batch)

        monkeypatch.setattr(Database, "_commit", watched)

    def after_power_failure(self, store: Store, to: Path, rng: random.Random) -> Path:
        """Weights that are removed meanwhile may be missing."""
        with store.changed, self._committing:  # nothing new is referred to
            (to / "weights").mkdir(parents=True)
            for path in (store.folder / "weights").iterdir():
                with suppress(shutil.Error, FileNotFoundError):
                    shutil.copytree(path, to / "weights" / path.name)
            for name in (database.FILE, database.WAL, database.MARK):
                shutil.copy(store.folder / name, to)
        if rng.random() < 0.5:
            with (to / database.WAL).open("ab") as file:
                file.write(rng.randbytes(rng.randrange(9000)))
        if rng.random() < 0.5:  # it is not made lasting
            (to / database.MARK).write_bytes(database._mark_of(0))
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
    old = (3, "optim_step", b'{"model_id": 1}'), (4, "forward_backward", b"\xff"), (5, "unknown", b"{}")
    for seq, kind, body in old:
        store.accept(Accepted(f"old-{seq}", kind, client.id, seq, b"", "me", 1e9, 1, body), None)
    store.close()
    with Served(tmp_path) as again:
        for seq, _, _ in old:
            found = again.result(f"old-{seq}")
            assert found["category"] == "user" and "this request is no longer supported" in found["error"]
        Client(again, client.id, seq=5).train([row(1)])


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
