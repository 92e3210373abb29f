"""Ranks of a server as processes: started, lost, started again, and ended."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import server_plan

from xtrain.records.events import events_since
from xtrain.records.training_events import SetupDoneEvent
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.server.engine.started import StartedEngine, StartedRanks
from xtrain.server.engine_interface import Adam, AdapterSettings, Datum, EngineLost, Pass, UserError

SHAPE = AdapterSettings(rank=4, seed=3)
ADAM = Adam(rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.0, clip=0.0)
TOKENS = np.arange(40, dtype=np.int64) % 7
EACH = Pass(model="a", data=[
    Datum(tokens=TOKENS[:-1], inputs={"target_tokens": TOKENS[1:], "weights": np.ones(39, np.float32)}),
] * 3, loss="cross_entropy", settings={}, forward_only=False)  # fmt: skip


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedRanks]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = StartedRanks.open(server_plan(tmp_path, "parallel.fsdp=2"), "")
    yield found
    found.end(patience=0.0)


def losses(engine: StartedEngine, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        (result,) = engine.forward_backward([EACH])
        assert not isinstance(result, UserError)
        found.append(result.metrics["loss:sum"])
        engine.optim_step("a", ADAM)
    return found


def test_the_models_of_another_spec_stay(ranks: StartedRanks, tmp_path: Path):
    named = "workspace.run=mine"
    StartedRanks.open(server_plan(tmp_path, named), "").end()
    StartedRanks.open(server_plan(tmp_path, named, "serve.rows=1"), "").end()
    with pytest.raises(EnvironmentFault, match=r"another name with workspace\.run") as found:
        StartedRanks.open(server_plan(tmp_path, named, rank=9), "")
    assert found.value.code == "X705"


@pytest.mark.slow
def test_ranks_that_are_lost_are_started_again(ranks: StartedRanks, tmp_path: Path):
    engine = StartedEngine.over(ranks)
    assert engine.start().models == 4
    with pytest.raises(EnvironmentFault):  # two servers in one directory
        StartedRanks.open(ranks.plan, "")
    engine.create_model("a", SHAPE)
    first = losses(engine, 2)
    engine.save("a", tmp_path / "two")
    third = losses(engine, 1)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)  # not the one with the socket
    with pytest.raises(EngineLost):
        losses(engine, 1)
    assert not ranks.processes
    engine.start()
    engine.create_model("a", SHAPE)
    engine.load("a", tmp_path / "two", optimizer=True)
    assert losses(engine, 1) == third and third < first
    processes = list(ranks.processes)
    engine.close()
    assert [process.returncode for process in processes] == [0, 0]
    events = events_since(ranks.directory / "events.jsonl")
    assert sum(isinstance(event, SetupDoneEvent) for event in events) == 2
