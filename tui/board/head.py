"""The lines above the screens: which run, what it is doing and when it ends; and the screens there are."""

from functools import lru_cache
from typing import TYPE_CHECKING

from textual.content import Content

from xtrain.records.end_status import EndStatus
from xtrain.records.server_status import ServerStatus
from xtrain.tui.board.pane import Pane
from xtrain.tui.board.pieces import Piece, line
from xtrain.tui.model.ahead import last_step, seconds_left
from xtrain.tui.pages.server_page import is_old
from xtrain.tui.pages.sheet import left
from xtrain.tui.words import duration, plural, printable

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

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


def state_style(word: str) -> str:
    """Return the style of a word for the state of a run."""
    return _STYLES.get(word, "bold")


def name_of(board: "Board") -> str:
    """Return the name of the run: of its experiment, else of its folder."""
    start, planned = board.run.start, board.planned
    return printable((start.name if start else "") or (planned.name if planned else "") or board.directory.name)


def shortened(text: str, columns: int) -> str:
    """Return `text` in at most `columns` columns."""
    return left(text, columns).rstrip()


def steps_of(board: "Board") -> int | None:
    """Return the number of steps of the run; None where unknown."""
    planned = board.planned.steps if board.planned else None
    return board.run.steps or planned


def unread(seconds: float, *, failing: bool) -> Piece:
    """Return the notice that the view is out of date. seconds: since the files were last read. failing: an error is the
    cause."""
    return Piece(f"files {'cannot be' if failing else 'not'} read for {duration(seconds)}", "reverse $error", 11)


def head(board: "Board", width: int, *, frozen_at: str = "", old: Piece | None = None) -> Content:
    """Return the head line, `width` columns wide. frozen_at: time at which the view was frozen, empty if it is not.
    old: notice of `unread` if files are no longer read; the end of the run is unknown then."""
    run, life, steps = board.run, board.life, steps_of(board)
    word = life.in_words
    share = board.step / steps if steps else None
    left = seconds_left(board) if life.state == "training" and old is None else None
    end = last_step(board)
    until = "ETA" if end is None or steps is None or end >= steps else f"stops at {end:,} in"
    phase = board.series.last.phase
    phases = board.planned.phases if board.planned else ()
    of_steps = f"/{steps:,}" if steps else ""
    raised = f"! {plural(len(board.alerts), 'alert')}" if board.alerts else ""
    name, folder = name_of(board), printable(board.directory.name)
    if board.server is not None:
        return _head_of_server(board, board.server, width, frozen_at, old)
    pieces = (
        Piece(shortened(name, max(16, width // 4)), "bold $primary", 10),
        Piece(word.upper() if life.over else word, state_style(word), 9),
        *([] if old is None else [old]),
        Piece(f"reading {board.loading:.0%}" if board.loading is not None else "", "$warning", 8),
        Piece(f"view frozen {frozen_at}" if frozen_at else "", "reverse $warning", 8),
        Piece(raised, "bold $error", 7),
        Piece(f"phase {printable(phase)}" if phase and len(phases) > 1 else "", "", 2),
        Piece(f"step {board.step:,}{of_steps}", "", 6),
        Piece("" if share is None else f"{min(1.0, share):.1%}", "", 4),
        Piece("" if left is None else f"{until} ~{duration(left)}", "", 5),
        Piece(f"attempt {run.attempt}" if run.attempt > 1 else "", "$text-muted", 1),
        Piece(folder if folder != name else "", "$text-muted", 0),
    )
    return line(pieces, width)


def _head_of_server(board: "Board", server: ServerStatus, width: int, frozen_at: str, old: Piece | None) -> Content:
    word = "lost" if is_old(server, board.now) else server.state
    waiting = f"{server.waiting:,} waiting" if server.waiting else ""
    pieces = (
        Piece(shortened(name_of(board), max(16, width // 4)), "bold $primary", 10),
        Piece(word.upper() if word in ("lost", "failed", "stopped") else word, state_style(word), 9),
        *([] if old is None else [old]),
        Piece(f"view frozen {frozen_at}" if frozen_at else "", "reverse $warning", 8),
        Piece(plural(server.clients, "client"), "", 6),
        Piece(plural(len(server.models), "model"), "", 5),
        Piece(f"{server.requests_per_second:.1f} requests/s", "", 4),
        Piece(waiting, "$warning", 3),
        Piece(server.url, "$text-muted", 2),
    )
    return line(pieces, width)


@lru_cache(maxsize=16)
def tabs(screens: tuple[tuple[int, str, type[Pane]], ...], visited: str, width: int) -> Content:
    """Return the tab line of `screens`, given as (number, name, class); the current one is in brackets, which shows
    without color."""
    labels = [{cls: text(cls) for _, _, cls in screens} for text in (_title, _short, _shortest)]
    pieces: list[Piece] = []
    for words in labels:
        pieces = []
        for number, name, cls in screens:
            label = f"{number} {words[cls]}"
            here = name == visited
            pieces.append(
                Piece(
                    f"[{label}]" if here else f" {label} ",
                    "bold reverse" if here else "$text-muted",
                    weight=2 if here else 1,
                    action=f"app.visit('{name}')",
                )
            )
        if sum(len(piece.text) for piece in pieces) <= width:
            break
    return line(pieces, width, gap="", margin="")


def _title(cls: "type[Pane]") -> str:
    return cls.title


def _short(cls: "type[Pane]") -> str:
    return cls.short


def _shortest(cls: "type[Pane]") -> str:
    """Return the label for a tab line on which all possible screens are present."""
    return cls.short[:3]
