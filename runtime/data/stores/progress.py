"""How far a token store is, for whoever waits for it: a command line, or the events of a run."""

import time
from collections.abc import Callable
from typing import Literal

from attrs import define, field, frozen

from xtrain.planner.units import bytes_text, rate_text, seconds_text

Stage = Literal["files", "tokens", "waiting"]


@frozen(kw_only=True)
class DataProgress:
    """A moment of a build.

    files: their content is hashed. tokens: it is read and tokenised. waiting: another process does that.
    """

    stage: Stage
    done: int = 0
    """Bytes of the input so far."""
    total: int | None = None
    """Bytes of the input, None if nobody knows."""
    documents: int = 0
    tokens: int = 0
    bad_records: int = 0
    resumed: int = 0
    """Bytes of the input that an earlier build had done before it was interrupted."""
    builder: str = ""
    """Who builds, while this process waits."""

    @property
    def share(self) -> float | None:
        """0 to 1; None if nobody knows."""
        return min(self.done / self.total, 1.0) if self.total else None


Report = Callable[[DataProgress], None]


@define
class ReadingPace:
    """Rates and time left, from the moments it is shown. Only what was done while it looked on counts."""

    _stage: str = ""
    _begun: float = 0.0
    _first: DataProgress | None = None
    clock: Callable[[], float] = time.monotonic
    bytes_per_second: float | None = field(default=None, init=False)
    tokens_per_second: float | None = field(default=None, init=False)
    seconds_left: float | None = field(default=None, init=False)

    def look(self, now: DataProgress) -> None:
        if self._first is None or now.stage != self._stage or now.done < self._first.done:
            self._stage, self._begun, self._first = now.stage, self.clock(), now
            self.bytes_per_second = self.tokens_per_second = self.seconds_left = None
            return
        seconds = self.clock() - self._begun
        if seconds <= 0:
            return
        self.bytes_per_second = (now.done - self._first.done) / seconds
        self.tokens_per_second = (now.tokens - self._first.tokens) / seconds
        if now.total is not None and self.bytes_per_second > 0:
            self.seconds_left = max(now.total - now.done, 0) / self.bytes_per_second


def in_words(now: DataProgress, pace: ReadingPace) -> str:
    """One line for a log: what is done, of how much, how long it will still take, and how fast it goes."""
    doing = {"files": "reading files", "tokens": "tokenising", "waiting": f"waiting for {now.builder}, which tokenises"}
    done = bytes_text(now.done)
    parts = [f"{doing[now.stage]}: {done if now.share is None else f'{now.share:.0%} of {bytes_text(now.total or 0)}'}"]
    if pace.seconds_left is not None:
        parts.append(f"{seconds_text(pace.seconds_left)} left")
    if pace.bytes_per_second:
        parts.append(rate_text(pace.bytes_per_second, "B/s"))
    if pace.tokens_per_second:
        parts.append(f"{pace.tokens_per_second:,.0f} tokens/s")
    if now.documents:
        parts.append(f"{now.documents:,} documents of {now.tokens:,} tokens")
    if now.bad_records:
        parts.append(f"{now.bad_records:,} bad records")
    return " · ".join(parts)


def every(
    seconds: float, write: Callable[[str, DataProgress], None], clock: Callable[[], float] = time.monotonic
) -> Report:
    """A report for long builds: `write` gets a line and the moment, `seconds` apart, the first time after `seconds`."""
    pace, due = ReadingPace(clock=clock), clock() + seconds

    def report(now: DataProgress) -> None:
        nonlocal due
        pace.look(now)
        if clock() >= due:
            due = clock() + seconds
            write(in_words(now, pace), now)

    return report
