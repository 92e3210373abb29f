"""What a server says of itself while it listens: `server/status.json`."""

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy_engine import NumpyEngine
from server_client import Served, outputs, row

from xtrain.records.status import SERVER_FILE, ServerStatus


class Held(NumpyEngine):
    """Waits in each step until it is let go."""

    free = threading.Event()

    def optim_step(self, model, adam):
        self.free.wait(60)
        return super().optim_step(model, adam)


def status(served: Served) -> ServerStatus:
    return served.server._look()


def test_models_and_what_was_done(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        one, two = served.model(), served.model()
        promise = one.pass_([row(1, 9), row(2, 5)])
        loss = outputs(one.result(promise))[1]["loss:sum"]
        one.result(one.step())
        assert one.result(one.pass_([], "cross_entropy"))["category"] == "user"
        found = status(served)
        assert (found.state, found.clients, found.waiting) == ("serving", 2, 0)
        assert (found.requests, found.errors) == (5, 1)
        assert found.kinds == {"create_model": 2, "forward_backward": 2, "optim_step": 1}
        first, second = found.models
        assert first.id == one.id and (first.steps, first.tokens, first.next_seq) == (1, 14, 4)
        assert first.loss == pytest.approx(loss / 14) and first.loss_name == "cross_entropy"
        assert first.connected and first.in_memory and not first.damaged and first.waits_for == ""
        assert second.id == two.id and (second.steps, second.tokens, second.loss) == (0, 0, None)
        assert found.trained_per_second > 0 and found.sampled_per_second == 0
        assert found.latency.keys() == {"p50", "p95", "p99"} and min(found.latency.values()) >= 0


def test_who_waits_for_what(tmp_path: Path) -> None:
    engine = Held()
    with Served(tmp_path, engine) as served:
        busy, gap = served.model(), served.model()
        promises = [busy.step(), busy.pass_([row(1)])]
        gap.send("optim_step", seq=3, adam_params={})
        found = wait_for(served, lambda one: one.models[0].waits_for == "optim_step is executed")
        assert found.waiting == 3 and found.models[0].waiting == 2
        assert found.models[1].waits_for == "request 1, which has not arrived"
        engine.free.set()
        for promise in promises:
            busy.result(promise)
        assert status(served).models[0].waits_for == ""


def wait_for(served: Served, what) -> ServerStatus:
    pause = threading.Event()
    for _ in range(600):
        if what(found := status(served)):
            return found
        pause.wait(0.05)
    raise AssertionError(found)


def test_the_file_is_the_last_word_of_a_server(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        served.model().train([row(1)])
    found = msgspec.json.decode((served.server.store.folder / Path(SERVER_FILE).name).read_bytes(), type=ServerStatus)
    assert (found.state, found.requests, found.models[0].steps) == ("stopped", 3, 1)
    assert np.isfinite(found.models[0].loss or 0.0)
