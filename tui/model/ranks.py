"""The ranks of a run: what each reported last, and which of them hold the others up."""

from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Literal

from attrs import field, frozen

from xtrain.records.heartbeat import Heartbeat
from xtrain.records.metrics import RankMetrics

# Number of step times kept per rank.
RING = 64
# A rank is a straggler if it computes this much longer than the others, and by this multiple of their deviation.
SLOWER = 0.10
VARIATION = 5.0
# The usual deviation of a normal distribution over the median one.
_NORMAL = 1.4826

Pulse = Literal["alive", "idle", "silent", "gone", "unknown"]


@frozen(kw_only=True)
class OneRank:
    """State of one rank.

    coordinates: its position on every axis of the mesh, empty without a plan. last: the newest line of its own file,
    None without one; step: of that line. step_seconds, data_seconds, comm_seconds, memory_bytes: numbers of that line,
    None where missing. busy_seconds: the part of a step without communication, the lower quartile over the newest
    lines; None if several ranks do not report their communication time; busy_most: the upper quartile. recent: (step,
    seconds per step), oldest first, at most RING. beat: its progress line, None without one of this start. pulse:
    `alive`; `idle` (Python runs, but work makes no progress); `silent` (its line does not change); `gone` (its process
    has ended); `unknown` (no line yet). seconds_silent: time since the line last changed, by the reader's clock.
    """

    rank: int
    coordinates: Mapping[str, int] = field(factory=dict)
    machine: int | None = None
    last: RankMetrics | None = None
    step: int | None = None
    step_seconds: float | None = None
    data_seconds: float | None = None
    comm_seconds: float | None = None
    busy_seconds: float | None = None
    busy_most: float = 0.0
    memory_bytes: float | None = None
    node_seconds: Mapping[str, float] = field(factory=dict)
    recent: tuple[tuple[int, float], ...] = ()
    beat: Heartbeat | None = None
    pulse: Pulse = "unknown"
    seconds_silent: float = 0.0


@frozen(kw_only=True)
class Straggler:
    """Rank that computes longer than the others. seconds: its own time; median: of the others that do the same work;
    share: relative delay, 0.25 for a quarter."""

    rank: int
    seconds: float
    median: float
    share: float


@frozen(kw_only=True)
class Ranks:
    """All ranks of the run, by number. world_size: the planned number. seconds_old: time of one read of all their
    lines, if it is long."""

    world_size: int = 0
    all: tuple[OneRank, ...] = ()
    seconds_old: float = 0.0

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[OneRank]:
        return iter(self.all)

    def __getitem__(self, rank: int) -> OneRank:
        return self.all[rank]

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the ranks that slow the others down, slowest first; empty where ranks are not `measured`.

        All ranks take equally long for a step, as they wait for each other; they differ in the part without
        communication. Ranks with the same pipeline coordinate do the same work and are compared. A rank is slow if its
        quick steps exceed the (lower) median of its group by SLOWER of that median, and by VARIATION times the median
        deviation, so that no slow rank can hide itself. They must also exceed the slow steps of the others: transient
        load, such as other processes, makes some steps of any rank longer.
        """
        groups: dict[int, list[OneRank]] = {}
        for each in self.all:
            if each.busy_seconds is not None:
                groups.setdefault(each.coordinates.get("pp", 0), []).append(each)
        found = [slow for group in groups.values() for slow in _slow(group)]
        return tuple(sorted(found, key=lambda slow: -slow.share))

    @property
    def measured(self) -> bool:
        """True if slow ranks can be found: ranks must measure how long they wait for each other."""
        return any(each.busy_seconds is not None for each in self.all)


def _slow(group: list[OneRank]) -> Iterator[Straggler]:
    if len(group) < 2:
        return
    times = [(each.rank, each.busy_seconds or 0.0) for each in group]
    middle = median_low([seconds for _, seconds in times])
    deviation = _NORMAL * median_low([abs(seconds - middle) for _, seconds in times])
    limit = max(middle + max(SLOWER * middle, VARIATION * deviation), median_low([each.busy_most for each in group]))
    for rank, seconds in times:
        if middle > 0 and seconds > limit:
            yield Straggler(rank=rank, seconds=seconds, median=middle, share=seconds / middle - 1)
