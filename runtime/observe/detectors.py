"""Detectors of alerts: loss spikes, slow steps, starvation, memory, disk, and a run that makes no progress.

Each detector keeps a small state and takes numbers that the first rank has anyway.
"""

from bisect import bisect_left, insort
from collections import deque
from pathlib import Path
from typing import Final, Literal

from attrs import define, field, frozen

from xtrain.records.names import heartbeat_path
from xtrain.records.status import Heartbeat, read_heartbeat
from xtrain.runtime.observe.judge import PAUSE, HealthVerdict, Pace, SeenRank, judge
from xtrain.text.units import bytes_text, plural, seconds_text

# For normally distributed values, the ratio of the standard deviation to the median absolute deviation (Hampel 1974,
# "The influence curve and its role in robust estimation"; 1 / Φ⁻¹(3/4)).
NORMAL: Final = 1.4826


@define
class RunningMedian:
    """Median of the latest `size` values. Adding one moves some dozens of numbers; only the deviation reads half of
    them."""

    size: int
    _order: deque[float] = field(factory=deque)
    _sorted: list[float] = field(factory=list)

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        """Add a finite value and drop the oldest one if there are too many."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self.size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        self._order.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        """Median; the mean of the two middle values if their number is even. Needs at least one value."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    @property
    def above(self) -> float:
        """Distance of the upper quartile from the median, scaled like `deviation`.

        It is the larger of the two for a distribution with a longer upper tail, as losses of small batches have.
        """
        return NORMAL * (self._sorted[3 * len(self._sorted) // 4] - self.median)

    @property
    def deviation(self) -> float:
        """Median absolute deviation, scaled to the standard deviation of normally distributed values.

        The upper of the two middle values if their number is even. Needs at least one value.
        """
        values, median = self._sorted, self.median
        right = bisect_left(values, median)
        left, away = right - 1, 0.0
        # From the median outwards on both sides, the nearest values first.
        for _ in range(len(values) // 2 + 1):
            below = median - values[left] if left >= 0 else float("inf")
            above = values[right] - median if right < len(values) else float("inf")
            if below < above:
                away, left = below, left - 1
            else:
                away, right = above, right + 1
        return NORMAL * away


Kind = Literal["loss_spike", "loss_above", "nonfinite", "slow", "starvation", "memory", "disk", "stalled"]
State = Literal["raised", "cleared"]

# Values that a median needs to mean something.
LEAST: Final = 50
# Least spread of losses as a share of the median: otherwise any change of a constant loss would be a spike.
LEAST_SPREAD: Final = 0.002
# Least spread in absolute terms, as losses of preferences may be 0.
LEAST_RISE: Final = 1e-4
# Steps below half of the limit after which a spike is over.
CALM: Final = 10
# Steps in a row that make a run slow, or normal again, and the seconds that they must lose in total: a machine that is
# busy for a moment is not worth an alert.
SLOW: Final = 5
LOST_SECONDS: Final = 1.0
# Steps and seconds over which the waiting time for rows is measured.
STARVING_STEPS: Final = 20
STARVING_SECONDS: Final = 10.0
# Share of a limit below which an alert is cleared.
BACK: Final = 0.8


@frozen
class Finding:
    """A condition that begins or is over. message: a sentence; value, limit: the measured value and its limit."""

    kind: Kind
    state: State
    message: str
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()


@define
class LossSpikeDetector:
    """Detector of a loss `deviations` robust standard deviations above the median of the last `window` steps.

    This is the one-sided Hampel identifier, (loss - median) / (1.4826 · MAD), with the distance of the upper quartile
    instead of the MAD if it is larger, as losses of small batches have a long upper tail. Losses of a spike enter the
    median as well: if they stay high, they are usual after half a window. A phase with another mixture starts without
    history.
    """

    deviations: float
    window: int
    raised: bool = False
    _losses: RunningMedian = field(init=False)
    _phase: str = ""
    _calm: int = 0
    _before: float = 0.0
    _spread: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._losses = RunningMedian(self.window)

    def take(self, loss: float, phase: str) -> Finding | None:
        """Add the finite loss of the next step, which is in `phase`."""
        losses, finding = self._losses, None
        if phase != self._phase:
            if self.raised:
                finding = Finding(
                    "loss_spike", "cleared", f"loss {loss:.4g}, of another mixture since phase {phase}", loss
                )
            self._phase, self.raised = phase, False
            losses.clear()
        if len(losses) >= LEAST and (self.raised or loss > losses.median):
            finding = self._judge(loss)
        losses.add(loss)
        return finding

    def _judge(self, loss: float) -> Finding | None:
        median = self._losses.median
        spread = self._spread if self.raised else max(self._losses.above, LEAST_SPREAD * abs(median), LEAST_RISE)
        if not self.raised and loss - median > self.deviations * spread:  # otherwise the exact deviation is not needed
            spread = max(spread, self._losses.deviation)
        height, limit = (loss - median) / spread, median + self.deviations * spread
        if not self.raised:
            if height <= self.deviations:
                return None
            self.raised, self._calm, self._before, self._spread = True, 0, median, spread
            usual = f"the median of the last {len(self._losses)} steps, {median:.4g}"
            message = f"loss {loss:.4g} is {height:.1f} standard deviations above {usual}"
            return Finding("loss_spike", "raised", message, loss, limit)
        self._calm = self._calm + 1 if height <= self.deviations / 2 else 0
        if self._calm < CALM:
            return None
        self.raised = False
        message = (
            f"loss {loss:.4g}, for {CALM} steps near its median of {median:.4g}; before the spike {self._before:.4g}"
        )
        return Finding("loss_spike", "cleared", message, loss, limit)


@define
class HighLossDetector:
    """Detector of `steps` losses in a row above `limit`; cleared by as many at or below it."""

    limit: float
    steps: int
    raised: bool = False
    _count: int = 0

    def take(self, loss: float) -> Finding | None:
        """Add the finite loss of the next step."""
        self._count = self._count + 1 if (loss > self.limit) != self.raised else 0
        if self._count < self.steps:
            return None
        self.raised, self._count = not self.raised, 0
        state, where = ("raised", "above") if self.raised else ("cleared", "not above")
        message = f"loss {loss:.4g}, for {plural(self.steps, 'step')} {where} {self.limit:g}"
        return Finding("loss_above", state, message, loss, self.limit)


@define
class SlowDetector:
    """Detector of steps in a row that take `times` as long as the median of the last `window` normal steps."""

    times: float
    window: int
    raised: bool = False
    _seconds: RunningMedian = field(init=False)
    _in_a_row: int = 0
    _lost: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._seconds = RunningMedian(self.window)

    def take(self, seconds: float) -> Finding | None:
        """Add the time of the next step."""
        usual = self._seconds.median if len(self._seconds) >= LEAST else seconds
        limit = self.times * usual
        slow = seconds > limit
        if not slow:
            self._seconds.add(seconds)
        if slow == self.raised:
            self._in_a_row, self._lost = 0, 0.0
            return None
        self._in_a_row += 1
        self._lost += seconds - usual
        if self._in_a_row < SLOW or (slow and self._lost < LOST_SECONDS):
            return None
        self.raised, count = slow, self._in_a_row
        self._in_a_row, self._lost = 0, 0.0
        took = f"{count} steps in a row took {'more' if slow else 'no more'} than {self.times:g} times the usual"
        message = f"{took} {seconds_text(usual)}, the last one {seconds_text(seconds)}"
        return Finding("slow", "raised" if slow else "cleared", message, seconds, limit)


@define
class StarvationDetector:
    """Detector of a share of step time spent waiting for data, on the rank that waits longest."""

    limit: float
    raised: bool = False
    _begun: bool = False
    _steps: int = 0
    _seconds: float = 0.0
    _waited: float = 0.0

    def take(self, steps: int, seconds: float, waited: float) -> Finding | None:
        """Add steps with their total seconds and waiting time. The first record is left out, because readers are
        starting."""
        if not self._begun:
            self._begun = True
            return None
        self._steps += steps
        self._seconds += seconds
        self._waited += waited
        if self._steps < STARVING_STEPS or self._seconds < STARVING_SECONDS:
            return None
        share, steps = self._waited / self._seconds, self._steps
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        wrong = share >= (BACK if self.raised else 1.0) * self.limit
        if wrong == self.raised:
            return None
        self.raised = wrong
        message = f"{share:.0%} of the last {steps} steps spent waiting for data, on the rank that waits longest"
        return Finding("starvation", "raised" if wrong else "cleared", message, share, self.limit)


@define
class MemoryDetector:
    """Detector of a rank whose peak memory is too large a share of its planned memory."""

    limit: float
    raised: bool = False

    def take(self, share: float) -> Finding | None:
        """Add the largest peak of any rank, as a share of its planned memory."""
        wrong = share > self.limit
        if wrong == self.raised:
            return None
        self.raised = wrong
        message = f"a rank has used {share:.0%} of its planned memory"
        return Finding("memory", "raised" if wrong else "cleared", message, share, self.limit)


@define
class DiskDetector:
    """Detector of low disk space.

    The limit is the largest of a share of the file system (at most `most_bytes`), `free_bytes`, and the size of a
    checkpoint.
    """

    share: float | None
    free_bytes: int | None
    checkpoint_bytes: int | None
    most_bytes: int | None = None
    raised: bool = False

    def take(self, free: int, total: int) -> Finding | None:
        """Add the bytes that may still be written, and the bytes of the file system."""
        share = (self.share or 0.0) * total
        if self.most_bytes is not None:
            share = min(share, self.most_bytes)
        limit = max(share, self.free_bytes or 0, self.checkpoint_bytes or 0)
        wrong = free < limit / (BACK if self.raised else 1.0)
        if wrong == self.raised:
            return None
        self.raised = wrong
        message = f"{bytes_text(free)} of {bytes_text(total)} are free on the file system of the run"
        if wrong and self.checkpoint_bytes and free < self.checkpoint_bytes:
            message += f": the next checkpoint, {bytes_text(self.checkpoint_bytes)}, does not fit"
        return Finding("disk", "raised" if wrong else "cleared", message, float(free), float(limit))


# Shares of the limit: idle time after which ranks are read, and the interval between two readings.
LOOK: Final = 0.3
OFTEN: Final = 0.1


@define(eq=False)
class Stalled:
    """Detector of a stall. Every rank runs it, and the first rank whose heartbeat moves reports it.

    limit: seconds without progress. world: number of ranks that wait for each other. before: number of ranks in earlier
    replica groups.
    """

    rank: int
    world: int
    directory: Path
    limit: float
    before: int = 0
    raised: bool = False
    _seen: dict[int, SeenRank] = field(factory=dict)
    _looked: float = float("-inf")

    def look(self, own: Pace) -> Finding | None:
        """Judge the ranks; called about once a second, next to training."""
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
        """Read the heartbeats of all ranks; return False if an earlier rank has a moving heartbeat and reports
        instead."""
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
        """Return True if all earlier ranks are frozen, so that this rank has to report."""
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
        # Its last heartbeat is up to a second old, while the place where the others wait is certain.
        if verdict.frozen:
            how = f"without a heartbeat; the other ranks wait in {_where(own)}"
            how += f"; last seen in {_where(first)}" if first is not None and _where(first) != _where(own) else ""
        process = f"; process {first.pid} on {first.host}" if first is not None else ""
        message = f"no progress for {idle:.0f} s: {ranks} {how}{process}"
        return Finding("stalled", "raised", message, round(idle, 1), self.limit, verdict.ranks)


def _where(reading: Heartbeat | None) -> str:
    """Return step, node and place: `step 12, step.fetch at data/feed.py:80 next`."""
    if reading is None:
        return "an unknown node"
    step = f"step {reading.step}, " if reading.step else ""
    place = f" at {reading.place}" if reading.place and not reading.place.startswith("torch/") else ""
    return f"{step}{reading.node}{place}"
