"""Lines above the screens: the run, its state and its end; and the next phases and ticks."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from attrs import frozen
from rich.cells import cell_len
from textual.content import Content

from xtrain.records.names import EndStatus
from xtrain.records.status import ServerStatus
from xtrain.text.units import duration, plural, printable
from xtrain.tui.board.pane import Pane
from xtrain.tui.model.board import Board, last_step, next_step, seconds_left
from xtrain.tui.model.planned import Planned
from xtrain.tui.pages.figures import name_of, shortened, steps_of
from xtrain.tui.pages.server_page import is_old


@frozen
class Piece:
    """Part of a line. weight: of parts that do not all fit, those with the least weight are left out."""

    text: str
    style: str = ""
    weight: int = 0
    action: str = ""
    """Action of the application that a click runs; empty: none."""

    @property
    def content(self) -> Content:
        style = f"{self.style} @click={self.action}".strip() if self.action else self.style
        return Content.styled(self.text, style)


def line(pieces: Iterable[Piece], width: int, *, gap: str = "  ", margin: str = " ") -> Content:
    """Return the pieces that fit in `width` columns, in their order."""
    fitting = [piece for piece in pieces if piece.text]
    while len(fitting) > 1 and _columns(fitting, gap, margin) > width:
        # With equal weights, the last is dropped first.
        fitting.pop(min(reversed(range(len(fitting))), key=lambda place: fitting[place].weight))
    content = Content(margin) + Content(gap).join(piece.content for piece in fitting)
    return content.truncate(max(1, width), ellipsis=True)


def _columns(pieces: Sequence[Piece], gap: str, margin: str) -> int:
    return cell_len(margin) + sum(cell_len(piece.text) for piece in pieces) + cell_len(gap) * (len(pieces) - 1)


def stack(lines: Iterable[Content]) -> Content:
    """Join lines from top to bottom."""
    return Content("\n").join(lines)


# In which style a word for the state of a run is shown; the word itself says it without any.
_STYLES = {
    "training": "bold $success",
    "serving": "bold $success",
    EndStatus.DONE: "bold $success",
    EndStatus.COMPLETE: "bold $success",
    "paused": "bold $warning",
    EndStatus.STOPPED: "bold $warning",
    EndStatus.INTERRUPTED: "bold $warning",
    EndStatus.FAILED: "bold reverse $error",
    "lost": "bold reverse $error",
}


def unread(seconds: float, *, failing: bool) -> Piece:
    """Return the notice that the view is out of date. seconds: since the files were last read. failing: an error is the
    cause."""
    return Piece(f"files {'cannot be' if failing else 'not'} read for {duration(seconds)}", "reverse $error", 11)


def head(board: Board, width: int, *, frozen_at: str = "", old: Piece | None = None) -> Content:
    """Return the head line, `width` columns wide. frozen_at: time at which the view was frozen, empty if it is not.
    old: notice of `unread` if files are no longer read; the end of the run is unknown then."""
    server, name = board.server, name_of(board)
    if server is None:
        word, over = board.life.in_words, board.life.over
        pieces = _about_run(board, with_end=old is None)
    else:
        word = "lost" if is_old(server, board.now) else server.state
        over, pieces = word in ("lost", "failed", "stopped"), _about_server(server)
    first = (
        Piece(shortened(name, max(16, width // 4)), "bold $primary", 10),
        Piece(word.upper() if over else word, _STYLES.get(word, "bold"), 9),
        *([] if old is None else [old]),
        Piece(f"reading {board.loading:.0%}" if board.loading is not None and server is None else "", "$warning", 8),
        Piece(f"view frozen {frozen_at}" if frozen_at else "", "reverse $warning", 8),
    )
    return line((*first, *pieces), width)


def _about_run(board: Board, *, with_end: bool) -> tuple[Piece, ...]:
    run, steps = board.run, steps_of(board)
    share = board.step / steps if steps else None
    left = seconds_left(board) if board.life.state == "training" and with_end else None
    end = last_step(board)
    until = "ETA" if end is None or steps is None or end >= steps else f"stops at {end:,} in"
    phase = board.series.last.phase
    several_phases = board.planned is not None and len(board.planned.phases) > 1
    folder = printable(board.directory.name)
    return (
        Piece(f"! {plural(len(board.alerts), 'alert')}" if board.alerts else "", "bold $error", 7),
        Piece(f"phase {printable(phase)}" if phase and several_phases else "", "", 2),
        Piece(f"step {board.step:,}{f'/{steps:,}' if steps else ''}", "", 6),
        Piece("" if share is None else f"{min(1.0, share):.1%}", "", 4),
        Piece("" if left is None else f"{until} ~{duration(left)}", "", 5),
        Piece(f"attempt {run.attempt}" if run.attempt > 1 else "", "$text-muted", 1),
        Piece(folder if folder != name_of(board) else "", "$text-muted", 0),
    )


def _about_server(server: ServerStatus) -> tuple[Piece, ...]:
    return (
        Piece(plural(server.clients, "client"), "", 6),
        Piece(plural(len(server.models), "model"), "", 5),
        Piece(f"{server.requests_per_second:.1f} requests/s", "", 4),
        Piece(f"{server.waiting:,} waiting" if server.waiting else "", "$warning", 3),
        Piece(server.url, "$text-muted", 2),
    )


@lru_cache(maxsize=16)
def tabs(screens: tuple[tuple[int, str, type[Pane]], ...], visited: str, width: int) -> Content:
    """Return the tab line of `screens`, given as (number, name, class); the current one is in brackets, which shows
    without color."""
    pieces: list[Piece] = []
    for shorten in (lambda cls: cls.title, *(lambda cls, most=most: cls.short[:most] for most in (5, 3, 2))):
        pieces = []
        for number, name, cls in screens:
            label, here = f"{number} {shorten(cls)}", name == visited
            text, style = (f"[{label}]", "bold reverse") if here else (f" {label} ", "$text-muted")
            pieces.append(Piece(text, style, weight=2 if here else 1, action=f"app.visit('{name}')"))
        if sum(len(piece.text) for piece in pieces) <= width:
            break
    return line(pieces, width, gap="", margin="")


@frozen
class Next:
    """Next event of a tick. in_steps: steps from now; None where the clock decides."""

    what: str
    in_steps: int | None
    every_seconds: float | None = None


def upcoming(board: Board) -> list[Next]:
    """Return the next event of each tick, nearest first; ticks by the clock come last."""
    planned, step, last = board.planned, board.step, last_step(board)
    if planned is None or board.life.over:
        return []
    found = []
    for tick in planned.ticks:
        at = next_step(tick, planned.step_tokens, step)
        what = _of_nodes(tick.nodes) + (", then stop" if tick.stop else "")
        found.append(Next(what, None if at is None else at - step, tick.seconds))
    known = [each for each in found if each.in_steps is None or last is None or step + each.in_steps <= last]
    if last is not None and last > step:
        known += _at_last(planned, last, last - step, stops=last != steps_of(board))
    return sorted(known, key=lambda each: math.inf if each.in_steps is None else each.in_steps)


def _at_last(planned: Planned, last: int, in_steps: int, *, stops: bool) -> list[Next]:
    """Return the events after the last step of this start. stops: the run stops before its end."""
    event = "stop_at" if stops else "finish"
    if stops and any(tick.stop and next_step(tick, planned.step_tokens, last - 1) == last for tick in planned.ticks):
        return []  # a tick that stops the run says so itself
    found = next((trigger for trigger in planned.triggers if trigger.event == event), None)
    if found is None and not stops:
        return []
    nodes = _of_nodes(found.nodes) if found else ""
    return [Next(("the stop" if stops else "the end") + (f": {nodes}" if nodes else ""), in_steps)]


def _of_nodes(nodes: tuple[str, ...]) -> str:
    names = [node.removeprefix("tick.").removeprefix("event.finish.").removeprefix("event.stop_at.") for node in nodes]
    return printable(", ".join(names).replace(".", " "))


def when(each: Next, seconds_per_step: float | None) -> str:
    """Return `in 15 steps (8s)`, `every 10m00s`."""
    if each.in_steps is None:
        return f"every {duration(each.every_seconds)}"
    about = "" if seconds_per_step is None else f" ({duration(each.in_steps * seconds_per_step)})"
    return f"in {plural(each.in_steps, 'step')}{about}"


def stretches(board: Board) -> list[tuple[str, bool]]:
    """Return the phases of the run in order, and True for the one that it is in; empty while its length is unknown."""
    planned, steps = board.planned, steps_of(board)
    if planned is None or not steps:
        return []
    begins = [min(1.0, p.fraction or 0.0 if p.first is None else p.first / steps) for p in planned.phases]
    done = board.step / steps
    ends = [*begins[1:], 1.0]
    return [
        (phase.name, begin <= done < end or (done >= 1 and end == 1))
        for phase, begin, end in zip(planned.phases, begins, ends, strict=True)
    ]
