"""What the Ranks screen knows at one instant."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from xtrain.tui.model.planned import PlannedAxis
from xtrain.tui.model.ranks import OneRank
from xtrain.tui.pages.node_times import StepTime, StepTimes
from xtrain.tui.pages.rank_figures import Figure, Measured, device_of, measure, planned_memory
from xtrain.tui.pages.rank_states import States, real_axes, sentences, states

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


@frozen(kw_only=True, eq=False)
class RankFacts:
    """Facts of the Ranks screen. axes, expert_axes: of the mesh, outer to inner. real: names of the axes with a size
    above 1. machines: their number. memory: planned bytes by pipeline coordinate. said: sentences, each with the
    state it is about. over: the run has ended."""

    ranks: tuple[OneRank, ...] = field(repr=False)
    states: States
    axes: tuple[PlannedAxis, ...] = ()
    expert_axes: tuple[PlannedAxis, ...] = ()
    real: tuple[str, ...] = ()
    machines: int = 1
    memory: Mapping[int, int] = field(factory=dict)
    times: Mapping[str, StepTime] = field(factory=dict, repr=False)
    said: tuple[tuple[str, int], ...] = ()
    over: bool = False
    _measured: dict[str, Measured] = field(factory=dict, init=False, repr=False)

    def figure(self, figure: Figure) -> Measured:
        """Return a figure of all ranks; computed on first use."""
        if figure.key not in self._measured:
            self._measured[figure.key] = measure(self.ranks, figure, self.memory)
        return self._measured[figure.key]

    @property
    def experts(self) -> bool:
        """True if experts use the ranks as a different mesh."""
        return any(axis.size > 1 for axis in self.expert_axes if axis.name == "ep")


class RankFactRows:
    """Cached facts of a board; node times are computed again only after a new report."""

    def __init__(self) -> None:
        self._times = StepTimes()

    def of(self, board: "Board") -> RankFacts | None:
        """Return the facts of `board`; None while no ranks are known."""
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
            said=tuple(sentences(board, found, times)),
            over=board.life.over,
        )
