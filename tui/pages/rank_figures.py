"""The numbers of ranks that the Ranks screen can show: what each is, how it reads, and how much of it is much."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen
from numpy import ndarray

from xtrain.tui.model.ranks import OneRank
from xtrain.tui.pages.heat import Scale, around, between, from_zero, numbers
from xtrain.tui.words import brief, size

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board
    from xtrain.tui.model.planned import Planned

# Less than this share of the median step counts as little, whatever the other ranks have.
LITTLE = 0.05
# Ages at which progress is a level older, in seconds.
AGES = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@frozen(kw_only=True)
class Figure:
    """Figure of a rank. title: its name; says: its meaning in a sentence; of: its value, None where a rank has not sent
    it."""

    key: str
    title: str
    says: str
    of: Callable[[OneRank], float | None] = field(eq=False, repr=False)
    words: Callable[[float], str] = field(eq=False, repr=False)


def age(rank: OneRank) -> float | None:
    """Return the seconds without progress: counted by the rank itself, plus the time since its last heartbeat."""
    return None if rank.beat is None else rank.beat.idle + rank.seconds_silent


def seconds_ago(seconds: float) -> str:
    """Return an age without needless fractions: `3 s`, `2m05s`."""
    from xtrain.tui.words import duration

    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


STEP = Figure(
    key="step", title="step time", words=brief, of=lambda rank: rank.step_seconds,
    says="seconds of a step, averaged since the last record",
)  # fmt: skip
WORK = Figure(
    key="work", title="own work", words=brief, of=lambda rank: rank.busy_seconds,
    says="seconds of a step without communication, over the newest records: the others wait for the rank with the most",
)  # fmt: skip
DATA = Figure(
    key="data", title="data wait", words=brief, of=lambda rank: rank.data_seconds,
    says="seconds of a step spent waiting for rows",
)  # fmt: skip
COMMUNICATION = Figure(
    key="communication", title="communication", words=brief, of=lambda rank: rank.comm_seconds,
    says="seconds of a step spent in communication, waiting for other ranks included",
)  # fmt: skip
MEMORY = Figure(
    key="memory", title="memory", words=size, of=lambda rank: rank.memory_bytes,
    says="peak memory of a rank in bytes",
)  # fmt: skip
PROGRESS = Figure(
    key="progress", title="heartbeat", words=seconds_ago, of=age,
    says="seconds without progress: since the last mark of a rank",
)  # fmt: skip
FIGURES = (STEP, WORK, DATA, COMMUNICATION, MEMORY, PROGRESS)


def planned_memory(plan: "Planned | None", device: str) -> dict[int, int]:
    """Return the planned tensor bytes of a rank, by pipeline coordinate; empty for a CPU, where a process holds more
    than the plan counts."""
    if plan is None or device == "cpu":
        return {}
    return {found.pp: found.allocated_bytes for found in plan.classes if found.allocated_bytes}


def expected(rank: OneRank, memory: Mapping[int, int]) -> int | None:
    """Return the planned bytes of one rank, from `planned_memory`."""
    return memory.get(rank.coordinates.get("pp", 0))


@frozen(kw_only=True)
class Measured:
    """One figure of all ranks. values: NaN where unknown; against_plan: values are shares of the planned value."""

    figure: Figure
    values: ndarray = field(eq=False, repr=False)
    scale: Scale = field(eq=False, repr=False)
    against_plan: bool = False

    @property
    def median(self) -> float | None:
        known = self.values[~np.isnan(self.values)]
        return float(np.median(known)) if len(known) else None

    def words(self, value: float | None) -> str:
        return "–" if value is None or value != value else self.scale.words(value)


def measure(ranks: Sequence[OneRank], figure: Figure, memory: Mapping[int, int]) -> Measured:
    """Return the figure of every rank, with a suitable scale. memory: see `planned_memory`."""
    values = numbers([figure.of(rank) for rank in ranks])
    if figure is PROGRESS:
        return Measured(figure=figure, values=values, scale=Scale(edges=AGES, words=figure.words))
    if figure is MEMORY:
        if memory:
            shares = values / numbers([expected(rank, memory) for rank in ranks])
            scale = between(0.0, 1.0, lambda share: f"{share:.0%}")
            return Measured(figure=figure, values=shares, scale=scale, against_plan=True)
        return Measured(figure=figure, values=values, scale=around(values, figure.words))
    if figure in (DATA, COMMUNICATION):
        steps = numbers([rank.step_seconds for rank in ranks])
        known = steps[~np.isnan(steps)]
        least = LITTLE * float(np.median(known)) if len(known) else 0.0
        return Measured(figure=figure, values=values, scale=from_zero(values, figure.words, least))
    return Measured(figure=figure, values=values, scale=around(values, figure.words))


def device_of(board: "Board") -> str:
    """Return `cpu` or `cuda`, the device of the run; empty before its start record."""
    return board.run.start.device if board.run.start else ""
