"""Datasets of a run compared with the planned mixture, and the Datasets screen as rows."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from attrs import frozen

from xtrain.records.training_events import EvalEvent
from xtrain.text.units import brief, count, decimal, plural
from xtrain.tui.model.board import Board
from xtrain.tui.model.planned import PlannedPhase
from xtrain.tui.model.series import Series
from xtrain.tui.pages.node_times import step_cost
from xtrain.tui.pages.sheet import (
    ListPage,
    ListView,
    PageColumn,
    Row,
    bar,
    block,
    fit,
    fitting,
    joined,
    left,
    right,
    row,
    rows_of,
    rule,
    wrapped,
)

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


def several(board: Board) -> bool:
    """Return True if a run has more than one dataset."""
    planned = board.planned
    names = set(_planned_names(planned.phases)) if planned else set()
    keys = board.series.keys
    return len(names) > 1 or sum(key.startswith(_ROWS) for key in keys) > 1


def mixture(board: Board) -> MixtureTable:
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
    # Positions in a row: all rows of a run have equal length.
    tokens, total = series.last.tokens, math.fsum(found for found in rows.values() if found is not None)
    per_row = tokens / total if tokens is not None and total > 0 else None
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


# Deviation of a phase's rows from its shares that is reported; rows are dealt in turns, not drawn at random.
_NEAR = 0.02
_BAR_TITLES = ("share of rows in this phase", "share")
# Share of a step from which on waiting for rows is a warning.
_LONG_WAIT = 0.1


_COLUMNS: tuple[PageColumn[DatasetFacts], ...] = (
    PageColumn("loss", 8, lambda one: decimal(one.loss, 4)),
    PageColumn("held out", 8, lambda one: decimal(one.evaluation.loss if one.evaluation else None, 4)),
    PageColumn("share", 6, lambda one: _percent(one.share)),
    PageColumn("plan", 6, lambda one: _percent(one.target)),
    PageColumn("epochs", 7, lambda one: _times(one.epochs)),
    PageColumn("rows", 11, lambda one: "–" if one.rows is None else f"{one.rows:,.0f}"),
    PageColumn("tokens", 7, lambda one: count(one.tokens)),
    PageColumn("in all", 6, lambda one: _percent(one.run_share)),
)


def page(mixture: MixtureTable, view: ListView, width: int, most_rows: int, *, step: int = 0) -> ListPage:
    """Return at most `most_rows` rows of `width` cells; sentences are dropped before table rows."""
    facts = joined(
        [
            plural(len(mixture.datasets), "dataset"),
            f"phase {mixture.phase.name}" if mixture.phase and mixture.num_phases > 1 else "",
            f"step {step:,}",
        ],
    )
    title = rule("Datasets", width, facts)
    words = [row((line, style)) for text, style in in_words(mixture) for line in wrapped(text, width, "  ")]
    room = len(mixture.datasets)
    if least_rows(mixture) > most_rows:  # one row says how many more there are
        room = max(1, most_rows - 3 - min(len(words), most_rows // 4))
    view = view.within(len(mixture.datasets), room)
    names = min(max([8, *(len(one.name) for one in mixture.datasets)]), max(8, width // 5))
    columns, used = fitting(_COLUMNS, names, width)
    broad = min(40, width - used - 1)
    broad = broad if broad >= 10 else 0
    head = [left("", names), *(right(column.title, column.width) for column in columns)]
    if broad:
        head.append(next((words for words in _BAR_TITLES if len(words) <= broad), ""))
    rows = [title, fit(row((" ".join(head), "dim")), width)]

    def dataset_row(one: DatasetFacts) -> Row:
        line = [left(one.name, names), *(right(column.value(one), column.width) for column in columns)]
        return fit(row(" ".join(line), (" " + bar(one.share, broad), "bar") if broad else ""), width)

    rows += rows_of(mixture.datasets, view, room, dataset_row)
    if hidden := len(mixture.datasets) - room:
        words = [row((f"{hidden} more: up and down", "dim")), *words]
    rows += words[: max(0, most_rows - len(rows))]
    return ListPage(rows=tuple(block(rows, width, len(rows))), view=view, count=len(mixture.datasets), height=room)


def least_rows(mixture: MixtureTable) -> int:
    """Return the number of rows of the whole table without sentences."""
    return 2 + len(mixture.datasets)


def in_words(mixture: MixtureTable) -> list[tuple[str, str]]:
    """Return sentences with style names: the phase, deviations from planned shares, repeats, and the wait for rows."""
    found: list[tuple[str, str]] = []
    phase = mixture.phase
    if phase is not None and mixture.num_phases > 1:
        since = "from the beginning" if not phase.first else f"since step {phase.first:,}"
        until = f", until step {mixture.until:,}" if mixture.until is not None else ""
        rate = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
        then = f"; then {mixture.following.name}" if mixture.following is not None else ""
        found.append((f"Phase {phase.name} {since}{until}{rate}{then}.", ""))
    strays = [
        (one.share - one.target, one.name)
        for one in mixture.datasets
        if one.share is not None and one.target is not None
    ]
    if strays:
        stray, name = max(strays, key=lambda pair: abs(pair[0]))
        if abs(stray) <= _NEAR:
            found.append((f"Rows come as planned, within {100 * abs(stray):.1f} points.", "good"))
        else:
            one = next(one for one in mixture.datasets if one.name == name)
            said = f"{name} has {one.share:.1%} of the rows of this phase; {one.target:.1%} are planned."
            found.append((said, "warn"))
    often = [one for one in mixture.datasets if (one.epochs or 0) > 1]
    if often:
        seen = ", ".join(f"{one.name} {one.epochs:.1f} times" for one in often[:6])
        found.append((f"Seen more than once: {seen}.", ""))
    if mixture.wait_seconds is not None:
        share = f", {mixture.wait_share:.1%} of it" if mixture.wait_share is not None else ""
        style = "warn" if (mixture.wait_share or 0) >= _LONG_WAIT else ""
        found.append((f"A step waits {brief(mixture.wait_seconds)} for its rows{share}.", style))
    return found


def _times(epochs: float | None) -> str:
    return "n/a" if epochs is None else f"{epochs:.2f}" if epochs >= 0.1 or epochs == 0 else f"{epochs:.4f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
