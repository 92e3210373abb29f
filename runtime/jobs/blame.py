"""Documents that cause a spike: suspects by the losses of rows, and the smallest set without which it is gone."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeVar

from attrs import field, frozen

from xtrain.records.events import events_since
from xtrain.records.names import EVENTS_FILE
from xtrain.records.training_events import RowLossesEvent
from xtrain.runtime.feed.sightings import Stretch
from xtrain.runtime.jobs.replay import recorded

Measure = Literal["loss", "grad_norm"]
USUAL_STEPS: Final = 5
"""Recorded steps before the spike whose median is usual: few, because a loss falls."""
SPREAD_STEPS: Final = 20
"""Recorded steps before the spike whose differences say how much a step varies."""
LEAST_STEPS: Final = 3
_DEVIATIONS: Final = 3.0
# Of a normal distribution, the standard deviation is this many median absolute deviations.
_OF_MAD: Final = 1.4826

_T = TypeVar("_T")


@frozen(kw_only=True)
class Spike:
    """Step whose measured value is far above the values before it. value: infinite if it was not finite."""

    step: int
    measure: Measure
    value: float
    usual: float
    deviation: float
    steps: int
    """Recorded steps that `usual` is the median of."""

    @classmethod
    def of(cls, directory: Path, step: int, measure: Measure) -> "Spike | None":
        """Return the recorded value of a step, and what is usual before it; None without records of either."""
        lines = {line.step: line for line in recorded(directory) if line.step is not None and line.step <= step}
        before = [getattr(line, measure) for at, line in sorted(lines.items()) if at < step]
        before = [value for value in before if value is not None][-SPREAD_STEPS:]
        if step not in lines or len(before) < LEAST_STEPS:
            return None
        value, recent = getattr(lines[step], measure), before[-USUAL_STEPS:]
        # The difference of two independent steps varies √2 times as much as a step.
        deviation = _OF_MAD / sqrt(2) * median(abs(after - each) for each, after in pairwise(before))
        return cls(
            step=step,
            measure=measure,
            value=inf if value is None else value,
            usual=median(recent),
            deviation=deviation,
            steps=len(recent),
        )

    @property
    def is_high(self) -> bool:
        return self.value > self.usual + _DEVIATIONS * self.deviation

    @property
    def limit(self) -> float:
        """Value up to which the spike counts as gone: a quarter of its height, but not less than what is usual."""
        spread = _DEVIATIONS * self.deviation
        if self.value == inf:
            return self.usual + max(spread, abs(self.usual) / 2)
        return self.usual + max(spread, (self.value - self.usual) / 4)


@frozen(kw_only=True)
class SuspectRow:
    """Row of a step. loss: mean cross-entropy of its tokens, infinite if it is not finite; usual: the median over the
    rows of the step."""

    step: int
    dataset: str
    row: int
    documents: tuple[int, ...] = field()
    loss: float
    usual: float


def suspects(replay: Path, stretches: Sequence[Stretch], first: int, last: int) -> list[SuspectRow]:
    """Return the rows of the steps `first` to `last` of a replay with losses of rows, the one whose loss is furthest
    above the usual loss of its step first."""
    events = {event.step: event for event in events_since(replay / EVENTS_FILE, 0) if isinstance(event, RowLossesEvent)}
    rows = [
        row
        for step, event in events.items()
        if step is not None and first <= step <= last
        for stretch in stretches
        if stretch.first < step <= stretch.end
        for row in _rows(step, event, stretch)
    ]
    return sorted(rows, key=lambda row: (row.usual - row.loss, row.step, row.dataset, row.row))


def _rows(step: int, event: RowLossesEvent, stretch: Stretch) -> Iterator[SuspectRow]:
    numbers, cursors = stretch.curriculum.rows(step - 1)
    means = [
        inf if loss is None else loss / tokens if tokens else None
        for loss, tokens in zip(event.losses, event.tokens, strict=True)
    ]
    usual = median([mean for mean in means if mean is not None] or [0.0])
    for number, cursor, mean in zip(numbers.tolist(), cursors.tolist(), means, strict=True):
        if mean is None:  # without a token to learn from
            continue
        dataset = stretch.datasets[number]
        row, packed = dataset.order.row(cursor)[1], dataset.reader.rows
        held = dataset.reader.documents[packed.document[packed.row_offsets[row] : packed.row_offsets[row + 1]]]
        documents = tuple(dict.fromkeys(held.tolist()))
        yield SuspectRow(step=step, dataset=dataset.name, row=row, documents=documents, loss=mean, usual=usual)


def smallest(candidates: Sequence[_T], is_gone: Callable[[Sequence[_T]], bool]) -> list[_T]:
    """Return a smallest part of `candidates` without which the spike is gone, given that it is gone without all: no
    element of it can be left out. Suspicious ones come first.

    QuickXplain (Junker 2004, AAAI): about k · log2(n / k) questions for k of n.
    """

    def of(background: list[_T], some: Sequence[_T], *, asks: bool) -> list[_T]:
        if asks and is_gone(background):
            return []
        if len(some) <= 1:
            return [*some]
        first, rest = some[: len(some) // 2], some[len(some) // 2 :]
        of_rest = of([*background, *first], rest, asks=True)
        return [*of([*background, *of_rest], first, asks=bool(of_rest)), *of_rest]

    return of([], candidates, asks=False)
