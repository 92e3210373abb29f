"""Schedules of pipelines against torch's own, and how long ranks wait in them."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules

from xtrain.plan.pipeline import PipelineAction, gathered_stages, order, pipeline_of, stages_of_rank
from xtrain.planner.costs.estimates import bubble, waiting

LOOPED = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def theirs(schedule: str, ranks: int, turns: int, count: int) -> dict:
    """torch's schedule of every rank, lowered: what it computes, gathers and lets go."""
    own = stages_of_rank(0, ranks, turns, schedule)
    stages = [SimpleNamespace(
        stage_index=index,
        num_stages=ranks * turns,
        group_size=ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == ranks * turns - 1,
        submod=torch.nn.Identity(),
        has_backward=True,
        device=torch.device("cpu"),
        stage_index_to_group_rank={},
        group=None,
    ) for index in own]  # fmt: skip
    torch_schedule = LOOPED[schedule](stages, count)  # type: ignore[arg-type]
    return {rank: [a for a in actions if a is not None] for rank, actions in torch_schedule.pipeline_order.items()}


CASES = [
    (schedule, ranks, turns, count)
    for schedule in LOOPED
    for ranks in (2, 3, 4, 8)
    for turns in ((2,) if schedule == "zbv" else (1, 2, 3))
    for count in (ranks, 2 * ranks, 4 * ranks)
]


@pytest.mark.parametrize(("schedule", "ranks", "turns", "count"), CASES)
def test_the_order_is_torchs(schedule, ranks, turns, count):
    for rank, actions in theirs(schedule, ranks, turns, count).items():
        mine = order(schedule, rank, ranks, tuple(stages_of_rank(rank, ranks, turns, schedule)), count)
        found = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        assert [(a.kind, a.stage, a.microbatch) for a in mine] == found
        lowered = schedules._add_unshard_reshard(actions)
        events = [(event.kind, event.stage) if isinstance(event, PipelineAction) else (
            "UNSHARD" if event[1] else "RESHARD",
            event[0],
        ) for event in gathered_stages(mine)]  # fmt: skip
        last = max(place for place, a in enumerate(lowered) if a.computation_type.value in "FBIW")
        assert sorted(events) == sorted((a.computation_type.value, a.stage_index) for a in lowered[: last + 1])


def test_one_stage_on_a_rank():
    """As `Schedule1F1B._step_microbatches` and `ScheduleGPipe._step_microbatches` run; their tables are drawings."""
    assert "".join(a.kind for a in order("1f1b", 0, 4, (0,), 6)) == "FFFFBFBFBBBB"
    assert "".join(a.kind for a in order("1f1b", 3, 4, (3,), 6)) == "FBFBFBFBFBFB"
    assert "".join(a.kind for a in order("gpipe", 1, 4, (1,), 4)) == "FFFFBBBB"
    assert [a.microbatch for a in order("1f1b", 2, 4, (2,), 4)] == [0, 1, 0, 2, 1, 3, 2, 3]


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 8), (4, 8), (8, 32)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(ranks, count):
    for schedule in ("gpipe", "1f1b"):
        pipeline = pipeline_of([1] * ranks, ranks, schedule)
        found = bubble(schedule, pipeline, count, [1.0] * ranks, [0.0] * ranks)
        assert found == pytest.approx((ranks - 1) / (count + ranks - 1))
        # What is computed again lengthens every backward by the same share.
        assert bubble(schedule, pipeline, count, [1.0] * ranks, [1.0] * ranks) == pytest.approx(found)


def test_stages_that_take_turns_wait_less():
    one = bubble("1f1b", pipeline_of([1] * 8, 8, "1f1b"), 32, [1.0] * 8, [0.0] * 8)
    four = bubble("interleaved_1f1b", pipeline_of([1] * 32, 8, "interleaved_1f1b"), 32, [1.0] * 32, [0.0] * 32)
    assert one == pytest.approx(waiting(8, 32)) and four == pytest.approx(waiting(8, 4 * 32), abs=0.01)
    both = bubble("zero_bubble", pipeline_of([1] * 8, 8, "zero_bubble"), 32, [1.0] * 8, [0.0] * 8)
    assert four < one and both < one


def test_the_dearest_stage_makes_the_others_wait():
    pipeline = pipeline_of([1, 1], 2, "1f1b")
    even = bubble("1f1b", pipeline, 8, [1.0, 1.0], [0.0, 0.0])
    assert bubble("1f1b", pipeline, 8, [1.0, 3.0], [0.0, 0.0]) < even  # it is the dearest one whose waiting counts


def test_long_schedules_are_not_played():
    pipeline = pipeline_of([1] * 16, 16, "1f1b")
    assert bubble("1f1b", pipeline, 4096, [1.0] * 16, [0.0] * 16) == pytest.approx(15 / (4096 + 15))
