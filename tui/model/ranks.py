"""The ranks of a run: what each told last of itself, and which of them hold the others up."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import field, frozen

# How many step times of a rank are remembered.
RING = 64

Pulse = Literal["alive", "idle", "silent", "gone", "unknown"]


@frozen(kw_only=True)
class Beat:
    """The line `ranks/<rank>.beat`; see docs/health.md. idle: seconds without a mark, as the rank itself says."""

    rank: int
    host: str
    pid: int
    born: int
    attempt: int
    alive: int
    time: float
    step: int
    node: str
    marks: int
    within: int
    lasting: bool
    idle: float
    place: str
    debugger: bool


@frozen(kw_only=True)
class OneRank:
    """One rank.

    coordinates: its place on every axis of the mesh, empty without a plan. last: the newest line of its own file, as
    it was written; step: of that line. step_seconds … resident_bytes: numbers of that line, None where they are
    missing. recent: (step, seconds a step), oldest first, at most RING. beat: its line of progress, None where it has
    none. pulse: `alive`; `idle` (its Python runs, but it makes no progress in work that should); `silent` (its line
    stands still); `gone` (its process is not there any more); `unknown` (no line yet). seconds_silent: how long the
    line has not moved, by the clock of whoever looks.
    """

    rank: int
    coordinates: Mapping[str, int] = field(factory=dict)
    machine: int | None = None
    last: Mapping[str, Any] = field(factory=dict)
    step: int | None = None
    step_seconds: float | None = None
    data_seconds: float | None = None
    comm_seconds: float | None = None
    memory_bytes: float | None = None
    node_seconds: Mapping[str, float] = field(factory=dict)
    recent: tuple[tuple[int, float], ...] = ()
    beat: Beat | None = None
    pulse: Pulse = "unknown"
    seconds_silent: float = 0.0


@frozen(kw_only=True)
class Straggler:
    """A rank that is slower than the others. share: of their median step time, 0.25 where it is a quarter slower."""

    rank: int
    seconds: float
    median: float
    share: float


@frozen(kw_only=True)
class Ranks:
    """All ranks of the run, by number. world_size: how many there should be."""

    world_size: int = 0
    all: tuple[OneRank, ...] = ()

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[OneRank]:
        return iter(self.all)

    def __getitem__(self, rank: int) -> OneRank:
        return self.all[rank]

    def median(self, key: str) -> float | None:
        """The median of a number (`step_seconds`, `memory_bytes`, …) over the ranks that have told it."""
        return None

    def stragglers(self) -> tuple[Straggler, ...]:
        """The ranks that are slower than the others by more than those vary, the slowest first."""
        return ()

    def not_heard_of(self) -> tuple[int, ...]:
        """The ranks whose line stands still or whose process is gone."""
        return tuple(each.rank for each in self.all if each.pulse in ("silent", "gone"))
