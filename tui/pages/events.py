"""Events screen as rows: the list, one event in full, a log's end, and keys."""

import re
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from attrs import evolve, field, frozen
from rich.cells import chop_cells

from xtrain.records import events
from xtrain.records import training_events as training
from xtrain.records.lines import as_object, kind_of
from xtrain.records.names import ControlState, EndStatus
from xtrain.text.units import plural, printable, text
from xtrain.tui.event_text import event_text
from xtrain.tui.model.event_log import EventLog, LogEntry, LogTail
from xtrain.tui.pages.sheet import (
    DEAD,
    STUCK_SIGN,
    Row,
    block,
    cut,
    fit,
    joined,
    left,
    restyled,
    right,
    row,
    rule,
    window,
    wrapped,
)

# Problems and near problems, in order of importance.
_PROBLEMS = (
    events.FailureEvent, events.StuckEvent, training.NonFiniteEvent, events.AlertEvent, training.RollbackEvent,
    events.RestartEvent, training.SkippedEvent, events.WarningEvent,
)  # fmt: skip
PROBLEMS = tuple(map(kind_of, _PROBLEMS))
_STYLES = {
    **dict.fromkeys(_PROBLEMS, "warn"), events.FailureEvent: "bad", events.StuckEvent: "bad", training.CheckpointEvent:
    "good", training.ModelEvent: "good",
}  # fmt: skip
_GOOD_ENDS = (EndStatus.DONE, EndStatus.COMPLETE)
# Fields that the words above have said already.
_SAID = ("event", "step", "time", "traceback", "error", "samples", "message")


def style_of(entry: LogEntry) -> str:
    """Return `bad`, `warn`, `good` or nothing."""
    event = entry.event
    if isinstance(event, events.RunEndEvent):
        return "good" if event.status in _GOOD_ENDS else "bad" if event.status == EndStatus.FAILED else "warn"
    if isinstance(event, events.AlertEvent) and event.state == "cleared":
        return "good"
    if isinstance(event, events.ControlEvent) and event.state == ControlState.REFUSED:
        return "warn"
    return _STYLES.get(type(event), "")


def clock(seconds: float | None) -> str:
    """Return the local time of day as `18:20:01`."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds)) if seconds is not None else "–"
    except (OverflowError, ValueError, OSError):
        return "–"


def date(seconds: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds is not None else ""
    except (OverflowError, ValueError, OSError):
        return ""


def detail(entry: LogEntry, width: int) -> list[Row]:
    """Return the rows of an event in full: its texts unshortened, then its other fields as written."""
    rows: list[Row] = []
    if isinstance(entry.event, training.GenerateEvent):
        for number, sample in enumerate(entry.event.samples, start=1):
            rows += [row((f"sample {number}", "title")), *_written(sample, width), ()]
    else:
        style = style_of(entry) if isinstance(entry.event, _PROBLEMS) else ""
        for said in event_text(entry.event):
            rows += [row((line, f"bold {style}".strip())) for line in wrapped(said.body, width)]
            for line in said.more:
                # A traceback keeps its indentation.
                blanks = line[: len(line) - len(line.lstrip())][: width // 3]
                rows += [row((blanks + part, style)) for part in wrapped(line, width - len(blanks))] or [()]
    written = msgspec.to_builtins(as_object(entry.event))
    others = [(key, value) for key, value in written.items() if key not in _SAID and value not in (None, "")]
    broad = max((len(key) for key, _ in others), default=0)
    rows += [()] if rows and others else []
    for key, value in others:
        first, *rest = wrapped(_as_text(value), max(8, width - broad - 2)) or [""]
        rows.append(row((f"{key:<{broad}}  ", "dim"), first))
        rows += [row(" " * (broad + 2) + line) for line in rest]
    return rows


def _written(sample: training.GeneratedText, width: int) -> list[Row]:
    """Return the prompt in bold and the generated text, with its own line ends and blanks."""
    prompt = printable(sample.prompt)
    rows, bold = [], len(prompt)
    for line in (prompt + printable(sample.text).removeprefix(prompt)).split("\n"):
        for piece in chop_cells(line, width) or [""]:
            spans = (piece[:bold], "bold"), (piece[bold:], "")
            rows.append(tuple(span for span in spans if span[0]))
            bold = max(0, bold - len(piece))
        bold = max(0, bold - 1)
    return rows


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(one)}" for key, one in value.items())
    return text(value)


_GAPS = re.compile(r"\s{2,}")
# From this many rows on, the chosen event is also shown below the list.
_ROOM_FOR_DETAIL = 22


@frozen(kw_only=True)
class EventsView:
    """The reader's choices. kinds: `all`, `problems` or one kind; chosen: number of an event, None: always the newest;
    log: name of the log shown instead of the events, else empty."""

    kinds: str = "all"
    query: str = ""
    chosen: int | None = None
    shows: Literal["list", "detail"] = "list"
    log: str = ""
    top: int = 0
    scroll: int | None = None
    """First line of a text that is longer than the screen; None: the beginning of an event, or the end of a log."""


@frozen(kw_only=True)
class EventsPage:
    """Drawn rows, and the facts that keys need. entries: the listed events; height: rows that scroll."""

    rows: tuple[Row, ...]
    view: EventsView
    entries: tuple[LogEntry, ...] = field(repr=False)
    log: EventLog = field(repr=False)
    place: int = 0
    height: int = 0
    lines: int = 0


def page(log: EventLog, view: EventsView, width: int, height: int, *, directory: str = "") -> EventsPage:
    """Return the rows for `width` x `height` cells. directory: run directory, left out of paths in the list."""
    view = view if view.log in ("", *(tail.name for tail in log.logs)) else evolve(view, log="")
    entries = _chosen_entries(log, view)
    numbers = [entry.number for entry in entries]
    place = numbers.index(view.chosen) if view.chosen in numbers else len(entries) - 1
    empty = EventsPage(rows=(), view=view, entries=entries, log=log, place=place)
    if view.log:
        return _log_page(empty, width, height)
    if view.shows == "detail" and entries:
        return _detail_page(empty, width, height)
    return _list_page(empty, width, height, directory)


def _chosen_entries(log: EventLog, view: EventsView) -> tuple[LogEntry, ...]:
    kinds = {"all": None, "problems": PROBLEMS}.get(view.kinds, (view.kinds,))
    found = log.filtered(kinds=kinds, text=view.query)
    # A node has one event when it starts and one when it has ended: the start is shown only while the node is running.
    over = {e.event.node for e in log.entries if isinstance(e.event, training.SetupEvent)} if kinds is None else ()
    return tuple(e for e in found if not (isinstance(e.event, training.SetupBeginEvent) and e.event.node in over))


def _list_page(empty: EventsPage, width: int, height: int, directory: str) -> EventsPage:
    log, entries, view, place = empty.log, empty.entries, empty.view, empty.place
    above = [_title(log, entries, view, width), *_last_failure(log, view, width)]
    below = max(6, height // 3) if height >= _ROOM_FOR_DETAIL and entries else 0
    room = max(1, height - len(above) - below)
    top = window(len(entries), room, view.top if view.chosen is not None else len(entries), max(place, 0))
    columns = _columns(entries, width)
    rows = [*above]
    for index in range(top, min(len(entries), top + room)):
        drawn = fit(_entry_row(entries[index], columns, directory), width)
        rows.append(restyled(drawn, "cursor") if index == place else drawn)
    if not entries:
        rows.append(row((" nothing yet" if not log.entries else " no event of this kind with this text", "dim")))
    rows += [()] * (len(above) + room - len(rows))
    if below:
        rows.append(rule(_heading(entries[place]), width, "enter: in full"))
        rows += [fit(line, width) for line in detail(entries[place], width)[: below - 1]]
    return evolve(empty, rows=tuple(block(rows, width, height)), view=evolve(view, top=top), height=room)


def _title(log: EventLog, entries: Sequence[LogEntry], view: EventsView, width: int) -> Row:
    total = len(_chosen_entries(log, EventsView())) if view.kinds == "all" else len(log.entries)
    whole = view.kinds == "all" and not view.query
    shown = plural(total, "event") if whole else f"{len(entries):,} of {total:,}"
    parts = [view.kinds if view.kinds != "all" else "", f"“{view.query}”" if view.query else "", shown]
    parts.append(f"{log.forgotten:,} older ones in events.jsonl" if log.forgotten and width >= 80 else "")
    parts.append("newest" if view.chosen is None else "not following")
    return rule("Events", width, joined(parts))


def _last_failure(log: EventLog, view: EventsView, width: int) -> list[Row]:
    """Return the newest failure without a later attempt, shown above everything: it must not scroll away."""
    for entry in reversed(log.entries):
        if isinstance(entry.event, training.RunStartEvent):
            break
        if isinstance(entry.event, events.FailureEvent):
            said = f"{DEAD} failure at step {entry.step}: " if entry.step is not None else f"{DEAD} failure: "
            return [fit(row((cut(said + entry.text, width), "bad")), width, "bad")]
    return []


def _columns(entries: Sequence[LogEntry], width: int) -> tuple[int, int, int]:
    """Return the widths of time, step and kind."""
    steps = max(
        (len(f"{entry.step:,}") for entry in (*entries[:1], *entries[-1:]) if entry.step is not None), default=1
    )
    return (8 if width >= 50 else 5), max(4, steps), 11


def _entry_row(entry: LogEntry, columns: tuple[int, int, int], directory: str) -> Row:
    when, steps, kind = columns
    style = style_of(entry)
    sign = DEAD if style == "bad" else STUCK_SIGN if style == "warn" else " "
    step = "" if entry.step is None else f"{entry.step:,}"
    return row(
        (f"{sign} ", style),
        (clock(entry.time)[:when].ljust(when) + " ", "dim"),
        (right(step, steps) + " ", ""),
        (left(entry.kind, kind) + " ", style),
        (
            _GAPS.sub("  ", _below(entry.text, directory)),
            "bad" if style == "bad" else "",
        ),
    )


def _below(text: str, directory: str) -> str:
    """Return a text with paths relative to the run directory, which may have been written under another parent
    folder."""
    name = directory.rpartition("/")[2]
    return re.sub(rf"(?<!\S)\S*/{re.escape(name)}/", "", text) if name else text


def _heading(entry: LogEntry) -> str:
    step = f"step {entry.step:,}" if entry.step is not None else ""
    return joined([entry.kind, step, date(entry.time)])


def _detail_page(empty: EventsPage, width: int, height: int) -> EventsPage:
    view, entry = empty.view, empty.entries[empty.place]
    lines = detail(entry, width)
    room = max(1, height - 1)
    scroll = max(0, min(view.scroll or 0, len(lines) - room))
    part = f"{scroll + 1}–{min(len(lines), scroll + room)} of {len(lines)} lines" if len(lines) > room else "esc: back"
    rows = [rule(_heading(entry), width, part), *lines[scroll : scroll + room]]
    view = evolve(view, scroll=scroll)
    return evolve(empty, rows=tuple(block(rows, width, height)), view=view, height=room, lines=len(lines))


def _log_page(empty: EventsPage, width: int, height: int) -> EventsPage:
    log, view = empty.log, empty.view
    tail = next(tail for tail in log.logs if tail.name == view.log)
    lines = _log_lines(tail, view.query, width)
    room = max(1, height - 1)
    last = max(0, len(lines) - room)
    scroll = last if view.scroll is None else min(view.scroll, last)
    number = [known.name for known in log.logs].index(tail.name) + 1
    notes = [f"“{view.query}”" if view.query else "", f"log {number} of {len(log.logs)}"]
    notes += ["its end only" if tail.cut else "", "newest" if scroll == last else "not following"]
    rows = [rule(printable(tail.name), width, joined(notes)), *lines[scroll : scroll + room]]
    if not lines:
        rows.append(row((" no line with this text" if view.query else " empty", "dim")))
    view = evolve(view, scroll=None if scroll == last else scroll)
    rows, last_entry = block(rows, width, height), len(empty.entries) - 1
    return evolve(empty, rows=tuple(rows), view=view, place=last_entry, height=room, lines=len(lines))


def _log_lines(tail: LogTail, query: str, width: int) -> list[Row]:
    wanted = query.casefold()
    found: list[Row] = []
    for line in tail.lines:
        if wanted not in line.casefold():
            continue
        plain = printable(line.rstrip("\r\n")).replace("\n", " ")
        style = "bad" if "Error" in line or "Traceback" in line else ""
        found += [((piece, style),) for piece in chop_cells(plain, width)]
    return found


def moved(page: EventsPage, by: int) -> EventsView:
    """Move the cursor by some events; in a text longer than the screen, scroll by lines."""
    view = page.view
    if view.log or view.shows == "detail":
        last = max(0, page.lines - page.height)
        begin = (last if view.log else 0) if view.scroll is None else view.scroll
        scroll = max(0, min(last, begin + by))
        return evolve(view, scroll=None if view.log and scroll == last else scroll)
    if not page.entries:
        return view
    place = max(0, min(len(page.entries) - 1, page.place + by))
    newest = place == len(page.entries) - 1 and by > 0
    return evolve(view, chosen=None if newest else page.entries[place].number)


def entered(page: EventsPage) -> EventsView:
    """Show the chosen event in full, and keep it chosen; or return to the list."""
    view = page.view
    if view.log or not page.entries:
        return view
    if view.shows == "detail":
        return evolve(view, shows="list", scroll=None)
    return evolve(view, shows="detail", scroll=None, chosen=page.entries[page.place].number)


def back(page: EventsPage) -> EventsView:
    """Leave a log, else an event in full, else a filter."""
    view = page.view
    if view.log:
        return evolve(view, log="", scroll=None)
    if view.shows == "detail":
        return evolve(view, shows="list", scroll=None)
    return evolve(view, kinds="all", query="")


def other_kinds(page: EventsPage, by: int) -> EventsView:
    """Switch to the next filter: all events, problems, or one of the existing kinds."""
    there = page.log.kinds
    choices = ["all", *(["problems"] if any(kind in there for kind in PROBLEMS) else []), *there]
    at = choices.index(page.view.kinds) if page.view.kinds in choices else 0
    chosen = choices[(at + by) % len(choices)]
    return evolve(page.view, kinds=chosen, log="", shows="list", scroll=None, chosen=None)


def other_log(page: EventsPage) -> EventsView:
    """Switch to the next of: the events, and each of the logs."""
    choices = ["", *(tail.name for tail in page.log.logs)]
    at = choices.index(page.view.log) if page.view.log in choices else 0
    return evolve(page.view, log=choices[(at + 1) % len(choices)], scroll=None)


def searched(page: EventsPage, query: str) -> EventsView:
    """Show only events that contain this text."""
    return evolve(page.view, query=query, shows="list", scroll=None, chosen=None)


def newest(page: EventsPage) -> EventsView:
    """Move to the newest event, and follow new ones."""
    return evolve(page.view, shows="list", chosen=None, scroll=None)
