"""`stalled`: nothing gets on, and who the others wait for, told long before the run is given up because of it."""

from pathlib import Path
from typing import Final

from attrs import define, field

from xtrain.records.heartbeat import Heartbeat, read_heartbeat
from xtrain.records.paths import heartbeat_path
from xtrain.runtime.monitoring.detectors import Finding
from xtrain.runtime.monitoring.judge import PAUSE, HealthVerdict, SeenRank, judge
from xtrain.runtime.monitoring.pace import Pace

# Shares of the limit: ranks that have stood still so long are looked at; and how often, as two readings are compared.
LOOK: Final = 0.3
OFTEN: Final = 0.1


@define(eq=False)
class Stalled:
    """Seen by every rank, told by one: the first whose line moves. limit: seconds without progress. world, before: the
    ranks that wait for each other, and those of other replica groups before them."""

    rank: int
    world: int
    directory: Path
    limit: float
    before: int = 0
    raised: bool = False
    _seen: dict[int, SeenRank] = field(factory=dict)
    _looked: float = float("-inf")

    def look(self, own: Pace) -> Finding | None:
        """Called about once a second, beside training."""
        if own.idle < LOOK * self.limit:
            self._seen.clear()
            return self._over()
        if self.raised or own.now - self._looked < max(PAUSE, OFTEN * self.limit):
            return None
        self._looked = own.now
        if not self._read(own.now) or own.idle < self.limit:
            return None
        verdict = judge(self.rank, self._seen, own.now, self.limit, lasting=own.lasting)
        if verdict is None or not verdict.ranks or not self._reports(verdict):
            return None
        self.raised = True
        return self._finding(verdict, own.idle)

    def _over(self) -> Finding | None:
        if not self.raised:
            return None
        self.raised = False
        return Finding("stalled", "cleared", "all ranks make progress again")

    def _read(self, now: float) -> bool:
        """Read the lines of all. Whether it is this rank's turn to: one before it whose line moves will do so."""
        for rank in range(self.before, self.rank):
            self._take(rank, now)
            if self._seen[rank].fresh and self._seen[rank].reading is not None:
                return False
        for rank in range(self.rank, self.before + self.world):
            self._take(rank, now)
        return True

    def _take(self, rank: int, now: float) -> None:
        reading = read_heartbeat(heartbeat_path(self.directory, rank))
        if rank in self._seen:
            self._seen[rank].take(reading, now)
        else:
            self._seen[rank] = SeenRank(reading, now, now)

    def _reports(self, verdict: HealthVerdict) -> bool:
        """Whether all before this rank are among those that cannot."""
        return (
            all(rank in verdict.ranks for rank in range(self.before, self.rank))
            if verdict.frozen
            else self.rank == self.before
        )

    def _finding(self, verdict: HealthVerdict, idle: float) -> Finding:
        first, own = self._seen[verdict.ranks[0]].reading, self._seen[self.rank].reading
        shown = ", ".join(map(str, verdict.ranks[:8])) + (", …" if len(verdict.ranks) > 8 else "")
        ranks = f"rank{'s' if len(verdict.ranks) > 1 else ''} {shown}"
        how = f"got stuck in {_where(first)}"
        if verdict.frozen:  # what it told last is up to a second old: where the others wait for it is certain
            how = f"without a heartbeat; the other ranks wait in {_where(own)}"
            how += f"; last seen in {_where(first)}" if first is not None and _where(first) != _where(own) else ""
        process = f"; process {first.pid} on {first.host}" if first is not None else ""
        message = f"no progress for {idle:.0f} s: {ranks} {how}{process}"
        return Finding("stalled", "raised", message, round(idle, 1), self.limit, verdict.ranks)


def _where(reading: Heartbeat | None) -> str:
    """`step 12, step.fetch at data/feed.py:80 next`."""
    if reading is None:
        return "an unknown node"
    step = f"step {reading.step}, " if reading.step else ""
    place = f" at {reading.place}" if reading.place and not reading.place.startswith("torch/") else ""
    return f"{step}{reading.node}{place}"
