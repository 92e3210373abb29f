"""Ranks that get on no more are named and the run ends; ranks that are only slow are left alone."""

import json
import re

import pytest
from attrs import evolve
from forked_ranks import Mutation, RanksFailed
from projects import events
from topologies import FLAT, Topology
from trials import Laboratory

SLOW = pytest.mark.slow
TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)


def plan(lab: Laboratory, more: str, steps: int = 6, topology: Topology = TWO):
    return lab.plan(evolve(topology.trial("fp32"), steps=steps, more=more), topology.layout)


def fails(lab: Laboratory, name: str, more: str, mutation: Mutation, topology: Topology = TWO):
    """Run until the watch ends it, before the job's own time is over: the folder, and the event."""
    with pytest.raises(RanksFailed) as caught:
        lab.ranks.run(plan(lab, more, topology=topology), lab.folder, name=name, mutation=mutation, timeout=120)
    directory = lab.folder / "jobs" / name
    assert "not finished" not in str(caught.value)
    (stuck,) = events(directory, "stuck")
    (failure,) = events(directory, "failure")
    assert failure["rank"] == stuck["ranks"][0] and failure["exit_code"] == 1 and not failure["traceback"]
    return directory, stuck


def stacks(directory, rank: int) -> str:
    return (directory / "logs" / "stuck-1" / f"{rank:05d}.txt").read_text()


FOUR = Topology(fsdp=2, tp=2)


@pytest.mark.parametrize(
    ("topology", "rank"), [(TWO, 1), pytest.param(TWO, 0, marks=SLOW), pytest.param(FOUR, 2, marks=SLOW)]
)
def test_a_rank_that_is_stopped_is_named_and_ended(lab, topology, rank):
    more = "fault_tolerance { stuck = 3 s }"
    name = f"stopped-{topology}-{rank}"
    directory, stuck = fails(lab, name, more, Mutation("stop_process", rank=rank, step=3), topology)
    assert (stuck["ranks"], stuck["state"], stuck["step"], stuck["node"]) == ([rank], "stopped", 3, "step.agree")
    assert 3 <= stuck["seconds"] < 60
    for other in {*range(topology.world)} - {rank}:
        assert "step.agree" in stacks(directory, other) and "all_reduce" in stacks(directory, other)
    assert "State:\tT (stopped)" in stacks(directory, rank)


def test_a_rank_that_sleeps_in_its_own_code_is_named_with_the_place(lab):
    more = "fault_tolerance { stuck = 3 s }"
    directory, stuck = fails(lab, "asleep", more, Mutation("oversleep", rank=0, step=3))
    assert (stuck["ranks"], stuck["state"], stuck["step"], stuck["node"]) == ([0], "stuck", 3, "step.fetch")
    assert "_lie_down" in stuck["place"] and "_lie_down" in stacks(directory, 0)
    assert "_lie_down" in events(directory, "failure")[0]["error"]
    assert "last marks: setup.bootstrap setup.watch" in stacks(directory, 0)
    folder = directory / "logs" / "stuck-1"
    collectives = json.loads((folder / "00001.collectives.json").read_text())
    assert collectives["entries"] and [0, 1] in collectives["groups"].values()
    (failure,) = events(directory, "failure")
    where = r"rank 1 waits in all_reduce (\d+) of all ranks; rank 0 did not enter all_reduce \1 of all ranks"
    assert re.search(where, failure["error"]) and str(folder) in failure["error"]
    summary = (folder / "summary.txt").read_text()
    assert re.search(where, summary) and re.search(
        r"rank 0: step 3, step.fetch \S*rank_health.py:\d+ _lie_down", summary
    )


@SLOW
def test_a_rank_whose_python_cannot_run_is_named_with_its_stack(lab):
    directory, stuck = fails(lab, "held", "fault_tolerance { stuck = 4 s }", Mutation("hold_python", rank=1, step=3))
    assert (stuck["ranks"], stuck["state"]) == ([1], "frozen")
    assert "rank_health.py" in stacks(directory, 1)


@SLOW
def test_of_ranks_in_the_same_node_the_one_that_waits_for_nobody_is_named(lab):
    """Both are in the forward; one sleeps in a hook of the model, the other waits for its parameters."""
    more = "fault_tolerance { stuck = 3 s }"
    _, stuck = fails(lab, "hooked", more, Mutation("sleep_in_forward", rank=1, step=3))
    assert (stuck["ranks"], stuck["state"], stuck["node"]) == ([1], "stuck", "step.forward_backward")


def test_a_probe_names_who_does_not_come_within_its_limit(lab):
    more = "fault_tolerance { stuck = none }\nevery 2 steps health { limit = 3 s }"
    late = Mutation("oversleep", rank=1, step=4, op="tick.health")
    _, stuck = fails(lab, "late", more, late)
    assert (stuck["ranks"], stuck["step"], stuck["node"]) == ([1], 4, "tick.health")
    assert stuck["seconds"] < 60


@SLOW
def test_a_rank_that_is_continued_in_time_costs_nothing_and_a_probe_says_who_comes_last(lab):
    more = "fault_tolerance { stuck = 6 s }\nevery 3 steps health"
    stop = Mutation("stop_process", rank=1, step=3, op="tick.health", seconds=2.0)
    outcome = lab.ranks.run(plan(lab, more), lab.folder, name="continued", mutation=stop)
    assert len(outcome.curve) == 6 and not events(outcome.directory, "stuck")
    first, second = events(outcome.directory, "health")
    assert (first["step"], second["step"], first["slowest"]) == (3, 6, 1)
    assert first["late_seconds"] > 1 > second["late_seconds"] and first["seconds"] < 1


@pytest.mark.parametrize(("more", "mutation"), [
    pytest.param("on finish eval lines { batches = none }", Mutation("slow_evaluation", seconds=0.5), marks=SLOW),
    pytest.param("every 4 steps checkpoint", Mutation("slow_disk", seconds=5.0), marks=SLOW),
    pytest.param("every 4 steps checkpoint", Mutation("slow_publishing", seconds=5.0), marks=SLOW),
    pytest.param("", Mutation("slow_setup", seconds=5.0), marks=SLOW),
], ids=str)  # fmt: skip
def test_what_may_last_is_left_alone(lab, more, mutation):
    more = f"fault_tolerance {{ stuck = 2 s }}\n{more}"
    name = f"lasting-{mutation}".replace(" ", "-")
    outcome = lab.ranks.run(plan(lab, more), lab.folder, name=name, mutation=mutation)
    assert len(outcome.curve) == 6 and not events(outcome.directory, "stuck")
