"""The lines of the first screen, in the columns there are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.content import Content

from xtrain.records.end_status import EndStatus
from xtrain.tui.board.figures import comparison, evaluated, figures
from xtrain.tui.board.head import steps_of
from xtrain.tui.board.schedule import stretches, upcoming, when
from xtrain.tui.event_text import cause, failed
from xtrain.tui.lines.next_steps import command_of_model, going_on, more_of_it, outcome, short_path, succeeded
from xtrain.tui.pages.sheet import left, wrapped
from xtrain.tui.words import decimal, duration, plural, printable, size

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

# A figure with its name, and the columns between two of them.
FIGURE_COLUMNS = 19
# From this width on, the schedule is shown next to the comparison, else below it.
BESIDE_COLUMNS = 76
# A difference from the plan of so much is marked.
OFF = 0.1
_BAND: dict[str, str] = {
    EndStatus.DONE: "$success",
    EndStatus.COMPLETE: "$success",
    EndStatus.STOPPED: "$warning",
    EndStatus.INTERRUPTED: "$warning",
}


def verdict(board: "Board", width: int, *, tall: bool) -> list[Content]:
    """Return how the run ended and what to do next; empty while it is running."""
    if not board.life.over:
        return []
    style = f"bold reverse {_BAND.get(board.life.in_words, '$error')}"
    band = [Content.styled(left(f" {text}", width), style) for text in wrapped(headline(board), width - 2)]
    empty = [Content.styled(" " * width, style)] if tall else []
    said = [Content(f" {text}") for advised in advice(board) for text in wrapped(advised, width - 2)]
    return [*empty, *band, *empty, *said]


def alerts(board: "Board", width: int, *, most: int) -> list[Content]:
    """Return the raised alerts, newest first, one line each."""
    in_headline = ("lost",) if board.life.state == "lost" else ()  # by the verdict, in larger letters
    newest = sorted(
        (alert for alert in board.alerts if alert.kind not in in_headline), key=lambda alert: -(alert.since or 0)
    )
    lines = []
    for alert in newest[:most]:
        ago = f"  {duration(board.now - alert.since)} ago" if alert.since else ""
        text = f" ! {alert.kind.replace('_', ' ')}: {printable(alert.message)}{ago}"
        lines.append(Content.styled(left(text, width).rstrip(), "bold $error"))
    if len(newest) > most > 0:
        lines[-1] = Content.styled(f" ! and {len(newest) - most + 1} more alerts: see Events", "bold $error")
    return lines


def figure_lines(board: "Board", width: int) -> list[Content]:
    """Return the figures in as many columns as fit."""
    cells = []
    for name, value in figures(board):
        cells.append(
            Content.assemble((f" {name} ", "$text-muted"), (left(value, FIGURE_COLUMNS - len(name) - 2), "bold"))
        )
    columns = max(1, width // FIGURE_COLUMNS)
    # As evenly as possible: eight figures are shown as four and four, not as seven and one.
    rows = -(-len(cells) // columns)
    columns = -(-len(cells) // rows)
    wide = width // columns
    rows_of = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    return [Content("").join(each.pad_right(wide - each.cell_length) for each in row) for row in rows_of]


def lower(board: "Board", width: int, rows: int) -> list[Content]:
    """Return the comparison with the plan and the next events, in at most `rows` lines."""
    if width >= BESIDE_COLUMNS:
        left = table(board, rows)
        wide = max((line.cell_length for line in left), default=0) + 3
        right = schedule(board, width - wide - 1, rows)
        empty = Content("")
        pairs = [
            ((left[row] if row < len(left) else empty), (right[row] if row < len(right) else empty))
            for row in range(max(len(left), len(right)))
        ]
        return [a.pad_right(max(0, wide - a.cell_length)) + b for a, b in pairs]
    below = schedule(board, width - 1, max(1, min(4, rows - 4)))
    above = [line.truncate(width, ellipsis=True) for line in table(board, rows - len(below))]
    return [*above, *below]


def table(board: "Board", rows: int) -> list[Content]:
    """Return actual next to planned values, in at most `rows` lines; rows with unknown values are dropped first."""
    known = comparison(board)
    while len(known) > max(1, rows - 1):
        unknown = next((row for row in reversed(known) if row.actual == row.planned), known[-1])
        known = [row for row in known if row is not unknown]
    name, actual = (max(len(getattr(row, key)) for row in known) for key in ("name", "actual"))
    actual = max(actual, len("now"))
    planned = max(len(row.planned) for row in known)
    lines = [Content.styled(f" {'':{name}}  {'now':>{actual}}  planned", "$text-muted")]
    for row in known:
        off = "" if row.off is None else f"  {row.off:+.1%}"
        far = row.off is not None and abs(row.off) >= OFF
        lines.append(
            Content.assemble(
                (f" {row.name:{name}}  ", "$text-muted"),
                (f"{row.actual:>{actual}}", "bold"),
                f"  {row.planned:{planned}}",
                (off, "bold $warning" if far else "$text-muted"),
            )
        )
    return lines


def schedule(board: "Board", width: int, rows: int) -> list[Content]:
    """Return progress, next events, and the last checkpoint and evaluation, in at most `rows` lines; the most important
    are kept."""
    wanted: list[tuple[int, Content]] = []  # (weight, line), in the order in which they are shown
    found = stretches(board)
    if found:
        wanted.append((1, _bar(board, width)))
    if len(found) > 1:
        wanted.append((2, _phases(found)))
    pace = board.run.history.seconds_per_step
    for place, each in enumerate([each for each in upcoming(board) if each.what != "log"][:3]):
        wanted.append((6 - place, _said("next", f"{when(each, pace)}: {each.what}")))
    wanted.append((5, _said("saved", _saved(board))))
    for place, (name, value, step) in enumerate(evaluated(board)[-3:]):
        at = "" if step is None else f" at step {step:,}"
        wanted.append((4 - place, _said("eval", f"{printable(name)} {value}{at}")))
    while len(wanted) > max(0, rows):
        wanted.remove(min(reversed(wanted), key=lambda pair: pair[0]))
    return [line.truncate(max(1, width), ellipsis=True) for _, line in wanted]


def _said(name: str, text: str) -> Content:
    return Content.assemble((f" {name:<5} ", "$text-muted"), text)


def _saved(board: "Board") -> str:
    saved = board.run.checkpoint
    if saved is None:
        return "nothing yet"
    parts = [] if saved.step is None else [f"step {saved.step:,}"]
    parts += [size(saved.bytes)] if saved.bytes is not None else []
    parts += [f"{duration(board.now - saved.time)} ago"] if saved.time is not None else []
    return ", ".join(parts)


def _bar(board: "Board", width: int) -> Content:
    steps = steps_of(board)
    progress = min(1.0, board.step / steps) if steps else 0.0
    said = f" {progress:.1%}"
    wide = max(4, min(40, width - len(said) - 2))
    full = round(progress * wide)
    return Content.assemble(" ", ("█" * full, "$primary"), ("░" * (wide - full), "$text-muted"), said)


def _phases(found: Sequence) -> Content:
    parts: list[Content] = []
    for stretch in found:
        name = printable(stretch.name)
        parts.append(Content.styled(f"[{name}]", "bold") if stretch.now else Content.styled(name, "$text-muted"))
    return Content.assemble((" phase ", "$text-muted")) + Content(" › ").join(parts)


def headline(board: "Board") -> str:
    """Return one line on how the run ended."""
    run, life = board.run, board.life
    if life.state == "lost":
        return f"LOST at step {board.step:,}: {life.why or 'its processes are gone'}"
    why = outcome(run)
    parts = [f"{life.in_words.upper()} after {plural(board.step, 'step')}{_time_taken(board)}"]
    parts += [f"loss {decimal(run.loss, 4)}"] if run.loss is not None else []
    parts += [why] if why else []
    return printable(", ".join(parts))


def _time_taken(board: "Board") -> str:
    """Return ` in 4m02s`; for a resumed run, also the steps of this start."""
    run = board.run
    if run.end is None or run.end.seconds is None:
        return ""
    own = f", the last {board.step - run.first_step:,} of them" if 0 < run.first_step < board.step else ""
    return f"{own} in {duration(run.end.seconds)}"


def advice(board: "Board") -> list[str]:
    """Return what to do next, the most helpful first."""
    run, directory = board.run, board.directory
    if succeeded(run):
        purpose, *command = command_of_model(run, directory)
        more = more_of_it(run)
        return [f"{purpose}: {' '.join(command)}", *([more] if more else [])]
    lines = [f"{failed(failure)}: {cause(failure)}" for failure in run.failures[:1]]
    lines.append(going_on(run))
    if run.status == EndStatus.FAILED or board.life.state == "lost":
        lines.append(f"logs: {short_path(directory / 'logs')}")
    return [printable(text) for text in lines]
