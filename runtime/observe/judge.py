"""Straggler detection from heartbeats: the ranks that a run waits for, in the clock of the rank that judges."""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import define, frozen

from xtrain.records.events import StuckEvent
from xtrain.records.status import Heartbeat


@frozen
class Pace:
    """Progress of the judging rank.

    now: seconds of a clock that stops while the machine sleeps. idle: seconds without a mark. lasting: the rank is in a
    node that may take any time.
    """

    now: float
    idle: float
    lasting: bool


State = Literal["stopped", "ended", "frozen", "stuck", "unknown"]

# Shares of the limit after which a rank with an unchanged heartbeat counts as frozen. In nodes that may last, busy
# disks can delay heartbeats, so the share is larger.
FROZEN: Final = 0.5
FROZEN_LASTING: Final = 0.8
# Seconds between two readings, and the shortest time after which an unchanged heartbeat counts.
PAUSE: Final = 3.0


@define
class SeenRank:
    """Observed state of a rank. moved, line_moved: when its marks and its line last changed, by the judge's clock."""

    reading: Heartbeat | None
    moved: float
    line_moved: float
    fresh: bool = True
    """True if the line changed between the last two readings."""

    def take(self, reading: Heartbeat | None, now: float) -> None:
        """Add a reading; an unreadable line counts as unchanged."""
        old = self.reading
        self.fresh = reading is not None and (old is None or reading.alive != old.alive or reading.born != old.born)
        if reading is None:
            return
        if self.fresh:
            self.line_moved = now
        if old is None or reading.marks != old.marks or reading.born != old.born:
            self.moved = now
        self.reading = reading


@frozen
class HealthVerdict:
    """The ranks that the others wait for. `frozen`: they execute no Python any more, so they cannot exit by
    themselves."""

    ranks: tuple[int, ...]
    frozen: bool


def judge(own: int, seen: Mapping[int, SeenRank], now: float, limit: float, *, lasting: bool) -> HealthVerdict | None:
    """Return the ranks that rank `own`, idle for `limit` seconds, waits for; None: undecided.

    lasting: the rank is in a node that may take any time, so only frozen ranks are named. No rank is named while any
    other makes progress or has a debugger. An empty verdict: the run makes no progress, and the heartbeats cannot be
    read.
    """
    window = max(limit * (FROZEN_LASTING if lasting else FROZEN), PAUSE)
    others = {rank: state for rank, state in seen.items() if rank != own}
    if any(state.reading is not None and state.reading.debugger for state in seen.values()):
        return None
    if any(now - state.moved < window for state in others.values()):
        return None
    if not seen[own].fresh:  # no heartbeat can be trusted: the disk is full, or the directory is gone
        return HealthVerdict((), False) if not lasting and now - seen[own].line_moved >= window else None
    frozen = tuple(rank for rank, state in others.items() if now - state.line_moved >= window)
    if frozen:
        return HealthVerdict(frozen, True)
    if lasting or not all(state.fresh for state in others.values()):
        return None
    last = min(state.reading.progress for state in seen.values() if state.reading)
    behind = {rank: state.reading for rank, state in seen.items() if state.reading and state.reading.progress == last}
    if any(reading.lasting for reading in behind.values()):
        return None
    # Of ranks at the same point, those that wait inside torch may wait for one that does something else.
    elsewhere = {rank for rank, reading in behind.items() if not reading.place.startswith("torch/")}
    return HealthVerdict(tuple(sorted(elsewhere or behind)), False)


# the verdict in words ------------------------------------------------------------------------------------------------


def explained(event: StuckEvent) -> str:
    """Return the verdict as a sentence about the first named rank, which the event names; further ranks are added."""
    where = _where(event.step, event.node)
    waited = f"no progress for {event.seconds or 0:g} s"
    if not event.ranks:
        return f"{waited} in {where}, and the heartbeats of the ranks cannot be read: is the disk full?"
    how = {
        "stopped": "stopped, as by SIGSTOP",
        "ended": "gone",
        "frozen": "no longer executes Python",
        "stuck": "stuck",
    }[event.state]
    others = ", ".join(map(str, event.ranks[1:]))
    also = f" (and so are ranks {others})" if others else ""
    inside = f" at {event.place}" if event.place else ""
    if event.frozen:
        last = _where(event.last_step, event.last_node)
        inside = "; no heartbeat yet" if event.pid is None else "" if last == where else f"; last seen in {last}"
        where = f"the others wait in {where}"
    process = f"; process {event.pid} on {event.host}" if event.pid else ""
    return f"{how}{also}: {waited}, {where}{inside}{process}; stacks and collectives of all ranks: {event.folder}"


def _where(step: int | None, node: str | None) -> str:
    return f"step {step}, {node}" if step else str(node)


def whereabouts_of(lines: Mapping[int, Heartbeat | None]) -> str:
    """Return a line for every rank: its last reported node and place."""
    return "".join(
        f"rank {rank}: {f'{_where(line.step, line.node)} {line.place}'.rstrip() if line else 'no heartbeat'}\n"
        for rank, line in lines.items()
    )
