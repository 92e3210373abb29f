"""Alerts of several ranks: seen where they are, told once, and acted upon by all of them in the same place."""

import time

import pytest
from attrs import evolve
from checkpoints import steps
from forked_ranks import Mutation, Outcome, RanksFailed
from projects import events
from topologies import FLAT, Topology
from trials import Laboratory

SLOW = pytest.mark.slow
TWO, FOUR = Topology(fsdp=2, accumulate=1, shared=FLAT), Topology(fsdp=2, tp=2, shared=FLAT)
NO_STEPS = "checkpoint { model = false, keep = none }\nevery 500 steps checkpoint\n"


def run(
    lab: Laboratory, name: str, more: str, mutation: Mutation, *, count: int = 6, topology: Topology = TWO
) -> Outcome:
    trial = evolve(topology.trial("fp32"), steps=count, more=NO_STEPS + more)
    return lab.ranks.run(lab.plan(trial, topology.layout), lab.folder, name=name, mutation=mutation)


def alerts(outcome: Outcome, kind: str) -> list[tuple[str, int]]:
    return [(each["state"], each["step"]) for each in events(outcome.directory, "alert") if each["kind"] == kind]


@pytest.mark.parametrize(
    ("topology", "rank"), [pytest.param(*each, marks=SLOW) for each in ((TWO, 1), (TWO, 0), (FOUR, 2))]
)
def test_a_rank_that_is_stopped_is_reported_and_so_is_that_it_goes_on(lab, topology, rank):
    """Also where nobody ends the run because of it; of the first rank the second one tells."""
    more = 'fault_tolerance { stuck = none }\nalerts { stalled = 2 s }\non stalled notify("echo $XTRAIN_RANKS stalled")'
    stop = Mutation("stop_process", rank=rank, step=3, seconds=7.0)
    # As many steps as take some looks of the thread that clears the alert, one a second.
    outcome = run(lab, f"stalled-{topology}-{rank}", more, stop, topology=topology, count=100)
    assert len(outcome.curve) == 100
    raised, cleared = (each for each in events(outcome.directory, "alert") if each["kind"] == "stalled")
    assert (raised["state"], raised["ranks"], raised["limit"]) == ("raised", [rank], 2.0)
    assert f"rank {rank} without a heartbeat; the other ranks wait in step 3, step.agree" in raised["message"]
    assert 2 <= raised["value"] < 8
    assert cleared["state"] == "cleared"
    (notified,) = events(outcome.directory, "notify")
    assert notified["exit_code"] == 0
    assert f"\n{rank} stalled\n" in (outcome.directory / "logs" / "notify.log").read_text()


@SLOW
def test_a_rank_that_is_asleep_is_reported_with_its_place_before_the_run_is_ended(lab):
    more = "fault_tolerance { stuck = 8 s }"  # and so stalled is 4 s
    trial = evolve(TWO.trial("fp32"), steps=6, more=more)
    asleep = Mutation("oversleep", rank=1, step=3)
    with pytest.raises(RanksFailed) as caught:
        lab.ranks.run(lab.plan(trial, TWO.layout), lab.folder, name="asleep-told", mutation=asleep, timeout=60)
    assert "not finished" not in str(caught.value)
    directory = lab.folder / "jobs" / "asleep-told"
    (raised,) = events(directory, "alert")
    (stuck,) = events(directory, "stuck")
    assert (raised["kind"], raised["ranks"]) == ("stalled", [1]) and "_lie_down" in raised["message"]
    assert raised["time"] < stuck["time"]


def test_bad_steps_are_one_alert_for_as_long_as_they_last(lab):
    action = 'on nan(2) notify("echo two bad steps")'
    poison = Mutation("poison", rank=1, portions=[2, 3, 5], kind="loss")
    outcome = run(lab, "bad-steps", f"on nan(4) skip\n{action}", poison)
    assert alerts(outcome, "nonfinite") == [("raised", 2), ("cleared", 4), ("raised", 5), ("cleared", 6)]
    assert [each["step"] for each in events(outcome.directory, "notify")] == [2]
    assert not alerts(outcome, "loss_spike"), "what is no number is no spike"


@SLOW  # of one rank: tests/runtime/loop/test_alert_actions.py
def test_all_ranks_save_behind_the_step_that_follows_a_spike(lab):
    """One rank's share of the loss is high in a step; the first rank sees it in the sum, and all save together."""
    spike = Mutation("poison", rank=1, portions=[55], kind="loss", value=20.0)
    more = 'on loss_spike notify("echo $XTRAIN_STEP $XTRAIN_VALUE") then checkpoint'
    small = Topology(fsdp=2, accumulate=1, rows=2, shared=("model.layers=1",))
    outcome = run(lab, "spike", more, spike, count=60, topology=small)
    assert alerts(outcome, "loss_spike")[:1] == [("raised", 55)]
    assert steps(outcome.directory) == [56, 60]
    (notified,) = events(outcome.directory, "notify")
    assert (notified["kind"], notified["step"], notified["exit_code"]) == ("loss_spike", 55, 0)


@SLOW
def test_an_alert_may_stop_a_run(lab):
    spike = Mutation("poison", rank=1, portions=[55], kind="loss", value=20.0)
    with pytest.raises(RanksFailed, match="rank 1: stopped"):  # no success, for the launcher
        run(lab, "spike-stop", "on loss_spike checkpoint then stop", spike, count=60)
    directory = lab.folder / "jobs" / "spike-stop"
    assert steps(directory) == [56]
    (stop,) = events(directory, "stop")
    assert (stop["name"], stop["step"]) == ("loss_spike", 56)
    (end,) = events(directory, "run_end")
    assert (end["status"], end["exit_code"]) == ("stopped", 75)


@SLOW
def test_a_run_waits_for_a_command_at_its_end(lab):
    begun = time.time()
    outcome = run(lab, "told-at-the-end", 'on finish notify("sleep 2; exit 4")', Mutation("without", steps=[]))
    (notified,), (end,) = events(outcome.directory, "notify"), events(outcome.directory, "run_end")
    assert notified["exit_code"] == 4 and notified["time"] <= end["time"] and end["time"] - begun >= 2
    assert end["status"] == "done", "a command that fails harms nothing"
