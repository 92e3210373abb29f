"""What a run has taken of each of its datasets, against what was planned, and what it learns from each."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from xtrain.records.step_events import EvalEvent
from xtrain.tui.model.planned import PlannedPhase
from xtrain.tui.model.series import Series
from xtrain.tui.pages.node_times import step_cost

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

_LOSS, _ROWS = "loss/", "rows/"


@frozen(kw_only=True)
class DatasetFacts:
    """Facts of one dataset. rows: taken since the beginning; tokens: positions in them; of: training rows in one epoch;
    share, run_share: share of the rows of this phase, and of all; target: share planned for the phase. None:
    unknown."""

    name: str
    loss: float | None = None
    evaluation: EvalEvent | None = None
    rows: float | None = None
    tokens: float | None = None
    of: int | None = None
    share: float | None = None
    run_share: float | None = None
    target: float | None = None

    @property
    def epochs(self) -> float | None:
        """Epochs of the dataset so far."""
        return self.rows / self.of if self.of and self.rows is not None else None


@frozen(kw_only=True)
class MixtureTable:
    """Datasets of a run, trained ones first. phase, until: the current phase, and the step at which it ends; following:
    the next phase. wait_seconds: wait for rows per step; wait_share: its share of the step."""

    datasets: tuple[DatasetFacts, ...] = ()
    phase: PlannedPhase | None = None
    until: int | None = None
    following: PlannedPhase | None = None
    num_phases: int = 0
    wait_seconds: float | None = None
    wait_share: float | None = None


def several(board: "Board") -> bool:
    """Return True if a run has more than one dataset."""
    planned = board.planned
    names = set(_planned_names(planned.phases)) if planned else set()
    keys = board.series.keys
    return len(names) > 1 or sum(key.startswith(_ROWS) for key in keys) > 1


def mixture(board: "Board") -> MixtureTable:
    """Return the table of one instant."""
    series, run = board.series, board.run
    phases = board.planned.phases if board.planned else ()
    step = board.step
    place = _place_of(phases, step, series.last.phase)
    phase = phases[place] if place is not None else None
    following = phases[place + 1] if place is not None and place + 1 < len(phases) else None
    trained = _names(phases, series)
    rows = {name: series.latest(_ROWS + name) for name in trained}
    first = phase.first if phase is not None and phase.first is not None else 0
    before = {name: _rows_at(series, name, first) for name in trained}
    in_phase = {name: rows[name] - before[name] for name in trained if rows[name] is not None}  # type: ignore[operator]
    per_row = _tokens_per_row(series, rows.values())
    targets = _targets(phase, run.rows)
    facts = [
        DatasetFacts(
            name=name,
            loss=series.latest(_LOSS + name),
            evaluation=run.evaluations.get(name),
            rows=rows[name],
            tokens=None if rows[name] is None or per_row is None else rows[name] * per_row,  # type: ignore[operator]
            of=run.rows.get(name),
            share=_share(in_phase, name),
            run_share=_share({each: found for each, found in rows.items() if found is not None}, name),
            target=targets.get(name),
        )
        for name in trained
    ]
    facts += [
        DatasetFacts(name=name, evaluation=found) for name, found in run.evaluations.items() if name not in trained
    ]
    cost = step_cost(series.last, None)
    return MixtureTable(
        datasets=tuple(facts),
        phase=phase,
        until=following.first if following is not None else run.steps,
        following=following,
        num_phases=len(phases),
        wait_seconds=cost.data,
        wait_share=cost.share(cost.data),
    )


def _names(phases: Iterable[PlannedPhase], series: Series) -> tuple[str, ...]:
    """Return the trained datasets, in the order of the plan."""
    names = dict.fromkeys(_planned_names(phases))
    names |= {key.removeprefix(_ROWS): None for key in series.keys if key.startswith(_ROWS)}
    return tuple(names)


def _planned_names(phases: Iterable[PlannedPhase]) -> Iterator[str]:
    for phase in phases:
        yield from phase.passes or phase.shares


def _targets(phase: PlannedPhase | None, of: Mapping[str, int]) -> Mapping[str, float]:
    """Return the share of rows that a phase plans for each dataset; empty while the row counts behind it are
    unknown."""
    if phase is None or not phase.passes:
        return phase.shares if phase is not None else {}
    if not phase.passes.keys() <= of.keys():
        return {}
    taken = {name: epochs * of[name] for name, epochs in phase.passes.items()}
    total = math.fsum(taken.values())
    return {name: rows / total for name, rows in taken.items()} if total > 0 else {}


def _place_of(phases: tuple[PlannedPhase, ...], step: int, named: str) -> int | None:
    """Return the index of the phase of the step after `step` steps; by the recorded name if the plan has no step."""
    places = [place for place, phase in enumerate(phases) if phase.first is not None and phase.first <= step]
    by_name = [place for place, phase in enumerate(phases) if phase.first is None and phase.name == named]
    return max((*places, *by_name), default=None)


def _rows_at(series: Series, name: str, step: int) -> float:
    """Return the rows taken in the first `step` steps, interpolated for steps that were not logged."""
    x, y = series.xy(_ROWS + name)
    if step <= 0 or not len(x):
        return 0.0
    return float(np.interp(step, np.concatenate(([0.0], x)), np.concatenate(([0.0], y))))


def _share(taken: Mapping[str, float], name: str) -> float | None:
    total = math.fsum(taken.values())
    return taken[name] / total if name in taken and total > 0 else None


def _tokens_per_row(series: Series, rows: Iterable[float | None]) -> float | None:
    """Return the positions in a row: all rows of a run have equal length."""
    tokens, total = series.last.tokens, math.fsum(found for found in rows if found is not None)
    return tokens / total if tokens is not None and total > 0 else None
