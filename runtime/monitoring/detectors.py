"""Signs that something is wrong with a run, each a small state that is fed with numbers the first rank has anyway.

Each says once that something is wrong, and once that it is over.
"""

from typing import Final, Literal

from attrs import define, field, frozen

from xtrain.planner.units import bytes_text, seconds_text
from xtrain.runtime.monitoring.median import RunningMedian

Kind = Literal["loss_spike", "nonfinite", "slow", "starvation", "memory", "disk", "stalled"]
State = Literal["raised", "cleared"]

# Values without which a median says nothing yet.
LEAST: Final = 50
# A loss lies high only if it does by this share of the median: of a loss that does not vary, any other would.
LEAST_SPREAD: Final = 0.002
# And by as much as that, as losses of preferences may be 0.
LEAST_RISE: Final = 1e-4
# Steps below half of the limit after which a spike is over.
CALM: Final = 10
# Steps in a row that make a run slow, or well again, and seconds that they take longer in all: a machine that is
# busy for a moment is no news.
SLOW: Final = 5
LOST_SECONDS: Final = 1.0
# Steps and their seconds, over which it is seen how long ranks wait for rows.
STARVING_STEPS: Final = 20
STARVING_SECONDS: Final = 10.0
# Shares of a limit, behind which something is well again.
BACK: Final = 0.8


@frozen
class Finding:
    """Something is wrong from now on, or is over. message: a sentence; value, limit: what was held against what."""

    kind: Kind
    state: State
    message: str
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()


@define
class LossSpikeDetector:
    """The loss of a step lies `deviations` robust standard deviations above the median of the last `window` steps.

    That is the Hampel identifier, one-sided: (loss - median) / (1.4826 · MAD), where the distance of the upper quartile
    stands in for the MAD if it is larger, as losses of small batches have a long tail above. Losses of a spike enter
    the median as well: where they stay, they are what is usual after half a window. Of a phase with another mixture
    nothing is known when it begins.
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
        """The next loss, which is finite, of a step that lies in a phase."""
        losses, found = self._losses, None
        if phase != self._phase:
            if self.raised:
                found = Finding(
                    "loss_spike", "cleared", f"loss {loss:.4g}, of another mixture since phase {phase}", loss
                )
            self._phase, self.raised = phase, False
            losses.clear()
        if len(losses) >= LEAST and (self.raised or loss > losses.median):
            found = self._judge(loss)
        losses.add(loss)
        return found

    def _judge(self, loss: float) -> Finding | None:
        median = self._losses.median
        spread = self._spread if self.raised else max(self._losses.above, LEAST_SPREAD * abs(median), LEAST_RISE)
        if not self.raised and loss - median > self.deviations * spread:  # the others need no closer look
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
class SlowDetector:
    """Steps in a row take `times` as long as the median of the last `window` steps that did not."""

    times: float
    window: int
    raised: bool = False
    _seconds: RunningMedian = field(init=False)
    _in_a_row: int = 0
    _lost: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._seconds = RunningMedian(self.window)

    def take(self, seconds: float) -> Finding | None:
        """The time of the next step."""
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
    """So large a share of the time of steps is spent waiting for data, on the rank that waits longest."""

    limit: float
    raised: bool = False
    _begun: bool = False
    _steps: int = 0
    _seconds: float = 0.0
    _waited: float = 0.0

    def take(self, steps: int, seconds: float, waited: float) -> Finding | None:
        """Some steps more, and the seconds of all of them. Those of the first record are left out: readers begin."""
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
    """The most that a rank has held is so large a share of what the plan says of that rank."""

    limit: float
    raised: bool = False

    def take(self, share: float) -> Finding | None:
        """The peak of the rank that is fullest, as a share of its plan."""
        wrong = share > self.limit
        if wrong == self.raised:
            return None
        self.raised = wrong
        message = f"a rank has used {share:.0%} of its planned memory"
        return Finding("memory", "raised" if wrong else "cleared", message, share, self.limit)


@define
class DiskDetector:
    """Less is free than a share of the file system, which asks for no more than `most_bytes`, than so many bytes, or
    than a checkpoint takes."""

    share: float | None
    free_bytes: int | None
    checkpoint_bytes: int | None
    most_bytes: int | None = None
    raised: bool = False

    def take(self, free: int, total: int) -> Finding | None:
        """Bytes that may still be written, and bytes of the file system."""
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
