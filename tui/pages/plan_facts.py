"""What the Plan screen knows at one instant: the plan as an outline, and all times that the run has recorded of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from xtrain.tui.model.planned import Planned, PlannedTick
from xtrain.tui.pages.node_times import (
    Due,
    StepCost,
    StepTime,
    StepTimes,
    Took,
    due,
    last_times,
    setup_times,
    step_cost,
    under_way,
)
from xtrain.tui.pages.plan_list import Outline, outline

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


@frozen(kw_only=True)
class PlanFacts:
    """Facts of the Plan screen. setup, last: node → its duration (in this start; last execution). step: node → its
    seconds in a step. now_in: node → the ranks that are running it. ended: finished optimizer steps; pace: seconds
    per step; now: seconds since 1970. ranks: their number; over: the run has ended."""

    plan: Planned
    arranged: Outline
    setup: Mapping[str, Took] = field(factory=dict)
    setup_seconds: float | None = None
    step: Mapping[str, StepTime] = field(factory=dict)
    last: Mapping[str, Took] = field(factory=dict)
    now_in: Mapping[str, tuple[int, ...]] = field(factory=dict)
    cost: StepCost = field(factory=StepCost)
    ended: int = 0
    steps: int | None = None
    pace: float | None = None
    now: float = 0.0
    ranks: int = 0
    over: bool = False

    def next_due(self, node: str) -> tuple[PlannedTick, Due] | None:
        """Return the next tick of a node and its due time; ticks with unknown times come last. None for a node without
        a tick."""
        found = [
            (tick, due(tick, self.plan, step=self.ended, pace=self.pace)) for tick in self.arranged.ticks.get(node, ())
        ]

        def far(pair: tuple[PlannedTick, Due]) -> float:
            return float("inf") if pair[1].over else 1e18 if pair[1].step is None else pair[1].step

        return min(found, key=far, default=None)

    def took(self, node: str) -> Took | None:
        """Return the duration of a set-up node or tick."""
        return self.setup.get(node) or self.last.get(node)

    def share(self, node: str) -> float | None:
        """Return a node's share of the step, or of the set-up, that it is part of."""
        if node in self.step:
            return self.step[node].share
        took = self.setup.get(node)
        if took is None or took.seconds is None:
            return None
        whole = sum(each.seconds for each in self.setup.values() if each.seconds is not None)
        return took.seconds / whole if whole else None


class PlanFactRows:
    """Cached facts of a board; expensive ones are computed again only after a change."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._arranged: tuple[Planned, Outline] | None = None
        self._last: tuple[int, Mapping[str, Took]] = (-1, {})

    def of(self, board: "Board") -> PlanFacts | None:
        """Return the facts of `board`; None without a plan."""
        plan = board.planned
        if plan is None:
            return None
        if self._arranged is None or self._arranged[0] is not plan:
            self._arranged = plan, outline(plan)
        if self._last[0] != board.events.version:
            self._last = board.events.version, last_times(board.events.entries)
        over = board.life.over
        return PlanFacts(
            plan=plan,
            arranged=self._arranged[1],
            setup=setup_times(board.run),
            setup_seconds=board.run.setup_seconds,
            step=self._times.of(board.ranks),
            last=self._last[1],
            now_in={} if over else under_way(board.ranks),
            cost=step_cost(board.series.last, plan),
            ended=board.step,
            steps=board.run.steps or plan.steps,
            pace=None if over else board.run.history.seconds_per_step,
            now=board.now,
            ranks=len(board.ranks) or plan.world_size,
            over=over,
        )
