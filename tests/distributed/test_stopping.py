"""Runs that are to stop: by signals, at a step, after a time, for a file. All ranks agree; what goes on is exact."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from checkpoints import steps
from forked_ranks import Mutation, RanksFailed
from projects import curve, events
from topologies import FLAT, Topology
from trials import Laboratory

SLOW = pytest.mark.slow
TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)
STEPS = 5


def planned(lab: Laboratory, more: str = "", count: int = STEPS):
    return lab.plan(evolve(TWO.trial("fp32"), steps=count, more=more), TWO.layout)


def stopped(lab: Laboratory, name: str, more: str = "", count: int = STEPS, **happens) -> Path:
    """Run until something stops it; the run's directory."""
    mutation = Mutation("happens", **happens) if happens else None
    with pytest.raises(RanksFailed):
        lab.ranks.run(planned(lab, more, count), lab.folder, name=name, mutation=mutation)
    return lab.folder / "jobs" / name


def end(directory: Path) -> tuple[str, int, int]:
    """How the last attempt ended: status, exit code, step."""
    last = events(directory, "run_end")[-1]
    return last["status"], last["exit_code"], last["step"]


@pytest.fixture(scope="module")
def unbroken(lab: Laboratory):
    return lab.ranks.run(planned(lab), lab.folder, name="stopping-not")


def assert_goes_on_exactly(lab: Laboratory, name: str, unbroken, more: str = "") -> None:
    outcome = lab.ranks.run(planned(lab, more), lab.folder, name=name)
    assert outcome.curve == unbroken.curve
    assert outcome.tensors.keys() == unbroken.tensors.keys()
    for tensor, value in unbroken.tensors.items():
        assert np.array_equal(outcome.tensors[tensor], value), tensor


# signals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent, status, code",
    [([["SIGTERM", 1]], "stopped", 75), pytest.param([["SIGUSR1", 0]], "stopped", 75, marks=SLOW),
        pytest.param([["SIGINT", 1]], "interrupted", 130, marks=SLOW),
        pytest.param([["SIGHUP", 0]], "stopped", 75, marks=SLOW),
        pytest.param([["SIGTERM", 0], ["SIGTERM", 1]], "stopped", 75, marks=SLOW),
        pytest.param([["SIGTERM", 0], ["SIGINT", 1]], "interrupted", 130, marks=SLOW)],
)  # fmt: skip
def test_a_signal_to_any_rank_stops_all_at_one_step(lab, unbroken, sent, status, code):
    name = "signal-" + "-".join(f"{word}{rank}" for word, rank in sent)
    directory = stopped(lab, name, agree=[[2, rank, "signal", word] for word, rank in sent])
    assert end(directory) == (status, code, 2)
    assert [event["step"] for event in events(directory, "checkpoint")] == [2] and steps(directory) == [2]
    (said,) = events(directory, "signal")
    most_urgent = "SIGINT" if code == 130 else sent[0][0].replace("HUP", "TERM")
    assert said["name"] == most_urgent.lower() and said["step"] == 2
    count = sum(word.replace("HUP", "TERM") == most_urgent for word, _ in sent)
    assert said["reason"] == f"{count} of 2 ranks received the signal"
    assert not events(directory, "failure")
    assert_goes_on_exactly(lab, name, unbroken)


SAVES = "every 2 steps eval lines\nevery 2 steps checkpoint\ncheckpoint {{ mode = {} }}"


@SLOW
@pytest.mark.parametrize("place", ["eval", "save"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_signal_during_an_evaluation_or_a_save_is_heard_at_the_next_step(lab, unbroken, place, mode):
    name, more = f"signal-in-{place}-{mode}", SAVES.format(mode)
    directory = stopped(lab, name, more, **{place: [[1, 1, "signal", "SIGTERM"]]})
    assert end(directory) == ("stopped", 75, 2)
    assert steps(directory) == [2] and len(events(directory, "checkpoint")) == 1
    assert_goes_on_exactly(lab, name, unbroken, more)


@SLOW
def test_a_run_that_cannot_stop_in_time_is_ended_at_its_deadline(lab):
    more = "launch { stop_deadline = 1 s }\non sigterm eval lines then checkpoint then stop"
    # The second signal is none: the rank is held up where no other can see it.
    directory = stopped(lab, "deadline", more, agree=[[2, 0, "signal", "SIGTERM"]], eval=[[1, 1, "hang", 60]])
    (failure, *_) = events(directory, "failure")
    assert "the rank did not exit within 1 s" in failure["error"] and failure["exit_code"] == 1


# steps ----------------------------------------------------------------------------------------------------------------


@SLOW  # test_ways_in.py and test_empty_steps.py stop runs so, and go on
def test_stop_at_trains_exactly_so_far_and_a_start_beyond_it_not_at_all(lab, unbroken):
    more = "launch { stop_at = 3 steps }"
    directory = stopped(lab, "stop-at", more)
    assert end(directory) == ("stopped", 75, 3) and [row[0] for row in curve(directory)] == [1, 2, 3]
    (said,) = events(directory, "stop")
    assert said["name"] == "stop_at" and said["reason"] == "the run stops after step 3 of 5"
    stopped(lab, "stop-at", more)
    assert end(directory) == ("stopped", 75, 3) and [row[0] for row in curve(directory)] == [1, 2, 3]
    assert steps(directory) == [3]
    assert_goes_on_exactly(lab, "stop-at", unbroken)


@SLOW
def test_stop_after_counts_the_steps_of_each_start(lab, unbroken):
    more = "launch { stop_after = 2 steps }"
    for step in (2, 4):
        directory = stopped(lab, "stop-after", more)
        assert end(directory) == ("stopped", 75, step)
    assert_goes_on_exactly(lab, "stop-after", unbroken, more)
    assert end(directory) == ("done", 0, 5)


# time and files -------------------------------------------------------------------------------------------------------


@SLOW
def test_a_time_limit_counts_from_the_command_and_stops_the_run(lab, unbroken):
    more = "launch { time_limit = 4 h }"
    directory = stopped(lab, "time-limit", more, environment={"XTRAIN_BEGAN": "-1e9"})
    assert end(directory) == ("stopped", 75, 0) and not (directory / "metrics.jsonl").exists()
    (said,) = events(directory, "stop")
    assert said["name"] == "time_limit" and said["reason"] == "launch.time_limit of 14400 s is over"
    assert_goes_on_exactly(lab, "time-limit", unbroken, more)


def test_a_stop_file_stops_the_run_and_no_step_is_made_while_it_lies_there(lab):
    more, file = 'launch { stop_file = "STOP-here" }', lab.folder / "STOP-here"
    try:
        directory = stopped(lab, "stop-file", more, 4000, agree=[[2, 0, "file", str(file)]])
        reached = end(directory)[2]
        assert end(directory)[:2] == ("stopped", 75) and reached >= 2 and steps(directory) == [reached]
        assert events(directory, "stop")[-1]["reason"] == "the stop file STOP-here exists"
        stopped(lab, "stop-file", more, 4000)
        assert end(directory) == ("stopped", 75, reached) and steps(directory) == [reached]
        assert "existed when the run started: remove it" in events(directory, "stop")[-1]["reason"]
    finally:
        file.unlink(missing_ok=True)


# requeue --------------------------------------------------------------------------------------------------------------

REQUEUE = "on sigusr1 checkpoint then requeue then stop"


@SLOW
@pytest.mark.parametrize("answer", [0, 1])
def test_slurm_is_asked_once_the_state_is_safe(lab, tmp_path, answer):
    log = tmp_path / "asked"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho "no such job" >&2\nexit {answer}\n')
    scontrol.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    directory = stopped(lab, f"requeue-{answer}", REQUEUE, environment=environment, agree=[[2, 1, "signal", "SIGUSR1"]])
    assert log.read_text() == "requeue 17\n" and end(directory) == ("stopped", 75, 2)
    kinds = [json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()]
    if answer == 0:
        assert kinds.index("checkpoint") < kinds.index("requeue") < kinds.index("run_end")
    else:
        messages = [event["message"] for event in events(directory, "warning")]
        assert "requeue: `scontrol requeue 17` failed with exit code 1: no such job" in messages


@SLOW
def test_without_slurm_a_warning_says_so(lab):
    directory = stopped(lab, "requeue-none", REQUEUE, agree=[[2, 1, "signal", "SIGUSR1"]])
    messages = [event["message"] for event in events(directory, "warning")]
    assert "requeue: this is not a Slurm job: SLURM_JOB_ID is not set" in messages
    assert end(directory) == ("stopped", 75, 2)
