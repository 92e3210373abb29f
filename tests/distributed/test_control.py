"""Commands to a run of several ranks: carried out between two steps, answered, no matter to what is learned."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from checkpoints import folder as checkpoints_of
from checkpoints import same, steps
from forked_ranks import Mutation, RanksFailed
from projects import events, records
from topologies import FLAT, Topology
from trials import Laboratory

SLOW = pytest.mark.slow
TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)
STEPS = 6


def planned(lab: Laboratory, more: str = ""):
    return lab.plan(evolve(TWO.trial("fp32"), steps=STEPS, more=more), TWO.layout)


def commanded(lab: Laboratory, name: str, *acts: list, more: str = "", places: dict[str, list] | None = None):
    """acts: [after how many steps, command, argument …]."""
    agree = [[step, 0, "command", _content(*said)] for step, *said in acts]
    return lab.ranks.run(
        planned(lab, more), lab.folder, name=name, mutation=Mutation("happens", agree=agree, **(places or {}))
    )


def _content(command: str, *arguments: object) -> dict | str:
    if not command.isalpha():
        return command
    return {"command": command, **({"arg": arguments[0]} if arguments else {})}


def answers(directory: Path, state: str) -> list[tuple[str, str]]:
    """(command, detail) of every answer in a state, in order."""
    return [(event["command"], event["detail"]) for event in events(directory, "control") if event["state"] == state]


@pytest.fixture(scope="module")
def unbroken(lab: Laboratory):
    return lab.ranks.run(
        planned(lab, "every 1 step checkpoint\ncheckpoint { keep = none }"), lab.folder, name="control-not"
    )


def test_a_run_does_what_it_is_asked_and_learns_the_same(lab, unbroken):
    acts = ([1, "save"], [2, "eval", "lines"], [3, "profile", 2])
    outcome = commanded(lab, "asked", *acts, more="every 1000 steps profile { warmup = 0 }")
    directory = outcome.directory
    assert outcome.curve == unbroken.curve and not list((directory / "control").iterdir())
    names = ["save", "eval lines", "profile"]
    assert [command for command, _ in answers(directory, "accepted")] == names
    assert [command for command, _ in answers(directory, "done")] == names and not answers(directory, "refused")
    # Heard in the step after the first, and so carried out when two have been made.
    assert [event["step"] for event in events(directory, "control") if event["state"] == "done"] == [2, 3, 6]
    assert steps(directory) == [2, 6] and same(
        checkpoints_of(directory).path(2), checkpoints_of(unbroken.directory).path(2)
    )
    (asked, at_end) = outcome.evals
    assert asked["node"] == "event.control.eval.lines" and asked["step"] == 3 and asked["loss"] != at_end["loss"]
    folder = directory / "profile/steps-000000000005-000000000006"
    assert events(directory, "profile")[0]["node"] == "event.control.profile" and (folder / "summary.md").exists()
    for trace in (folder / "rank-00000.json", folder / "rank-00001.json"):
        names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
        assert any("aten::" in name for name in names)


def test_what_cannot_be_done_is_refused_with_the_reason(lab, unbroken):
    wrong = (
        [1, "dance"],
        [1, "eval", "nowhere"],
        [2, "profile", 0],
        [2, "profile", 1.5],
        [2, "resume"],
        [2, "save", "now"],
        [3, '{"command": "sa'],
        [3, "[]"],
        [4, "pause"],
        [4, "pause"],
    )
    # What is torn may still be written: it is refused when it is the same at the next look.
    outcome = commanded(
        lab, "refused", *wrong, places={"optimizer": [[4, 0, "later", [1.0, "command", _content("resume")]]]}
    )
    directory = outcome.directory
    assert outcome.curve == unbroken.curve and not list((directory / "control").iterdir())
    assert sorted(detail for _, detail in answers(directory, "refused")) == sorted(
        ['the file holds no object with a "command"', "the file is not a complete JSON object", "the run is not paused",
            "the run is paused already", "profile takes a number of steps from 1 to 100, not 0",
            "profile takes a number of steps from 1 to 100, not 1.5", "save takes no argument, but 'now' was given",
            "unknown command dance; commands: stop, save, eval, profile, pause, resume",
            "dataset nowhere has no held-out part: choose lines"],
    )  # fmt: skip
    assert [command for command, _ in answers(directory, "done")] == ["pause", "resume"]


@pytest.mark.slow
def test_a_paused_run_saves_evaluates_and_goes_on(lab, unbroken):
    later = [[0.0, _content("save")], [0.1, _content("eval")], [0.7, _content("resume")]]
    places = {"optimizer": [[1, 0, "later", [seconds, "command", content]] for seconds, content in later]}
    outcome = commanded(lab, "paused", [1, "pause"], places=places)
    directory = outcome.directory
    assert outcome.curve == unbroken.curve and steps(directory) == [2, 6]
    assert same(checkpoints_of(directory).path(2), checkpoints_of(unbroken.directory).path(2))
    assert [command for command, _ in answers(directory, "done")] == ["pause", "save", "eval lines", "resume"]
    (paused,) = events(directory, "paused")
    assert paused["step"] == 2 and paused["seconds"] > 0.5
    before, after = (
        record for record in records(directory, "metrics") if record["step"] in (2, 3) and "loss" in record
    )
    # What lies between two records is the wait and the step: the one is no part of the other.
    assert after["time"] - before["time"] > paused["seconds"] + 0.9 * after["step_seconds"]


@pytest.mark.parametrize(
    "what, said, status, code",
    [pytest.param(["signal", "SIGTERM"], "signal", "stopped", 75, marks=SLOW),
        pytest.param(["signal", "SIGINT"], "signal", "interrupted", 130, marks=SLOW),
        pytest.param(["command", _content("stop")], "control", "stopped", 75, marks=SLOW)],
)  # fmt: skip
def test_a_paused_run_can_be_stopped(lab, unbroken, what, said, status, code):
    name, rank = f"paused-{what[0]}-{code}", 0 if what[0] == "command" else 1
    with pytest.raises(RanksFailed):
        commanded(lab, name, [1, "pause"], places={"optimizer": [[1, rank, "later", [0.1, *what]]]})
    directory = lab.folder / "jobs" / name
    last = events(directory, "run_end")[-1]
    assert (last["status"], last["exit_code"], last["step"]) == (status, code, 2) and events(directory, said)
    assert steps(directory) == [2]
    assert lab.ranks.run(planned(lab), lab.folder, name=name).curve == unbroken.curve


@SLOW
def test_a_time_limit_is_heard_while_a_run_waits(lab):
    with pytest.raises(RanksFailed):
        commanded(lab, "paused-limit", [1, "pause"], more="launch { time_limit = 15 s }")
    directory = lab.folder / "jobs/paused-limit"
    assert events(directory, "stop")[0]["name"] == "time_limit" and steps(directory) == [2]


def test_a_stop_saves_and_the_run_goes_on_later_whatever_was_asked_before(lab, unbroken):
    with pytest.raises(RanksFailed):
        more = "every 1000 steps profile { warmup = 0 }"
        commanded(lab, "asked-to-stop", [1, "profile", 50], [2, "stop"], [2, "eval"], more=more)
    directory = lab.folder / "jobs/asked-to-stop"
    last = events(directory, "run_end")[-1]
    assert (last["status"], last["exit_code"], last["step"]) == ("stopped", 75, 3) and steps(directory) == [3]
    assert [command for command, _ in answers(directory, "done")] == ["stop", "profile"]
    assert answers(directory, "done")[1][1].startswith("1 of 50 steps in ")
    assert answers(directory, "refused") == [("eval lines", "the run ended before the command was executed")]
    (directory / "control/left.json").write_text('{"command": "stop"}')
    assert lab.ranks.run(planned(lab), lab.folder, name="asked-to-stop").curve == unbroken.curve
    assert answers(directory, "refused")[1:] == [("stop", "the command is older than this start of the run: repeat it")]


@SLOW
def test_a_save_that_is_asked_for_and_fails_ends_nothing(lab, unbroken):
    full = {"full_disk": {"rank": 1, "saves": [0]}}
    outcome = commanded(lab, "asked-full", [1, "save"], [3, "save"], places=full)
    assert outcome.curve == unbroken.curve and steps(outcome.directory) == [4, 6]
    ((command, detail),) = answers(outcome.directory, "refused")
    assert command == "save" and "No space left on device" in detail
