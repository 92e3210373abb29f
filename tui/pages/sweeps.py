"""Sweep screen as rows with the curves of its trials, and the page of a learning-rate search."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.records.sweep import SweepState, TrialState, plain
from xtrain.text.units import count, decimal, plural
from xtrain.tui.curves.canvas import MOST_LINES, Curve, Glyphs, Line
from xtrain.tui.curves.drawing import draw
from xtrain.tui.curves.viewport import Viewport
from xtrain.tui.model.series import Series
from xtrain.tui.pages.comparison import RunColors
from xtrain.tui.pages.sheet import (
    DOT,
    LINE,
    ListPage,
    ListView,
    Row,
    bar,
    block,
    fit,
    joined,
    left,
    right,
    row,
    rows_of,
    rule,
)

# Trials with a value from which on it is said how much settings matter: of fewer, chance says more.
_FEW = 5
_AXIS, _MARK = 14, "●"
# Width of a trial's outcome; from a screen width on, with its tokens.
_LAST, _NARROW_LAST, _WIDE = 20, 14, 76
_STYLES = {"done": "", "training": "good", "stopped early": "dim", "failed": "bad", "same": "dim", "paused": "dim"}
_BLOCKS = "▁▂▃▄▅▆▇█"


def page(state: SweepState, mine: str, view: ListView, width: int, height: int) -> ListPage:
    """Return the page in `height` rows of `width` cells. mine: name of the dashboard's run."""
    trials = ranked(state)
    names = list(dict.fromkeys(name for each in trials for name in each.point))
    rows = [*_glance(state, width), *_importance(state, names, width, max(1, height // 4))]
    rows.append(rule("Trials", width, "the best first; left is the least value"))
    last = _LAST if width >= _WIDE else _NARROW_LAST
    axes, shown = _axes(trials, names, width - last)
    head = (left("trial", 6), right("value", 9), "  ", *(left(name.rpartition(".")[2], _AXIS + 1) for name in shown))
    rows.append(fit(row(("".join((*head, left("is", last))), "dim")), width))
    room = max(1, height - len(rows))
    view = view.within(len(trials), room)

    def trial_row(trial: TrialState) -> Row:
        run = state.of(trial)
        mark = "*" if run.name == mine else " "
        cells = (left(f"{trial.number:03d}{mark}", 6), right(decimal(run.value, 4), 9), "  ")
        line = "".join(
            (
                *cells,
                *(axes[name](trial) + " " for name in shown),
                left(outcome(state, trial, tokens=width >= _WIDE), last),
            )
        )
        return fit(row((line, _STYLES.get(trial.status, ""))), width)

    rows += rows_of(trials, view, room, trial_row)
    return ListPage(rows=tuple(block(rows, width, height)), view=view, count=len(trials), height=room)


def ranked(state: SweepState) -> list[TrialState]:
    """Return the trials: finished ones, best first, then the others, furthest first."""

    def order(trial: TrialState) -> tuple:
        run = state.of(trial)
        value = math.inf if run.value is None else run.value
        return (not run.finished, -len(run.values), value, trial.number)

    return sorted(state.trials.values(), key=order)


def best_so_far(state: SweepState) -> list[float]:
    """Return the best value up to each finished trial, in order of their numbers."""
    found: list[float] = []
    for number in sorted(state.trials):
        trial = state.trials[number]
        if trial.finished and trial.value is not None:
            found.append(min([trial.value, *found[-1:]]))
    return found


def importance(state: SweepState, names: Sequence[str]) -> dict[str, float]:
    """Return the share of the variance of trial ranks that lies between groups of values of a setting, from 0 to 1.

    The result is empty while too few trials have a value. Numbers with many values are put into three groups of equal
    size. Trials stopped at a rung rank after those that went further, as they would have been worse there.
    """
    measured = [each for each in ranked(state) if each.same_as is None and each.value is not None]
    if len(measured) < _FEW:
        return {}
    ranks = {each.number: float(place) for place, each in enumerate(measured)}
    mean = (len(measured) - 1) / 2
    whole = sum((rank - mean) ** 2 for rank in ranks.values())
    found = {}
    for name in names:
        groups = _groups(measured, name)
        between = sum(len(g) * (sum(ranks[n] for n in g) / len(g) - mean) ** 2 for g in groups)
        found[name] = between / whole
    return found


def _groups(trials: Sequence[TrialState], name: str) -> list[list[int]]:
    """Return numbers of trials, grouped by the value of a setting."""
    by_value: dict[str, list[int]] = {}
    for each in trials:
        by_value.setdefault(each.point.get(name, ""), []).append(each.number)
    if len(by_value) <= len(trials) // 2:
        return list(by_value.values())
    ordered = sorted(trials, key=lambda each: _as_number(each.point.get(name, "")))
    third = -(-len(ordered) // 3)
    return [[each.number for each in ordered[place : place + third]] for place in range(0, len(ordered), third)]


def _glance(state: SweepState, width: int) -> list[Row]:
    kinds: dict[str, int] = {}
    for each in state.trials.values():
        kinds[each.status] = kinds.get(each.status, 0) + 1
    facts = joined([plural(len(state.trials), "trial"), state.ended])
    best = state.best()
    rows = [rule("Sweep", width, facts)]
    rows.append(fit(row(f"  trials  {joined(f'{number} {kind}' for kind, number in kinds.items())}"), width))
    if best is None:
        return [*rows, fit(row(("  no trial has been trained to its end yet", "dim")), width)]
    point = joined(f"{name} {value}" for name, value in best.point.items())
    rows.append(fit(row(f"  best    {decimal(best.value, 4)}  trial {best.number:03d} {DOT} {point}"), width))
    curve = best_so_far(state)
    shown = curve[-max(1, width - 30) :]
    rows.append(fit(row(f"  so far  {_sparks(shown)}  {decimal(curve[0], 4)} to {decimal(curve[-1], 4)}"), width))
    return rows


def _sparks(values: Sequence[float]) -> str:
    """Return a column for each value; the largest is the highest."""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _importance(state: SweepState, names: Sequence[str], width: int, most: int) -> list[Row]:
    found = sorted(importance(state, names).items(), key=lambda item: -item[1])
    if not found:
        return []
    widest = min(max(len(name) for name, _ in found), max(8, width // 3))
    rows = [rule("What matters", width, "share of the ranks' variance that it explains")]
    rows += [
        fit(row(f"  {left(name, widest)}  ", (bar(value, 20), "bar"), f"  {value:4.0%}"), width)
        for name, value in found
    ]
    return rows[: most + 1]


Axis = Callable[[TrialState], str]


def _axes(trials: Sequence[TrialState], names: Sequence[str], width: int) -> tuple[Mapping[str, Axis], list[str]]:
    """Return the axis of each setting, and the settings that fit."""
    shown = list(names[: max(1, (width - 17) // (_AXIS + 1))])
    return {name: _axis([each.point[name] for each in trials if name in each.point], name) for name in shown}, shown


def _axis(values: Sequence[str], name: str) -> Axis:
    """Return the axis of numbers by size, logarithmic if they span more than a factor of ten; texts keep their
    order."""
    distinct = list(dict.fromkeys(values))
    numbers = [_as_number(each) for each in distinct]
    if all(math.isfinite(each) for each in numbers) and numbers:
        low, high = min(numbers), max(numbers)
        log = low > 0 and high > 10 * low

        def share(value: str) -> float:
            number = _as_number(value)
            if high == low:
                return 0.5
            if log:
                return (math.log(number) - math.log(low)) / (math.log(high) - math.log(low))
            return (number - low) / (high - low)
    else:

        def share(value: str) -> float:
            return distinct.index(value) / max(1, len(distinct) - 1)

    def drawn(trial: TrialState) -> str:
        value = trial.point.get(name)
        if value is None:
            return " " * _AXIS
        place = round(min(1.0, max(0.0, share(value))) * (_AXIS - 1))
        return LINE * place + _MARK + LINE * (_AXIS - 1 - place)

    return drawn


def _as_number(text: str) -> float:
    """Return the number at the beginning of a text (`100 steps`); infinite without one."""
    found = plain(text.partition(" ")[0].rstrip("%"))
    return float(found) if isinstance(found, int | float) else math.inf


def outcome(state: SweepState, trial: TrialState, *, tokens: bool = True) -> str:
    """Return the outcome of a trial. tokens: add the tokens after which it was stopped."""
    if trial.same_as is not None:
        return f"as {trial.same_as:03d}"
    behind = f" {count(trial.tokens)}" if tokens and trial.stopped_early and trial.tokens else ""
    return f"{trial.status}{behind}"


def trial_lines(
    state: SweepState,
    series: Mapping[str, Series],
    key: str,
    colors: RunColors | None = None,
    folder: Path = Path(),
) -> list[Line]:
    """Return a line over tokens for each trial with values of a key. Finished trials that are not among the best are in
    the background. colors: of runs that other screens show. folder: of the sweep."""
    best = state.best()
    measured = [each for each in ranked(state) if each.same_as is None and each.name in series]

    def order(trial: TrialState) -> int:
        if trial is best:
            return 0
        return 3 if trial.stopped_early or trial.failed else 1 if not trial.ended else 2

    drawn = [(trial, *series[trial.name].xy(key, "tokens")) for trial in sorted(measured, key=order)]
    drawn = [(trial, x, y) for trial, x, y in drawn if len(x)]
    front = [trial for trial, _, _ in drawn if order(trial) < 3][:MOST_LINES]
    chosen = [trial.number % MOST_LINES for trial in front]
    taken = (colors or RunColors()).of([folder / trial.name for trial in front], chosen)
    numbers = {trial.name: number for trial, number in zip(front, taken, strict=True)}
    found: list[Line] = []
    for trial, x, y in drawn:
        steps = series[trial.name].xy(key)[0]
        name, number = f"{trial.number:03d}" + (" best" if trial is best else ""), numbers.get(trial.name)
        # While a long file is being read the two may be of different moments.
        known = steps if len(steps) == len(x) else None
        found.append(Line(name, x, y, dim=number is None, steps=known, color=number))
    return found


LOSS: Final = "loss"
MOST_ROWS: Final = 12
HEIGHT: Final = 16
# Losses above this multiple of the first are not drawn: the others would be a flat line.
MOST_DRAWN: Final = 1.5
SUGGESTED: Final = {
    "steepest": "steepest descent: arg min of d loss / d log(rate)",
    "minimum_tenth": "minimum/10: a tenth of the rate with the least loss",
}


def lr_sweep_page(found: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[str]:
    """Return the lines of a learning-rate sweep. found: the content of `lr_sweep.json`."""
    rates, losses, smoothed = (found[name] for name in ("lr", "loss", "smoothed"))
    if not rates:
        return ["the loss of the first step is not finite: start with a smaller rate"]
    places = sorted({round(place) for place in np.linspace(0, len(rates) - 1, MOST_ROWS)})
    lines = [f"{'step':>6}  {'rate':>9}  {'loss':>9}  {'smoothed':>9}"]
    lines += [f"{at + 1:>6}  {rates[at]:>9.3g}  {losses[at]:>9.4f}  {smoothed[at]:>9.4f}" for at in places]
    x = np.log10(np.array(rates))
    highest = MOST_DRAWN * smoothed[0]
    drawn = [(name, np.array(values)) for name, values in (("smoothed", smoothed), ("loss", losses))]
    curves = [Curve(Line(name, x, np.where(y > highest, np.nan, y), dim=name == "loss")) for name, y in drawn]
    drawing = draw(
        curves,
        Viewport(),
        width,
        HEIGHT,
        title="loss over log10 of the rate",
        x_label="",
        x_unit="number",
        glyphs=glyphs,
    )
    lines += ["", *("".join(text for text, _ in row).rstrip() for row in drawing.rows), ""]
    end = "the loss diverged" if found.get("diverged") else "the sweep ended"
    lines.append(f"{end} after {len(rates)} steps, at a rate of {rates[-1]:.3g}")
    if not any(found.get(name) for name in SUGGESTED):
        return [*lines, "the loss never decreases: no rate can be suggested; use more steps, or a smaller first rate"]
    shown = ((found.get(name), meaning) for name, meaning in SUGGESTED.items())
    return [*lines, *(f"  {rate:<9.3g}  {meaning}" for rate, meaning in shown if rate and math.isfinite(rate))]
