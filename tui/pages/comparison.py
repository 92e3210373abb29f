"""Comparison of runs: one number of each, differing settings, and the Compare screen as rows."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen

from xtrain.text.units import count, decimal, duration, plural, printable
from xtrain.tui.curves.axis import exact
from xtrain.tui.curves.canvas import MOST_LINES, Line
from xtrain.tui.model.board import Board
from xtrain.tui.model.find import FoundRun
from xtrain.tui.model.planned import Planned
from xtrain.tui.model.series import By
from xtrain.tui.pages.sheet import DOT, PageColumn, Row, block, cells, cut, fit, joined, left, right, row, rule

Axis = By
# For these metrics higher is better, for all others lower.
_MORE_IS_BETTER = ("tokens_per_second", "mfu", "mfu_causal", "hfu", "tflops", "valid_tokens_per_second")
PLACE_TEXTS: Final = {"step": exact, "tokens": count, "time": duration}
_WHOLE = ("world_size", "steps", "tokens_per_step")


@frozen(kw_only=True)
class Compared:
    """One run in a comparison. label: `experiment·id`, unique. color: number of its color and sign."""

    label: str
    directory: Path
    board: Board | None
    color: int

    @property
    def state(self) -> str:
        """State of the run, or the progress of reading it."""
        if self.board is None:
            return "reading"
        if self.board.loading is not None:
            return f"{self.board.loading:.0%} read"
        return self.board.life.status if self.board.life.state == "ended" else self.board.life.state


@frozen(kw_only=True)
class Standing:
    """Values of one metric of a run. best_at: the step of the best value; common: the value at the last position that
    all runs have reached; difference: `common` minus `common` of the first run."""

    run: Compared
    step: int | None = None
    last: float | None = None
    best: float | None = None
    best_at: float | None = None
    common: float | None = None
    difference: float | None = None


@frozen(kw_only=True)
class Difference:
    """Setting in which runs differ: its value in each run as text; None where missing."""

    key: str
    values: tuple[str | None, ...]


# The first part of a run's name, as `locate` makes it.
_CODE: Final = re.compile(r"[0-9a-f]{7,}")
# Lengths of ids, of which the shortest that distinguishes runs is taken.
_IDS: Final = (4, 8, 12, 16, 20, 24)


def labels(directories: Sequence[Path], experiments: Sequence[str | None] = ()) -> list[str]:
    """Return `experiment·id` for each run: the name of its experiment, and the distinct beginning of its own.

    If all names are `CODE-CONFIG` with one code version, ids are of the second part. experiments: names by the runs'
    plans; where missing, the name of the parent folder.
    """
    ids = [path.name for path in directories]
    parts = [name.split("-", 1) if "-" in name else ("", name) for name in ids]
    codes = {code for code, _ in parts}
    if len(codes) == 1 and _CODE.fullmatch(codes.pop()):
        ids = [config for _, config in parts]
    shortest = next((size for size in _IDS if len({one[:size] for one in ids}) == len(set(ids))), None)
    parents = [path.parent.name for path in directories]
    named = [name or parent for name, parent in zip([*experiments, *parents[len(experiments) :]], parents, strict=True)]
    for names in (named, parents, [str(path.parent) for path in directories]):
        found = [f"{name}{DOT}{one[:shortest]}" for name, one in zip(names, ids, strict=True)]
        if len(set(found)) == len(found):
            break
    return found


class RunColors:
    """Numbers of the colors of runs: a run keeps its number on every screen."""

    def __init__(self) -> None:
        self._numbers: dict[Path, int] = {}

    def of(self, runs: Sequence[Path], preferred: Sequence[int] = ()) -> list[int]:
        """Return the numbers of runs that are shown together, distinct for the first MOST_LINES of them. preferred: the
        number of each run if it has none and the number is free."""
        found: dict[Path, int] = {}
        for place, run in enumerate(runs):
            known = self._numbers.get(run)
            used, given = set(found.values()), set(self._numbers.values())
            free = [number for number in range(MOST_LINES) if number not in used]
            unused = [number for number in free if number not in given]
            if preferred and preferred[place] in free:
                unused = [preferred[place]]
            found[run] = known if known in free else (unused or free or [len(found) % MOST_LINES])[0]
            self._numbers[run] = found[run]
        return list(found.values())


def compared(
    directories: Sequence[Path], boards: Sequence[Board | None], colors: RunColors | None = None
) -> list[Compared]:
    """Return runs with their names and colors. boards: None for one that is not read yet. colors: default: by place."""
    names = labels(directories, [board.planned.name if board and board.planned else None for board in boards])
    numbers = (colors or RunColors()).of(directories)
    return [
        Compared(label=name, directory=path, board=board, color=number)
        for name, path, board, number in zip(names, directories, boards, numbers, strict=True)
    ]


def fitted(label: str, width: int) -> str:
    """Return `experiment·id` in at most `width` cells: the end of the experiment's name is cut first."""
    name, dot, one = label.rpartition(DOT)
    room = width - cells(((dot + one, ""),))
    return cut(name, room) + dot + one if dot and room > 0 else cut(label, width)


def metric_keys(runs: Sequence[Compared]) -> tuple[str, ...]:
    """Return all metrics that any of the runs has, in the order of the first run."""
    keys = {key: None for run in runs if run.board is not None for key in run.board.series.keys}
    return tuple(key for key in keys if key != "tokens")


def lines(runs: Sequence[Compared], key: str, by: Axis) -> list[Line]:
    """Return the curve of a metric for each run, empty if the run does not have it. Time is in seconds since a run's
    first record."""
    found = []
    for run in runs:
        if run.board is None:
            found.append(Line(run.label, np.empty(0), np.empty(0), color=run.color))
            continue
        x, y = run.board.series.xy(key, by)
        if by == "time" and len(x):
            x = x - run.board.series.xy("time")[1][0]
        steps = run.board.series.xy(key)[0] if by != "step" else x
        # In a long run that is still being read, the two may be from different moments.
        found.append(Line(run.label, x, y, steps=steps if len(steps) == len(x) else None, color=run.color))
    return found


def common_place(curves: Sequence[Line]) -> float | None:
    """Return the last x that all nonempty curves have reached."""
    return min((float(line.x[-1]) for line in curves if len(line.x)), default=None)


def standings(runs: Sequence[Compared], key: str, curves: Sequence[Line]) -> list[Standing]:
    """Return the values of one metric for each run, in order of the runs."""
    common = common_place(curves)
    found = []
    first: float | None = None
    for place, (run, line) in enumerate(zip(runs, curves, strict=True)):
        step = run.board.run.step if run.board is not None else None
        if not len(line.x) or common is None:
            found.append(Standing(run=run, step=step))
            continue
        best = int(np.argmax(line.y) if key in _MORE_IS_BETTER else np.argmin(line.y))
        before = int(np.searchsorted(line.x, common, side="right")) - 1
        value = float(line.y[before]) if before >= 0 else None
        first = value if place == 0 else first
        found.append(
            Standing(
                run=run,
                step=step,
                last=float(line.y[-1]),
                best=float(line.y[best]),
                best_at=float(line.x[best]),
                common=value,
                difference=value - first if place and value is not None and first is not None else None,
            )
        )
    return found


def differences(runs: Sequence[Compared]) -> list[Difference] | None:
    """Return the settings in which the runs differ, by name; None until all plans have been read."""
    plans = [run.board.planned for run in runs if run.board is not None and run.board.planned is not None]
    if len(plans) < len(runs):
        return None
    found: dict[str, Difference] = {}
    have_config = tuple(isinstance(plan.content.get("config"), dict) for plan in plans)
    if not all(have_config):
        # Against a plan that holds none of its settings, every setting would be a difference.
        values = tuple("in its plan" if one else "not in its plan" for one in have_config)
        found["settings"] = Difference(key="settings", values=values)
    settings = [_settings(plan, with_config=all(have_config)) for plan in plans]
    for key in sorted({key for each in settings for key in each}):
        values = tuple(each.get(key) for each in settings)
        if len(set(values)) < 2:
            continue
        if None in values:
            # A dataset that one run has and another one has not is one difference, however many settings it has.
            missing = tuple(value is None for value in values)
            whole = next((part for part in _parts(key) if _are_without(settings, part) == missing), key)
            if whole != key:
                key, values = whole, tuple(None if lost else "is there" for lost in missing)
        found[key] = Difference(key=key, values=values)
    return list(found.values())


def _parts(key: str) -> Iterator[str]:
    """Yield `a`, `a.b`, `a.b.c`."""
    names = key.split(".")
    return (".".join(names[:count]) for count in range(1, len(names) + 1))


def _are_without(settings: Sequence[Mapping[str, str]], part: str) -> tuple[bool, ...]:
    """Return, for each run, True if it has nothing below a path."""
    return tuple(not any(key == part or key.startswith(f"{part}.") for key in each) for each in settings)


def _settings(plan: Planned, *, with_config: bool) -> dict[str, str]:
    """Return the settings of a plan by their paths: first the experiment, then its distribution over ranks."""
    found: dict[str, str] = {}
    if with_config:
        _flatten("", plan.content["config"], found)
    found |= {f"mesh.{axis.name}": str(axis.size) for axis in plan.axes}
    found |= {key: _text(plan.content[key]) for key in _WHOLE if key in plan.content}
    return found


def _flatten(path: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            _flatten(f"{path}.{key}" if path else str(key), one, found)
    elif isinstance(value, list) and value and all(_is_part(one) for one in value):
        for name, settings in value:
            _flatten(f"{path}.{name}", settings or "yes", found)
    else:
        found[path] = _text(value)


def _is_part(value: Any) -> bool:
    """Return True if a value is a stage of a chain: a name and its settings."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping)


def _text(value: Any) -> str:
    """Return a setting as it is written: `[5, "%"]` is 5%."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str) and isinstance(value[0], int | float):
        return f"{value[0]:g}{'' if value[1] == '%' else ' '}{value[1]}"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value)


def standing_rows(
    standings: Sequence[Standing],
    key: str,
    by: Axis,
    common: float | None,
    width: int,
    *,
    markers: str,
) -> list[Row]:
    """Return the table: a heading, then a row for each run."""
    facts = joined([printable(key), f"by {by}", plural(len(standings), "run")])
    place = PLACE_TEXTS[by]
    at = "" if common is None else f"at {place(common)}"
    wide = width >= 100
    names = max(8, min(30 if wide else 14, max((len(one.run.label) for one in standings), default=8)))
    columns: list[PageColumn[Standing]] = [
        PageColumn("step", 9, lambda one: "–" if one.step is None else f"{one.step:,}"),
        PageColumn("last", 9, lambda one: decimal(one.last, 4)),
        PageColumn("best", 9, lambda one: decimal(one.best, 4)),
        PageColumn("at", 9, lambda one: "–" if one.best_at is None else place(one.best_at)),
        PageColumn(at, max(9, len(at)), lambda one: decimal(one.common, 4)),
        PageColumn("difference", 10, lambda one: "this run" if one is standings[0] else _signed(one.difference)),
    ]
    shown = columns if wide else columns[:2] + columns[4:]
    with_state = width >= 76
    head = [f"  {left('run', names)}", *(right(column.title, column.width) for column in shown)]
    head += [left(" state", 12)] if with_state else []
    rows = [rule("Compare", width, facts), fit(row((" ".join(head), "dim")), width)]
    for one in standings:
        texts = " ".join(
            (left(fitted(one.run.label, names), names), *(right(column.value(one), column.width) for column in shown))
        )
        state = f" {one.run.state}" if with_state else ""
        drawn = row((f"{markers[one.run.color]} ", f"line{one.run.color}"), texts, (state, "dim"))
        rows.append(fit(drawn, width))
    return rows


def _signed(difference: float | None) -> str:
    if difference is None:
        return "–"
    figure = decimal(difference, 4)
    return figure if figure.startswith("-") or difference == 0 else f"+{figure}"


def difference_rows(
    found: Sequence[Difference] | None,
    width: int,
    height: int,
    *,
    top: int = 0,
    signs: Sequence[tuple[str, str]],
) -> list[Row]:
    """Return `optimizer.lr ● ■ 0.003 ○ 0.001`: a setting, and its values with the signs of the runs that have them."""
    if found is None:
        return block([rule("Settings", width), row((" not all plans can be read yet", "dim"))], width, height)
    title = plural(len(found), "difference") if found else "no differences"
    lines: list[Row] = []
    broad = max(8, min(34, width // 2 - 4, max((len(each.key) for each in found), default=8)))
    for each in found:
        lines += _difference(each, width, broad, signs)
    room = max(1, height - 1)
    top = max(0, min(top, len(lines) - room))
    more = f"{len(lines) - room - top} more below" if len(lines) > room + top else ""
    heading = rule("Settings that differ", width, joined([title, more]))
    return block([heading, *lines[top : top + room]], width, height)


def _difference(each: Difference, width: int, broad: int, signs: Sequence[tuple[str, str]]) -> list[Row]:
    groups: dict[str | None, list[tuple[str, str]]] = {}
    for value, sign in zip(each.values, signs, strict=True):
        groups.setdefault(value, []).append(sign)
    rows: list[Row] = []
    line: list[tuple[str, str]] = [(left(each.key, broad), "dim")]
    for value, marks in groups.items():
        room = max(6, width - broad - len(marks) - 4)
        said = cut(printable("not set" if value is None else value).replace("\n", " "), room)
        piece = [("  ", ""), *marks, (" ", ""), (said, "")]
        if len(line) > 1 and cells(tuple(line)) + cells(tuple(piece)) > width:
            rows.append(tuple(line))
            line = [(" " * broad, "")]
        line += piece
    return [*rows, tuple(line)]


def run_items(found: Sequence[FoundRun], chosen: Sequence[Path], now: float) -> Iterator[tuple[str, str]]:
    """Yield the runs to choose from: the path, and a line with a check box, the run's progress and its age."""
    for run in found:
        step = "no step" if run.step is None else f"step {run.step:,}"
        loss = "" if run.loss is None else f"loss {decimal(run.loss, 4)}"
        words = "  ".join(filter(None, (run.name, step, loss, run.status, run.age(now))))
        yield str(run.directory), f"[{'x' if run.directory in chosen else ' '}] {words}"
