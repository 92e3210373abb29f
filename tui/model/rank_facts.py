"""What the Ranks screen knows at one instant."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from .node_times import StepTime, StepTimes
from .planned import PlannedAxis
from .rank_figures import FIGURES, Figure, Measured, device_of, measure, planned_memory
from .rank_states import States, real_axes, sentences, states
from .ranks import OneRank

if TYPE_CHECKING:
    from .board import Board


@frozen(kw_only=True)
class RankFacts:
    """axes, expert_axes: of the mesh, outer to inner. real: the names of those with more than one place. memory: bytes
    that the plan expects, by pipeline coordinate. measured: every figure of all ranks. said: sentences, each with the
    state it is about. started: the run has."""

    ranks: tuple[OneRank, ...] = field(repr=False)
    axes: tuple[PlannedAxis, ...] = ()
    expert_axes: tuple[PlannedAxis, ...] = ()
    real: tuple[str, ...] = ()
    machines: int = 1
    memory: Mapping[int, int] = field(factory=dict)
    states: States
    times: Mapping[str, StepTime] = field(factory=dict, repr=False)
    measured: Mapping[str, Measured] = field(factory=dict, repr=False)
    said: tuple[tuple[str, int], ...] = ()

    def figure(self, figure: Figure) -> Measured:
        return self.measured[figure.key]

    @property
    def experts(self) -> bool:
        """Whether experts see the ranks in another way."""
        return any(axis.size > 1 for axis in self.expert_axes if axis.name == "ep")


class Facts:
    """Makes the facts of a board; node times are made again only where ranks have told new ones."""

    def __init__(self) -> None:
        self._times = StepTimes()

    def of(self, board: "Board") -> RankFacts | None:
        """None before anything is known of ranks."""
        if not len(board.ranks):
            return None
        plan, found, times = board.planned, states(board), self._times.of(board.ranks)
        machines = {rank.beat.host if rank.beat else rank.machine for rank in board.ranks}
        return RankFacts(
            ranks=tuple(board.ranks),
            axes=plan.axes if plan else (),
            expert_axes=plan.expert_axes if plan else (),
            real=real_axes(board),
            machines=len(machines),
            memory=planned_memory(plan, device_of(board)),
            states=found,
            times=times,
            measured={figure.key: measure(board, figure) for figure in FIGURES},
            said=tuple(sentences(board, found, times)),
        )
