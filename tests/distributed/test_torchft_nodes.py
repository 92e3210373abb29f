"""Replica groups on several machines: the launcher of the first one starts them, and starts them again.

The machines are launchers on this one, which share nothing but the folder and the place where they meet.
"""

import signal

import pytest
from live_runs import gone
from replicas import LIMIT, SAVES, SMALL, GroupRun, disturbed, final, hold_against_replay
from trials import Laboratory, Trial

pytestmark = pytest.mark.slow
pytest.importorskip("torchft")


@pytest.mark.parametrize(
    ("replicas", "ranks", "nodes"),
    [pytest.param(2, 1, 2, id="a group a machine"),
        pytest.param(4, 1, 2, id="two groups a machine", marks=pytest.mark.matrix),
        pytest.param(2, 2, 4, id="two machines a group")],
)  # fmt: skip
def test_it_trains_as_one_process_does(lab: Laboratory, replicas: int, ranks: int, nodes: int):
    trial, name = Trial(settings=SMALL), f"tft_nodes_{replicas}_{ranks}_{nodes}"
    ours = GroupRun.start(lab, trial, name, replicas=replicas, ranks=ranks, nodes=nodes)
    ours.end()
    assert ours.taking_part() == [list(range(replicas))] * trial.steps
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_a_rank_of_another_machine_dies(lab: Laboratory):
    name = "tft_nodes_rank"
    ours = GroupRun.start(lab, disturbed(60), name, nodes=2, slow=0.15)
    ours.wait(lambda: ours.step() >= 4)
    ours.kill(1)
    ours.end()
    hold_against_replay(ours, name)
    assert [(each["group"], each["state"]) for each in ours.events("replica_group")] == [(1, "ended"), (1, "started")]
    assert [0] in ours.taking_part() and ours.taking_part()[-1] == [0, 1]


def test_a_machine_dies_and_comes_back(lab: Laboratory):
    """Its ranks end with its launcher; another launcher of the same machine starts them again."""
    name = "tft_nodes_machine"
    ours = GroupRun.start(lab, disturbed(120), name, nodes=2, slow=0.15)
    ours.wait(lambda: ours.step() >= 4)
    ours.others[0].kill()
    ours.wait(lambda: bool(ours.events("replicas")[-1]["left"]))
    ours.come_back(1)
    ours.end()
    hold_against_replay(ours, name)
    assert [each["left"] for each in ours.events("replicas")] == [[], [1], []]
    assert ours.events("replica_group")[0]["reason"] == "rank 1 is gone with node 1"


def test_a_machine_dies_and_stays_away(lab: Laboratory):
    name = "tft_nodes_away"
    ours = GroupRun.start(lab, disturbed(24), name, nodes=2, slow=0.1)
    ours.wait(lambda: ours.step() >= 4)
    ours.others.pop().kill()
    ours.end()
    hold_against_replay(ours, name)
    assert ours.taking_part()[-1] == [0]


@pytest.mark.parametrize("node", [0, 1])
def test_it_is_stopped_on_any_machine_and_goes_on(lab: Laboratory, node: int):
    trial, name = disturbed(24, SAVES), f"tft_nodes_stopped_{node}"
    ours = GroupRun.start(lab, trial, name, nodes=2, slow=0.1)
    ours.wait(lambda: ours.step() >= 6)
    (ours.process, *ours.others)[node].send_signal(signal.SIGTERM)
    ours.end(75)
    assert gone(ours.directory, 5) and final(ours.directory).name == f"ckpt-s{ours.step():012d}"
    GroupRun.start(lab, trial, name, nodes=2).end()
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_the_first_machine_dies(lab: Laboratory):
    """Those of the others save what they can, and leave: nothing would start them again."""
    trial, name = disturbed(40, SAVES), "tft_nodes_first"
    ours = GroupRun.start(lab, trial, name, nodes=2, slow=0.1)
    ours.wait(lambda: ours.step() >= 6)
    ours.process.kill()
    assert ours.others[0].wait(60) == 3
    assert "cannot reach the first node" in ours.others[0].communicate(5)[1]
    assert gone(ours.directory, 5)
    GroupRun.start(lab, trial, name, nodes=2).end()
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)


def test_all_groups_die_and_are_started_again(lab: Laboratory):
    """From the last checkpoint, on machines that have stayed."""
    trial, name = disturbed(14, SAVES), "tft_nodes_all"
    ours = GroupRun.start(lab, trial, name, nodes=2, sets=("fault_tolerance.restarts=1",), slow=0.15)
    ours.wait(lambda: ours.step() >= 6)
    ours.kill(1)
    ours.kill(0)
    ours.end()
    assert [each["step"] for each in ours.events("restart")] == [4]
    ours.hold_against(lab.run(trial, (), alone=True), LIMIT)
