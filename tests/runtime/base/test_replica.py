"""Replica groups without torchft: which rank is whose, how rows are dealt, and whose records are written."""

import json
from pathlib import Path

import pytest
import torch
from one_rank import one_rank

from xtrain.components.stacks.torchft import BUCKET, bucket_sizes
from xtrain.components.stacks.torchft_quorum_torch import buckets_of
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.rules import validate as stack_rules
from xtrain.records.events import WarningEvent
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.base.process import GROUP, START, ReplicaGroup, group_of_rank, plan_of_group
from xtrain.runtime.base.state import Rank
from xtrain.runtime.inspect.trace import trace_plan
from xtrain.runtime.loop.preflight import check_groups
from xtrain.runtime.observe.records import Records

SPEC = """
experiment tiny { seed = 1, budget = 9 steps }
model llama { dim = 64, layers = 2, heads = 8 }
tokenizer bytes
dataset code { source = python_stdlib() }
batch { sequence = 64, micro = 2, accumulate = 3 }
optimizer adamw { lr = 1e-3 }
launch { ranks_per_node = 4 }
parallel { stack = torchft, fsdp 2, torchft { replicas = 2 } }
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(stack_rules, "is_installed", lambda package: True)
    (tmp_path / "spec.xtrain").write_text(SPEC)
    found = plan_from_spec(tmp_path / "spec.xtrain", ()).plan
    assert found is not None
    return found


def group(index: int, *, leads: bool) -> ReplicaGroup:
    return ReplicaGroup(index=index, count=2, size=2, comes_back=False, leads=leads, taking_part=(0, 1))


def rank_of(plan: Plan, number: int) -> Rank:
    """A rank of all, as its group sees it."""
    mesh, place = plan_of_group(plan).mesh, number % 2
    return one_rank(
        place,
        world_size=2,
        data_rank=mesh.data_rank(place),
        data_ranks=mesh.data_ranks,
        coordinates=mesh.coordinates(place),
        replica=group(number // 2, leads=number < 2),
    )


@pytest.mark.parametrize(("index", "start", "leads"), [("0", "0", True), ("0", "1", False), ("1", "0", False)])
def test_the_environment_says_which_group_a_rank_is_of(plan: Plan, monkeypatch, index: str, start: str, leads: bool):
    assert group_of_rank(plan) is None
    monkeypatch.setenv(GROUP, index)
    monkeypatch.setenv(START, start)
    found = group_of_rank(plan)
    assert found is not None
    assert (found.count, found.size, found.first) == (2, 2, 2 * int(index))
    assert (found.comes_back, found.leads) == (start == "1", leads)


def test_rows_are_dealt_to_the_ranks_of_all_groups(plan: Plan):
    """As the mesh of all would have it, while each group evaluates by itself."""
    ranks = [rank_of(plan, number) for number in range(4)]
    assert [rank.row_rank for rank in ranks] == [plan.mesh.data_rank(number) for number in range(4)]
    assert {(rank.row_ranks, rank.data_ranks, rank.replicas) for rank in ranks} == {(4, 2, 2)}
    assert [rank.leads for rank in ranks] == [True, False, False, False]


def test_one_group_writes_and_another_takes_over_what_is_missing(tmp_path: Path):
    """Of the records that the group which led was to write those are added that it has not written."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "ranks").mkdir()
    one, other = (Records.open(tmp_path, 2 * index, group(index, leads=index == 0)) for index in (0, 1))
    assert one.first and one.speaks and other.first and not other.speaks
    for step in range(1, 5):
        for records in (one, other):
            if records is other or step < 3:  # the first one is killed before it has written step 3
                records.log(StepMetrics(step=step, time=1.0, loss=float(step)))
                records.flush(step)
                records.event(WarningEvent(step=step, message="once"))
        one.settle()
        if step == 3:
            assert other.group is not None
            other.group.leads = True
    other.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    events = [json.loads(line)["step"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == [1, 2, 4]


def test_a_trace_has_no_groups(plan: Plan):
    with pytest.raises(PlanMismatch, match="a trace shows what stack parallel does"):
        trace_plan(plan)


def test_gradients_are_put_together_as_the_plan_counts_them():
    sizes = [3, BUCKET - 3, 1, 2 * BUCKET, 5]
    gradients = [torch.empty(size, device="meta") for size in sizes]
    assert [sum(each.numel() for each in bucket) for bucket in buckets_of(gradients)] == bucket_sizes(sizes)
    assert bucket_sizes(sizes) == [BUCKET, 1, 2 * BUCKET, 5]
    mixed = [torch.empty(2), torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)]
    assert [len(bucket) for bucket in buckets_of(mixed)] == [1, 2]


def test_no_other_launcher_starts_them(plan: Plan):
    with pytest.raises(EnvironmentFault, match="by `xtrain run` itself") as caught:
        check_groups(plan)
    assert caught.value.code == "X703"
