"""Replica groups of torchft train as one process does, and while one is away as one process does without its rows."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from live_runs import gone
from projects import records
from replicas import LIMIT, SAVES, SMALL, GroupRun, disturbed, final, hold_against_replay
from trials import TOLERANCE, Laboratory, Trial

pytestmark = pytest.mark.slow
pytest.importorskip("torchft")

matrix = pytest.mark.matrix
OWN_GROUP = ("parallel.torchft.process_group=baby_gloo", "parallel.torchft.timeout=20 s")


@pytest.mark.parametrize(
    ("replicas", "ranks", "data_ranks", "sets", "params"),
    [pytest.param(2, 1, 1, (), "fp64", id="2"), pytest.param(2, 2, 2, (), "fp64", id="2 of fsdp 2"),
        pytest.param(2, 2, 1, ("parallel.tp=2",), "fp64", id="2 of tp 2", marks=matrix),
        pytest.param(4, 1, 1, (), "fp64", id="4", marks=matrix),
        pytest.param(2, 1, 1, OWN_GROUP, "fp64", id="2 through a process of their own", marks=matrix),
        pytest.param(2, 1, 1, (), "fp32", id="2 in fp32", marks=matrix)],
)  # fmt: skip
def test_it_trains_as_one_process_does(lab: Laboratory, request, replicas, ranks, data_ranks, sets, params):
    trial, name = Trial(params=params, settings=SMALL), f"tft_{request.node.callspec.id.replace(' ', '_')}"
    ours = GroupRun.start(lab, trial, name, replicas=replicas, ranks=ranks, data_ranks=data_ranks, sets=sets)
    ours.end()
    assert ours.taking_part() == [list(range(replicas))] * trial.steps
    ours.hold_against(lab.run(trial, (), alone=True), TOLERANCE[params])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=matrix) for seed in (2, 3, 4, 5))])
def test_a_group_dies_and_comes_back(lab: Laboratory, seed: int):
    """At a random moment a random rank is killed; the other group goes on in the same processes."""
    draw, name = random.Random(seed), f"tft_dies_{seed}"
    ranks = 2 if seed % 2 else 1
    ours = GroupRun.start(lab, disturbed(60), name, ranks=ranks, slow=0.15)
    ours.wait(lambda: ours.step() >= draw.randrange(2, 12))
    time.sleep(draw.random() * 0.3)
    victim = draw.randrange(2 * ranks)
    others = [ours.pid(rank) for rank in range(2 * ranks) if rank // ranks != victim // ranks]
    ours.kill(victim)
    ours.end()
    hold_against_replay(ours, name)
    assert others == [ours.pid(rank) for rank in range(2 * ranks) if rank // ranks != victim // ranks]
    own = victim // ranks
    assert [(each["group"], each["state"]) for each in ours.events("replica_group")] == [
        (own, "ended"),
        (own, "started"),
    ]
    told = [(each["joined"], each["left"]) for each in ours.events("replicas")]
    assert told == [([0, 1], []), ([], [own]), ([own], [])]
    assert ours.taking_part()[-1] == [0, 1]


@pytest.mark.parametrize(
    "place",
    ["step.torchft.quorum", "step.agree", "step.forward_backward", "in_sums", "step.torchft.sum", "step.optimizer",
        "step.measure", "tick.log"],
)  # fmt: skip
@pytest.mark.parametrize("group", [0, pytest.param(1, marks=matrix)])
def test_it_dies_anywhere_in_a_step(lab: Laboratory, group: int, place: str):
    """Of three groups; a step that one has ended and others have not is a step all have taken."""
    name = f"tft_{place}_{group}"
    trial, dies = Trial(settings=SMALL, rows=12, steps=12), (f"{group}:0:0:5:{place}",)
    ours = GroupRun.start(lab, trial, name, replicas=3, dies=dies, slow=0.1, returns=2.0)
    ours.end()
    hold_against_replay(ours, name)
    took = ours.taking_part()
    assert took[3] == [0, 1, 2] and took[5] == [each for each in (0, 1, 2) if each != group]


def test_two_of_three_die(lab: Laboratory):
    trial, name = Trial(settings=SMALL, rows=12, steps=50), "tft_two_of_three"
    ours = GroupRun.start(lab, trial, name, replicas=3, slow=0.2)
    ours.wait(lambda: ours.step() >= 4)
    ours.kill(0)
    ours.kill(2)
    ours.end()
    hold_against_replay(ours, name)
    took = ours.taking_part()
    assert [1] in took and took[-1] == [0, 1, 2]


def test_too_few_wait(lab: Laboratory):
    """With as many groups as a step needs nothing is lost: the curve is that of an undisturbed run."""
    trial, name = disturbed(16), "tft_too_few"
    ours = GroupRun.start(lab, trial, name, sets=("parallel.torchft.min=2",), dies=("0:0:0:5:step.agree",), slow=0.05)
    ours.end()
    assert ours.taking_part() == [[0, 1]] * 16
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_the_lighthouse_dies(lab: Laboratory):
    trial, name = disturbed(40), "tft_lighthouse"
    ours = GroupRun.start(lab, trial, name, slow=0.1)
    ours.wait(lambda: ours.step() >= 5)
    (lighthouse,) = meeting_places(ours)
    os.kill(lighthouse, signal.SIGKILL)
    ours.end()
    assert ours.taking_part() == [[0, 1]] * 40 and not ours.events("replica_group")
    hold_against_replay(ours, name)


def stopped(ours: GroupRun, number: int, code: int) -> None:
    """Asked to stop by a signal to the launcher, it saves and leaves."""
    ours.process.send_signal(number)
    ours.end(code)
    assert gone(ours.directory, 5) and not meeting_places(ours)


def test_it_is_stopped_and_goes_on(lab: Laboratory):
    """Bit for bit as it would have; under another stack, and from there, up to rounding."""
    trial, name = disturbed(24, SAVES), "tft_stopped"
    whole = GroupRun.start(lab, trial, f"{name}_whole")
    whole.end()
    ours = GroupRun.start(lab, trial, name, slow=0.1)
    ours.wait(lambda: ours.step() >= 6)
    stopped(ours, signal.SIGTERM, 75)
    step = ours.step()
    (end,) = ours.events("run_end")
    assert end["status"] == "stopped" and final(ours.directory).name == f"ckpt-s{step:012d}" and step < 24
    GroupRun.start(lab, trial, name).end()
    ours.hold_against(whole.directory, 0.0)
    assert ours.taking_part() == [[0, 1]] * 24


@pytest.mark.parametrize("stacks", [("torchft", "parallel"), ("parallel", "torchft")])
def test_its_checkpoints_go_on_under_other_stacks(lab: Laboratory, stacks: tuple[str, str]):
    trial, name = disturbed(8, SAVES), f"tft_to_{stacks[1]}"
    for stack, more in zip(stacks, (("launch.stop_after=4 steps",), ()), strict=True):
        ours = GroupRun.start(lab, trial, name, sets=(f"parallel.stack={stack}", *more))
        ours.end(75 if more else 0)
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT, first=5)


def test_it_is_interrupted(lab: Laboratory):
    ours = GroupRun.start(lab, disturbed(200, SAVES), "tft_interrupted", slow=0.1)
    ours.wait(lambda: ours.step() >= 3)
    stopped(ours, signal.SIGINT, 130)
    assert final(ours.directory).name == f"ckpt-s{ours.step():012d}"


def test_it_is_told_to_stop(lab: Laboratory):
    """By a command, which the group that leads hears; it is one that has come back."""
    ours = GroupRun.start(lab, disturbed(200, SAVES), "tft_told", slow=0.2, sets=("parallel.torchft.min=2",))
    ours.wait(lambda: ours.step() >= 3)
    ours.kill(0)
    ours.wait(lambda: len(ours.events("replica_group")) == 2)
    step = ours.step()
    ours.wait(lambda: ours.step() > step)  # it is back, as a step needs both
    folder = ours.directory / "control"
    folder.mkdir(exist_ok=True)
    (folder / "x.tmp").write_text(json.dumps({"command": "stop", "time": time.time()}))
    (folder / "x.tmp").rename(folder / "x.json")
    ours.end(75)
    assert [each["state"] for each in ours.events("control")] == ["accepted", "done"]
    assert final(ours.directory).name == f"ckpt-s{ours.step():012d}" and gone(ours.directory, 5)


def test_the_launcher_dies(lab: Laboratory):
    """Its ranks save and leave without it, and without the lighthouse, which ends with it as well."""
    trial, name = disturbed(24, SAVES), "tft_launcher"
    ours = GroupRun.start(lab, trial, name, slow=0.1)
    ours.wait(lambda: ours.step() >= 6)
    ours.process.kill()
    assert gone(ours.directory, 60)
    assert final(ours.directory).name == f"ckpt-s{ours.step():012d}"
    GroupRun.start(lab, trial, name).end()
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


@pytest.mark.parametrize("restarts", [0, 1])
def test_all_groups_die(lab: Laboratory, restarts: int):
    """Then nothing is left to go on from but a checkpoint: `restarts` says whether that is done at once."""
    trial, name = disturbed(14, SAVES), f"tft_all_die_{restarts}"
    dies = ("0:0:0:7:step.agree", "1:0:0:7:step.agree")
    # A second start of the run is start 0 of its groups as well, and would die again.
    ours = GroupRun.start(lab, trial, name, sets=(f"fault_tolerance.restarts={restarts}",), dies=dies, slow=0.05)
    ours.end(1)
    assert [each["step"] for each in ours.events("restart")] == [4] * restarts
    assert gone(ours.directory, 5)
    GroupRun.start(lab, trial, name).end()
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_a_group_that_stands_still_is_ended(lab: Laboratory):
    """Stopped, it runs nothing that could end it: the launcher does, and starts it again."""
    ours = GroupRun.start(lab, disturbed(60), "tft_frozen", slow=0.2, sets=("fault_tolerance.stuck=4 s",))
    ours.wait(lambda: ours.step() >= 4)
    ours.kill(1, signal.SIGSTOP)
    ours.end()
    hold_against_replay(ours, "tft_frozen")
    assert [each["left"] for each in ours.events("replicas")] == [[], [1], []]


def test_a_stop_while_too_few_are_there(lab: Laboratory):
    """Without a quorum the groups that are left save what they have."""
    trial, name = disturbed(24, SAVES), "tft_stopped_waiting"
    ours = GroupRun.start(lab, trial, name, sets=("parallel.torchft.min=2",), slow=0.1)
    ours.wait(lambda: ours.step() >= 6)
    ours.kill(0)
    ours.wait(lambda: bool(ours.events("replica_group")))
    step = ours.step()
    stopped(ours, signal.SIGTERM, 75)
    assert final(ours.directory).name == f"ckpt-s{ours.step():012d}" and step <= ours.step() <= step + 1
    GroupRun.start(lab, trial, name).end()
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_datasets_are_told_apart(lab: Laboratory):
    """The loss of each dataset is that of the rows that took part."""
    more = 'dataset others { source = jsonl("data.jsonl"), holdout = 20% }\nmixture { lines = 1, others = 1 }'
    trial, name = disturbed(12, more), "tft_datasets"
    ours = GroupRun.start(lab, trial, name, dies=("1:0:0:4:step.agree",), slow=0.05)
    ours.end()
    other = ours.replayed(f"{name}_replayed").directory
    names = ("loss/lines", "loss/others", "valid_tokens/lines", "valid_tokens/others")
    assert {*names} <= {key for record in records(other, "metrics") for key in record}
    for mine, theirs in zip(records(ours.directory, "metrics"), records(other, "metrics"), strict=True):
        for key in names:
            assert mine.get(key) == pytest.approx(theirs.get(key), rel=LIMIT), (mine["step"], key)


def meeting_places(run: GroupRun) -> list[int]:
    """Lighthouses that the launcher has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[3:5] == [b"xtrain.runtime.jobs.meeting_place", str(run.process.pid).encode()]:
                found.append(int(process.name))
    return found
