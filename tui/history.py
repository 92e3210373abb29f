"""What a view remembers of the logged steps: bounded, however long the run."""

from bisect import bisect_left, insort
from itertools import islice
from statistics import median

from attrs import frozen

from xtrain.records.metrics import StepMetrics

MAX_POINTS = 2000
RECENT_STEPS = 64

Point = tuple[int, float]
NOTHING = StepMetrics(step=None, time=None)


@frozen(kw_only=True)
class History:
    """The logged steps of one attempt so far."""

    last: StepMetrics = NOTHING
    """The metrics record with the highest step of those with a loss."""
    at: tuple[int, float] | None = None
    """The highest step of any record, with a loss or without, and the time of that record."""
    curve: tuple[Point, ...] = ()
    """(step, loss), finite losses only, every `stride`-th one: at most `MAX_POINTS`."""
    stride: int = 1
    num_seen: int = 0
    recent: tuple[float, ...] = ()
    """Seconds per step, by the wall clock, between each of the latest records and the one before it."""
    gap: float | None = None
    """Seconds between the latest two records: how long the next one may be expected to take."""
    origin: StepMetrics | None = None
    """The first metrics record of this attempt."""

    @property
    def step(self) -> int | None:
        return self.at[0] if self.at else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step over recent steps, so that an evaluation or a checkpoint in between has little
        effect."""
        return median(self.recent) if self.recent else self.last.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all steps of this attempt, including the time between them."""
        first, last = self.origin or NOTHING, self.last
        if None not in (first.time, last.time, first.tokens, last.tokens) and last.time > first.time:  # type: ignore[operator]
            return (last.tokens - first.tokens) / (last.time - first.time)  # type: ignore[operator]
        return last.tokens_per_second

    def points(self) -> tuple[Point, ...]:
        """Return the curve up to the latest loss, which the stride may have left out."""
        loss, step = self.last.loss, self.last.step
        if step is None or loss is None or loss - loss != 0 or (self.curve and self.curve[-1][0] >= step):
            return self.curve
        return (*self.curve, (step, loss))

    def rewound(self, step: int | None) -> "History":
        """Return the history that remains when an attempt resumes after `step` (None: from scratch), without a measured
        pace."""
        if step is None:
            return History()
        curve = tuple(point for point in self.curve if point[0] <= step)
        last = self.last if (self.last.step or 0) <= step else NOTHING
        at = self.at if self.at and self.at[0] <= step else None
        return History(last=last, at=at, curve=curve, stride=self.stride, num_seen=self.num_seen)


class HistoryRecorder:
    """Recorder that adds metrics records to a `History`; mutable, so that a million of them cost little."""

    def __init__(self, history: History) -> None:
        self._last = history.last
        self._at = history.at
        self._curve = list(history.curve)
        self._stride = history.stride
        self._num_seen = history.num_seen
        self._recent = list(history.recent)
        self._gap = history.gap
        self._origin = history.origin

    def history(self) -> History:
        """Return the history so far, as a value."""
        return History(
            last=self._last,
            at=self._at,
            curve=tuple(self._curve),
            stride=self._stride,
            num_seen=self._num_seen,
            recent=tuple(self._recent[-RECENT_STEPS:]),
            gap=self._gap,
            origin=self._origin,
        )

    def add(self, record: StepMetrics) -> None:
        """Take one record in.

        A step that is not ahead of the last one is a straggler if it is also older, and only completes the curve. If
        it is newer the run went back (it was resumed from an earlier checkpoint), and what came after it is forgotten.
        One without a loss, of a step that was left out, counts for how far the run is and how fast; it is on no curve.
        """
        step = record.step
        if step is None:
            return
        now = record.time or 0.0
        if self._at is not None:
            last_step, before = self._at
            elapsed = now - before
            if step > last_step:
                self._pace(elapsed, step - last_step)
            elif elapsed < 0:
                self._plot(step, record.loss)
                return
            else:
                self._go_back(step)
        if self._origin is None:
            self._origin = record
        self._at = step, now
        if record.loss is not None:
            self._last = record
            self._plot(step, record.loss)

    def _pace(self, elapsed: float, num_steps: int) -> None:
        # Without an origin the last record is another attempt's: the time since then was not spent training.
        if elapsed <= 0 or self._origin is None:
            return
        self._gap = elapsed
        self._recent.append(elapsed / num_steps)
        if len(self._recent) > 4 * RECENT_STEPS:
            del self._recent[:-RECENT_STEPS]

    def _go_back(self, step: int) -> None:
        del self._curve[bisect_left(self._curve, (step,)) :]
        if (self._last.step or 0) >= step:
            self._last = NOTHING
        self._recent.clear()
        self._gap = None
        self._origin = None

    def _plot(self, step: int, value: float | None) -> None:
        if value is None or value - value != 0:  # infinities and NaN have no place on a curve
            return
        self._num_seen += 1
        if (self._num_seen - 1) % self._stride:
            return
        curve = self._curve
        if not curve or step > curve[-1][0]:
            curve.append((step, value))
        elif curve[bisect_left(curve, (step,))][0] != step:  # a straggler that has not come before
            insort(curve, (step, value))
        if len(curve) > MAX_POINTS:
            self._curve = list(islice(curve, 0, None, 2))
            self._stride *= 2
