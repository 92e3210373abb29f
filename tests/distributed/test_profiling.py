"""Profiles and memory snapshots of several ranks: which steps, what lies where, and nothing learned otherwise."""

import json
import re
from pathlib import Path

import pytest
from attrs import evolve
from forked_ranks import Mutation, Outcome, RanksFailed
from projects import events
from topologies import BY_NAME, Topology
from trials import Laboratory

from xtrain.plan.plan import Plan

SLOW = pytest.mark.slow
TWO = BY_NAME["fsdp 2, one microbatch (dense)"]


def planned(lab: Laboratory, more: str, *, layout: Topology = TWO, count: int = 6, params: str = "fp32") -> Plan:
    trial = evolve(layout.trial(params), steps=count, more=more, settings=(*layout.shared, *layout.flat))
    return lab.plan(trial, layout.layout)


def run(lab: Laboratory, name: str, more: str, mutation: Mutation | None = None, **others) -> Outcome:
    return lab.ranks.run(planned(lab, more, **others), lab.folder, name=f"profiling-{name}", mutation=mutation)


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "profile").iterdir())


def steps_of(trace: Path) -> list[int]:
    """The steps that a trace has, by the marks in it."""
    names = (event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X")
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


def messages(directory: Path, part: str) -> list[str]:
    return [event["message"] for event in events(directory, "warning") if part in event["message"]]


@pytest.mark.slow
def test_the_steps_that_are_asked_for_on_every_rank_and_nothing_learned_otherwise(lab):
    """After step 5: one passes, one warms up, 8 and 9 are recorded; what is asked for meanwhile is refused."""
    more = "every 5 steps profile { wait = 1, warmup = 1, active = 2, ranks = all } then memory_snapshot"
    command = Mutation("happens", agree=[[6, 0, "command", {"command": "profile", "arg": 1}]])
    outcome = run(lab, "ticks", more, command, count=10)
    assert outcome.curve == run(lab, "none", "", count=10).curve
    directory = outcome.directory
    # The second one begins behind the last step: it has none to record.
    assert folders(directory) == ["memory-000000000005", "memory-000000000010", "steps-000000000008-000000000009"]
    folder = directory / "profile/steps-000000000008-000000000009"
    assert [steps_of(folder / f"rank-0000{rank}.json") for rank in (0, 1)] == [[8, 9], [8, 9]]
    (event,) = events(directory, "profile")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert (event["step"], event["first"], event["last"], event["ranks"], event["bytes"]) == (9, 8, 9, 2, size)
    assert (event["node"], Path(event["path"]), event["note"]) == ("tick.profile", folder, "")
    (said,) = (each for each in events(directory, "control") if each["state"] == "refused")
    assert said["detail"] == "another profile is being recorded" and said["step"] == 7
    for rank in (0, 1):
        found = json.loads((folder / f"rank-0000{rank}.summary.json").read_text())
        assert (found["rank"], found["first"], found["last"], len(found["step_seconds"])) == (rank, 8, 9, 2)
        assert sum(found["shares"].values()) == pytest.approx(1) and found["communication"] > 0
        assert {"step.forward_backward", "step.optimizer", "tick.log"} <= found["nodes"].keys()
        kinds = {operator["name"]: operator["kind"] for operator in found["operators"]}
        assert kinds["aten::mm"] == "matmul" and "attention" in kinds.values() and "communication" in kinds.values()
    page = (folder / "summary.md").read_text()
    assert re.search(r"^\| +0 \|.*\n\| +1 \|", page, re.MULTILINE) and "`step.forward_backward`" in page


@SLOW  # tests/runtime/inspect/test_profile.py cuts profiles short without ranks
def test_what_is_under_way_when_a_run_goes_back_ends_there_and_what_was_seen_is_kept(lab):
    """Steps 4 and 5 are bad, and the second one sends the run back to step 2: of 4 to 6 the one that ended was seen."""
    more = "every 2 steps checkpoint\nevery 3 steps profile { wait = 0, warmup = 0, active = 3 }\non nan(2) rollback"
    poison = Mutation("poison", rank=1, portions=[4, 5])
    directory = run(lab, "back", more, poison, count=7).directory
    assert len(events(directory, "rollback")) == 1
    whole, cut = "steps-000000000004-000000000006-2", "steps-000000000004-000000000004"
    assert folders(directory) == [cut, whole, "steps-000000000007-000000000007"]
    assert steps_of(directory / "profile" / whole / "rank-00001.json") == [4, 5, 6]
    notes = [event["note"] for event in events(directory, "profile")]
    assert notes == ["cut short, as the run goes back", "", "cut short, as the run ends"]
    assert "cut short, as the run goes back" in (directory / "profile" / cut / "summary.md").read_text()


@SLOW
def test_a_stop_cuts_a_profile_short_and_a_crash_leaves_nothing_torn(lab):
    more = "every 2 steps profile { wait = 0, warmup = 0, active = 2, ranks = first }\nevery 2 steps checkpoint"
    mutation = Mutation("happens", agree=[[3, 1, "signal", "SIGTERM"]])
    with pytest.raises(RanksFailed):
        run(lab, "stopped", more, mutation, count=8)
    directory = lab.folder / "jobs/profiling-stopped"
    assert events(directory, "run_end")[-1]["status"] == "stopped"
    assert folders(directory) == ["steps-000000000003-000000000003"]
    with pytest.raises(RanksFailed):
        run(lab, "stopped", more, Mutation("dies", step=6), count=8)
    assert events(directory, "profile")[-1]["note"] == "cut short, as the run ends"
    assert folders(directory) == ["steps-000000000003-000000000003"]
    # What such an end may leave of a trace that was being written is gone when the next profile begins.
    torn = directory / "profile/steps-000000000003-000000000003/rank-00009.json.partial"
    torn.touch()
    run(lab, "stopped", more, count=8)
    found = folders(directory)
    assert found == ["steps-000000000003-000000000003", "steps-000000000007-000000000008"] and not torn.exists()
    for folder in found:
        names = sorted(path.name for path in (directory / "profile" / folder).iterdir())
        assert names == ["rank-00000.json", "rank-00000.summary.json", "summary.md"]


@SLOW
def test_what_is_under_way_does_not_record_a_pause(lab):
    commands = [[1, 0, "command", {"command": "profile", "arg": 4}], [4, 0, "command", {"command": "pause"}]]
    resume = [[4, 0, "later", [1.5, "command", {"command": "resume"}]]]
    directory = run(lab, "paused", "", Mutation("happens", agree=commands, optimizer=resume), count=8).directory
    assert [event["step"] for event in events(directory, "paused")] == [5]
    # Asked for after step 1, heard in step 2, warmed up in step 3.
    assert folders(directory) == ["steps-000000000004-000000000005"]
    (said,) = (
        each for each in events(directory, "control") if each["command"] == "profile" and each["state"] == "done"
    )
    assert said["detail"].startswith("2 of 4 steps in ") and said["detail"].endswith(
        "; cut short, as the run is paused"
    )


@SLOW
def test_a_rank_that_cannot_write_says_so_and_the_others_go_on(lab):
    more = "every 2 steps profile { wait = 0, warmup = 0, active = 1 } then memory_snapshot"
    outcome = run(lab, "unwritten", more, Mutation("unwritten", rank=1), count=4)
    directory = outcome.directory
    assert outcome.curve == run(lab, "written", "", count=4).curve
    assert len(messages(directory, "rank 1 could not write its profile")) == 1
    assert len(messages(directory, "rank 1 could not write its memory snapshot")) == 2
    assert [event["ranks"] for event in events(directory, "profile")] == [1]
    assert [event["ranks"] for event in events(directory, "memory_snapshot")] == [1, 1]
    for folder in folders(directory):
        assert not list((directory / "profile" / folder).glob("*rank-00001*"))


LAYOUTS = (
    "fsdp 2 · ep 2 (moe)",
    "pp 2, 1f1b (dense)",
    "tp 2 (dense)",
    "replicate 2, ddp (dense)",
    "fsdp 2, gathered parameters kept (dense)",
    "ring 2 · ep 2 (moe)",
    "fsdp 4 · ep 2 (moe)",
    "pp 2, zbv (dense)",
    "pp 2 · fsdp 2 · ep 2 (moe)",
    "pp 2 · fsdp 2 · tp 2 (dense)",
)
EXACT = ("parameters", "gradients", "optimizer", "averages")


CASES = [
    pytest.param(name, params, marks=() if number < 1 and params == "fp32" else SLOW)
    for params in ("fp32", "fp64")
    for number, name in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_memory_in_use_is_what_is_planned(lab, name, params):
    """Parameters, gradients, moments, averages of the rank of a pipeline coordinate that holds most, byte by byte."""
    layout = BY_NAME[name]
    more = "every 1 step memory_snapshot { ranks = all }\nema { decay = 0.9 }"
    plan = planned(lab, more, layout=layout, count=2, params=params)
    outcome = lab.ranks.run(plan, lab.folder, name=f"held-{name}-{params}".replace(" ", "_"))
    paths = sorted((outcome.directory / "profile/memory-000000000002").glob("rank-*.json"))
    found = [json.loads(path.read_text()) for path in paths]
    assert len(found) == plan.mesh.world_size
    for each in plan.estimates.classes:
        own = [one for one in found if one["coordinates"]["pp"] == each.pp]
        most = {kind: max(one["held"][kind] for one in own) for kind in EXACT}
        assert most == {kind: getattr(each.memory, kind) for kind in EXACT}
        assert all(one["planned"]["total"] == each.memory.total_bytes for one in own)
        # Rows of the step, counters, buckets of ddp, and what a pipeline keeps of its last microbatches.
        assert all(0 < one["held"]["other"] < 1_000_000 for one in own)
        if each.memory.unreduced and "ddp" in name:
            assert {one["largest_others"][0]["bytes"] for one in own} == {each.memory.unreduced}
        assert all(one["process"]["resident_bytes"] > 10_000_000 and one["allocator"] is None for one in own)
