"""How long the ranks of a pipeline wait: the schedule simulated with the work of its stages, or, if long, a formula."""

from typing import Final

from attrs import frozen

from xtrain.planner.costs.pipeline_order import PipelineAction, order
from xtrain.planner.mesh.stages import Pipeline

LONGEST: Final = 6_000  # computations of all ranks that are simulated one by one


@frozen
class StageBackward:
    """Work of a stage's backward: gradients of what it takes, and of its weights. splits: of a schedule that splits
    backwards, whether the stage has the first part; torch does all of the first stage in the second."""

    inputs: float
    weights: float
    splits: bool


def bubble(
    schedule: str,
    pipeline: Pipeline,
    microbatches: int,
    work: list[float],
    again: list[float],
    backward: list[StageBackward] | None = None,
) -> float:
    """The share of a step in which the rank with the most work waits.

    work: of every stage's forward. again: what its backward computes a second time. backward: its other work; None:
    that of the forward for each of its parts. Messages take no time.
    Formula: (p - 1) / (v · m + p - 1) for p ranks, v stages on each and m microbatches (arXiv 2104.04473); schedules
    that split the backward leave a third of that (arXiv 2401.10241, ZB-H1), and zbv none.
    """
    ranks = len(pipeline.owners)
    if ranks == 1:
        return 0.0
    backward = backward or [StageBackward(each, each, stage > 0) for stage, each in enumerate(work)]
    if 2 * microbatches * len(pipeline.spans) > LONGEST:
        left = {"zero_bubble": 1 / 3, "zbv": 0.0}.get(schedule, 1.0)
        return waiting(ranks, len(pipeline.owners[0]) * microbatches, left)
    orders = [order(schedule, rank, ranks, own, microbatches) for rank, own in enumerate(pipeline.owners)]

    def lasts(action: PipelineAction) -> float:
        back = backward[action.stage]
        if action.kind == "F":
            return work[action.stage]
        if action.kind == "B" or not back.splits:
            return 0.0 if action.kind == "I" else back.inputs + back.weights + again[action.stage]
        return back.inputs + again[action.stage] if action.kind == "I" else back.weights

    end = _simulated(orders, len(pipeline.spans), lasts)
    busy = max(sum(map(lasts, actions)) for actions in orders)
    return 1 - busy / end


def waiting(ranks: int, turns: int, left: float = 1.0) -> float:
    """The formula. turns: microbatches times stages on a rank. left: share of the waiting that is not filled."""
    waits = (ranks - 1) * left
    return waits / (turns + waits)


def _simulated(orders: list[list[PipelineAction]], stages: int, lasts) -> float:
    """When the last rank is done, each starting as soon as it can."""
    done: dict[tuple[str, int, int], float] = {}
    clocks, places, left = [0.0] * len(orders), [0] * len(orders), sum(map(len, orders))
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                start = _ready(action, stages, done)
                if start is None:
                    break
                clocks[rank] = max(clocks[rank], start) + lasts(action)
                kind = "F" if action.kind == "F" else "W" if action.kind == "W" else "B"
                done[kind, action.stage, action.microbatch] = clocks[rank]
                places[rank] += 1
                left -= 1
        assert left < before, "the schedule waits for itself"
    return max(clocks)


def _ready(action: PipelineAction, stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """When what an action needs has been computed; None: not yet."""
    if action.kind == "F":
        return 0.0 if action.stage == 0 else done.get(("F", action.stage - 1, action.microbatch))
    if action.kind == "W" or action.stage == stages - 1:
        return done.get(("F", action.stage, action.microbatch))
    return done.get(("B", action.stage + 1, action.microbatch))
