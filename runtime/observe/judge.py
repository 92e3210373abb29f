"""Straggler detection from heartbeats: the ranks that a run waits for, in the clock of the rank that judges."""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import define, frozen

from xtrain.records.events import StuckEvent
from xtrain.records.status import Heartbeat


@frozen
class Pace:
    """now: seconds of a clock that stands still while the machine does. idle: seconds without a mark. lasting: the rank
    is in a node that may take any time."""

    now: float
    idle: float
    lasting: bool


State = Literal["stopped", "ended", "frozen", "stuck", "unknown"]

# Shares of the limit. A rank whose lines stand still for so long is frozen; where the others are in a node that may
# last, disks can be so busy that lines come late, and more is asked.
FROZEN: Final = 0.5
FROZEN_LASTING: Final = 0.8
# Seconds between two readings, and the least after which a line that has not moved says something.
PAUSE: Final = 3.0


@define
class SeenRank:
    """What is known of a rank. moved, line_moved: when its marks and its line last moved, by the own clock."""

    reading: Heartbeat | None
    moved: float
    line_moved: float
    fresh: bool = True
    """Whether the line has moved between the last two readings."""

    def take(self, reading: Heartbeat | None, now: float) -> None:
        """Another reading; a line that cannot be read has not moved."""
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
    """The ranks that the others wait for. `frozen`: they run no Python any more, so nobody else can end them."""

    ranks: tuple[int, ...]
    frozen: bool


def judge(own: int, seen: Mapping[int, SeenRank], now: float, limit: float, *, lasting: bool) -> HealthVerdict | None:
    """Who is to blame for a rank `own` whose main thread has not got on for `limit` seconds; None: nobody as yet.

    lasting: the rank is in a node that may take any time, and only waits in vain for ranks that are frozen. Nobody is
    blamed while any rank gets on, or a debugger is at one. An empty verdict: the run does not get on, and the lines of
    the ranks cannot be read.
    """
    window = max(limit * (FROZEN_LASTING if lasting else FROZEN), PAUSE)
    others = {rank: each for rank, each in seen.items() if rank != own}
    if any(each.reading is not None and each.reading.debugger for each in seen.values()):
        return None
    if any(now - each.moved < window for each in others.values()):
        return None
    if not seen[own].fresh:  # then no line says anything: the disk is full, or the directory gone
        return HealthVerdict((), False) if not lasting and now - seen[own].line_moved >= window else None
    frozen = tuple(rank for rank, each in others.items() if now - each.line_moved >= window)
    if frozen:
        return HealthVerdict(frozen, True)
    if lasting or not all(each.fresh for each in others.values()):
        return None
    last = min(each.reading.progress for each in seen.values() if each.reading)
    behind = {rank: each.reading for rank, each in seen.items() if each.reading and each.reading.progress == last}
    if any(reading.lasting for reading in behind.values()):
        return None
    # Of ranks that are equally far, those that wait inside of torch may wait for one that does something of its own.
    elsewhere = {rank for rank, reading in behind.items() if not reading.place.startswith("torch/")}
    return HealthVerdict(tuple(sorted(elsewhere or behind)), False)


# the verdict in words ------------------------------------------------------------------------------------------------


def explained(event: StuckEvent) -> str:
    """The verdict as a sentence; the first rank is named by the event, others of them here."""
    where = _where(event.step, event.node)
    waited = f"no progress for {event.seconds or 0:g} s"
    if not event.ranks:
        return f"{waited} in {where}, and the heartbeats of the ranks cannot be read: is the disk full?"
    how = {
        "stopped": "stopped, as by SIGSTOP",
        "ended": "gone",
        "frozen": "executes no Python any more",
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
    """A line for every rank: what it was in, as far as it has told."""
    return "".join(
        f"rank {rank}: {f'{_where(line.step, line.node)} {line.place}'.rstrip() if line else 'no heartbeat'}\n"
        for rank, line in lines.items()
    )
