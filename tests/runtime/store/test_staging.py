"""The buffers that a copy of the state is made in."""

import json

import torch
from projects import Project
from torch.distributed.checkpoint.staging import DefaultStager

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.store.saver import HostCopy


def test_buffers_that_were_prepared_are_those_of_every_save():
    state = {"a": torch.zeros(1000), "b": torch.zeros(7)}
    staging = HostCopy(pinned=False, device=torch.device("cpu"))
    staging.prepare(state)
    places = set()
    for number in range(3):
        for value in state.values():
            value.fill_(number)
        copies = staging.begin(state).result()
        staging.wait()
        assert all(torch.equal(copies[name], state[name]) for name in state)
        places.add(tuple(copies[name].data_ptr() for name in sorted(state)))
    assert len(places) == 1
    staging.close()


def test_a_run_that_saves_beside_training_prepares_its_buffers_at_set_up(tmp_path, monkeypatch):
    prepared: list[set[int]] = []
    staged: list[set[int]] = []

    def places(tensors: dict) -> set[int]:
        """Where in memory each is; streams of random numbers are copies anyway."""
        return {value.untyped_storage().data_ptr() for name, value in tensors.items() if not name.startswith("rng.")}

    prepare, begin = HostCopy.prepare, HostCopy.begin
    monkeypatch.setattr(HostCopy, "prepare", lambda self, t: (prepared.append(places(t)), prepare(self, t))[1])
    monkeypatch.setattr(HostCopy, "begin", lambda self, t: (staged.append(places(t)), begin(self, t))[1])
    monkeypatch.chdir(tmp_path)
    spec = Project(tmp_path).spec(steps=4, more="every 2 steps checkpoint\ncheckpoint { mode = async, model = false }")
    plan = plan_from_spec(tmp_path / spec).plan
    assert plan is not None
    assert Executor(plan, tmp_path / "run", rank=0).run() == "done"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [2, 4]
    # What is copied later lies where it lay at set-up, so that the buffers of then are found again.
    assert len(prepared) == 1 and len(staged) == 3 and all(each == prepared[0] for each in staged)


def test_torch_may_close_what_copies_behind_each_copy(monkeypatch):
    """As 2.11 does."""
    stage = DefaultStager._stage

    def staged(stager, tensors, **how):
        found = stage(stager, tensors, **how)
        stager._state_dict_stager.close()
        return found

    monkeypatch.setattr(DefaultStager, "_stage", staged)
    staging = HostCopy(pinned=False, device=torch.device("cpu"))
    tensors = {"a": torch.ones(4)}
    first = staging.begin(tensors).result()
    place = first["a"].data_ptr()
    tensors["a"] += 1
    second = staging.begin(tensors).result()
    assert second["a"].tolist() == [2.0] * 4 and second["a"].data_ptr() == place
    staging.close()
