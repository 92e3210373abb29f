"""The Compare screen as rows of text: how the runs stand, in what they differ, and lists to choose from."""

from collections.abc import Sequence

from attrs import frozen

from xtrain.tui.curves.canvas import MOST_LINES
from xtrain.tui.curves.plot_head import exact
from xtrain.tui.model.find import FoundRun
from xtrain.tui.pages.comparison import Axis, Difference, Standing
from xtrain.tui.pages.sheet import Row, block, cells, cut, fit, joined, left, restyled, right, row, rule, window
from xtrain.tui.words import count, decimal, plural, printable


@frozen(kw_only=True)
class Choosing:
    """List to choose from. place: of the cursor; query: only items that contain this text are shown."""

    what: str
    query: str = ""
    place: int = 0
    top: int = 0


@frozen(kw_only=True)
class Item:
    """Line of such a list. chosen: None if a choice closes the list."""

    key: str
    text: str
    chosen: bool | None = None


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
    at = "" if common is None else f"at {count(common) if by == 'tokens' else exact(common)}"
    wide = width >= 100
    names = max(8, min(30 if wide else 14, max((len(one.run.label) for one in standings), default=8)))
    place = max(9, len(at))
    head = [f"  {left('run', names)}", right("step", 9), right("last", 9)]
    head += [right("best", 9), right("at", 9)] if wide else []
    head += [right(at, place), right("difference", 10)]
    head += [left(" state", 12)] if width >= 76 else []
    rows = [rule("Compare", width, facts), fit(row((" ".join(head), "dim")), width)]
    for number, one in enumerate(standings):
        of_curve = number % MOST_LINES
        sign = (f"{markers[of_curve]} ", f"line{of_curve}")
        parts = [right("–" if one.step is None else f"{one.step:,}", 9), right(decimal(one.last, 4), 9)]
        if wide:
            best_at = "–" if one.best_at is None else count(one.best_at) if by == "tokens" else exact(one.best_at)
            parts += [right(decimal(one.best, 4), 9), right(best_at, 9)]
        parts.append(right(decimal(one.common, 4), place))
        parts.append(right("this run" if number == 0 else _signed(one.difference), 10))
        state = f" {one.run.state}" if width >= 76 else ""
        drawn = row(
            sign,
            left(one.run.label, names) + " ",
            " ".join(parts),
            (state, "dim"),
        )
        rows.append(fit(drawn, width))
    return rows


def _signed(difference: float | None) -> str:
    if difference is None:
        return "–"
    figure = decimal(difference, 4)
    return figure if figure.startswith("-") or difference == 0 else f"+{figure}"


def difference_rows(
    found: Sequence[Difference] | None, width: int, height: int, *, top: int = 0, markers: str
) -> list[Row]:
    """Return `optimizer.lr ● ■ 0.003 ○ 0.001`: a setting, and its values with the signs of the runs that have them."""
    if found is None:
        return block([rule("Settings", width), row((" not all plans can be read yet", "dim"))], width, height)
    title = plural(len(found), "difference") if found else "no differences"
    lines: list[Row] = []
    broad = max(8, min(34, width // 2 - 4, max((len(each.key) for each in found), default=8)))
    for each in found:
        lines += _difference(each, width, broad, markers)
    room = max(1, height - 1)
    top = max(0, min(top, len(lines) - room))
    more = f"{len(lines) - room - top} more below" if len(lines) > room + top else ""
    heading = rule("Settings that differ", width, joined([title, more]))
    return block([heading, *lines[top : top + room]], width, height)


def _difference(each: Difference, width: int, broad: int, markers: str) -> list[Row]:
    groups: dict[str | None, list[tuple[str, str]]] = {}
    for number, value in enumerate(each.values):
        place = number % MOST_LINES
        groups.setdefault(value, []).append((markers[place], f"line{place}"))
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


def run_items(found: Sequence[FoundRun], chosen: Sequence[str], now: float) -> list[Item]:
    """Return the runs to choose from, with their progress and its age."""
    items = []
    for run in found:
        step = "no step" if run.step is None else f"step {run.step:,}"
        loss = "" if run.loss is None else f"loss {decimal(run.loss, 4)}"
        said = "  ".join(filter(None, (run.name, step, loss, run.status, run.age(now))))
        items.append(Item(key=str(run.directory), text=said, chosen=str(run.directory) in chosen))
    return items


def list_page(
    choosing: Choosing, items: Sequence[Item] | None, width: int, height: int
) -> tuple[list[Row], list[Item], Choosing]:
    """Return the rows of a list, the items that match its filter, and its new state. items: None while they are being
    searched."""
    wanted = choosing.query.casefold()
    shown = [item for item in items or () if wanted in item.text.casefold()]
    place = max(0, min(len(shown) - 1, choosing.place))
    room = max(1, height - 1)
    top = window(len(shown), room, choosing.top, place)
    query = f"“{choosing.query}”" if choosing.query else ""
    several = any(item.chosen is not None for item in items or ())
    keys = "enter: add or remove" if several else "enter: choose"
    rows = [rule(choosing.what, width, joined([query, f"{len(shown):,}", keys, "esc: back"]))]
    for number, item in enumerate(shown[top : top + room], start=top):
        sign = "" if item.chosen is None else f"[{'x' if item.chosen else ' '}] "
        drawn = fit(row(f" {sign}{item.text}"), width)
        rows.append(restyled(drawn, "cursor") if number == place else drawn)
    if not shown:
        words = "looking for runs" if items is None else "none with this text" if wanted else "no other runs"
        rows.append(row((f" {words}", "dim")))
    state = Choosing(what=choosing.what, query=choosing.query, place=place, top=top)
    return block(rows, width, height), shown, state
