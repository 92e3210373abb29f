"""Overview screen: health of the run, figures against the plan, and the time left."""

import time
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content

from xtrain.records.names import EndStatus
from xtrain.text.units import duration, printable, size
from xtrain.tui.board.head import stack, stretches, upcoming, when
from xtrain.tui.board.pane import Pane, RefreshLimiter, TextBlock
from xtrain.tui.board.plot import Line, Plot
from xtrain.tui.model.board import Board
from xtrain.tui.pages.figures import advice, comparison, evaluated, figures, headline, steps_of
from xtrain.tui.pages.sheet import left, wrapped

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


def verdict(board: Board, width: int, *, tall: bool) -> list[Content]:
    """Return how the run ended and what to do next; empty while it is running."""
    if not board.life.over:
        return []
    style = f"bold reverse {_BAND.get(board.life.in_words, '$error')}"
    band = [Content.styled(left(f" {text}", width), style) for text in wrapped(headline(board), width - 2)]
    empty = [Content.styled(" " * width, style)] if tall else []
    said = [Content(f" {text}") for advised in advice(board) for text in wrapped(advised, width - 2)]
    return [*empty, *band, *empty, *said]


def alerts(board: Board, width: int, *, most: int) -> list[Content]:
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


def figure_lines(board: Board, width: int) -> list[Content]:
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


def lower(board: Board, width: int, rows: int) -> list[Content]:
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


def table(board: Board, rows: int) -> list[Content]:
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


def schedule(board: Board, width: int, rows: int) -> list[Content]:
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


def _saved(board: Board) -> str:
    saved = board.run.checkpoint
    if saved is None:
        return "nothing yet"
    parts = [] if saved.step is None else [f"step {saved.step:,}"]
    parts += [size(saved.bytes)] if saved.bytes is not None else []
    parts += [f"{duration(board.now - saved.time)} ago"] if saved.time is not None else []
    return ", ".join(parts)


def _bar(board: Board, width: int) -> Content:
    steps = steps_of(board)
    progress = min(1.0, board.step / steps) if steps else 0.0
    said = f" {progress:.1%}"
    wide = max(4, min(40, width - len(said) - 2))
    full = round(progress * wide)
    return Content.assemble(" ", ("█" * full, "$primary"), ("░" * (wide - full), "$text-muted"), said)


def _phases(found: Sequence[tuple[str, bool]]) -> Content:
    parts = [
        Content.styled(f"[{printable(name)}]", "bold") if now else Content.styled(printable(name), "$text-muted")
        for name, now in found
    ]
    return Content.assemble((" phase ", "$text-muted")) + Content(" › ").join(parts)


# Rows that a plot needs to say anything, and rows that leave space for bands and more alerts.
PLOT_ROWS = 6
TALL_ROWS = 26
# From this width on, the gradient norm has its own plot next to the loss.
TWO_PLOTS_COLUMNS = 120
EVAL_LINES = 3
# A curve of hours does not change to the eye in a quarter of a second, and is what costs most to draw.
PLOT_SECONDS = 1.0


class OverviewPane(Pane):
    """Overview screen: main figures, loss, and comparison with the plan."""

    title = "Overview"
    short = "Over"
    DEFAULT_CSS = """
    OverviewPane { layout: vertical; }
    OverviewPane #plots { height: 1fr; }
    OverviewPane #plots Plot { width: 2fr; }
    OverviewPane #plots #norm-plot { width: 1fr; margin-left: 2; }
    """

    @classmethod
    def available(cls, board: Board) -> bool:
        return board.server is None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: tuple[str, ...] = ()
        self._plotted: tuple[object, ...] = ()
        self._plotted_at = 0.0
        self._sparing = RefreshLimiter()

    def compose(self) -> ComposeResult:
        yield TextBlock(id="verdict")
        yield TextBlock(id="alerts")
        yield TextBlock(id="figures")
        with Horizontal(id="plots"):
            yield Plot(id="loss-plot")
            yield Plot(id="norm-plot")
        yield TextBlock(id="lower")

    def show(self, board: Board) -> None:
        """Draw `board`: text takes the rows it needs; the plot takes the rest if that is enough."""
        width, height = self.size
        if not width or not height:
            return
        tall = height >= TALL_ROWS
        above: dict[str, list[Content]] = {}
        left = height
        for name, lines in (
            ("verdict", verdict(board, width, tall=tall)),
            ("alerts", alerts(board, width, most=4 if tall else 1)),
            ("figures", figure_lines(board, width)),
        ):
            above[name] = lines[:left]
            left -= len(above[name])
        below = lower(board, width, max(0, left - PLOT_ROWS))
        plots = left - len(below) >= PLOT_ROWS and len(board.series) > 1
        if not plots:
            below = lower(board, width, left)[:left]
        for name, lines in (*above.items(), ("lower", below)):
            self._put(name, lines)
        self.query_one("#plots").display = plots
        if plots:
            self._plot_in_time(board, width, height)
            self.query_one("#loss-plot", Plot).show_newest([board.series.latest(key) for key in self._lines])
            self.query_one("#norm-plot", Plot).show_newest([board.series.latest("grad_norm")])

    def _put(self, name: str, lines: "list[Content]") -> None:
        self.query_one(f"#{name}", TextBlock).show(stack(lines), rows=len(lines))

    def _plot_in_time(self, board: Board, width: int, height: int) -> None:
        """Draw the curves if they have changed and it is time again; at once where their space is another."""
        space, version = (id(board.series), width, height), board.series.version
        if self._plotted[:1] == (space,):
            early = time.monotonic() - self._plotted_at < PLOT_SECONDS or not self._sparing.due
            if early or self._plotted == (space, version):
                return
        self._plotted, self._plotted_at = (space, version), time.monotonic()
        with self._sparing.spending():
            self._plot(board, width)

    def _plot(self, board: Board, width: int) -> None:
        series = board.series
        lines = [Line(key, *series.xy(key)) for key in _minimised(board)]
        evaluations = [key for key in series.keys if key.startswith("eval/") and key.endswith("/loss")]
        for key in evaluations[:EVAL_LINES]:
            name = "eval" if len(evaluations) == 1 else f"eval {key.split('/')[1]}"
            lines.append(Line(name, *series.xy(key)))
        self._lines = (*_minimised(board), *evaluations[:EVAL_LINES])
        self.query_one("#loss-plot", Plot).show(lines, title="loss")
        second = self.query_one("#norm-plot", Plot)
        second.display = width >= TWO_PLOTS_COLUMNS
        if second.display:
            second.show([Line("grad norm", *series.xy("grad_norm"))], title="gradient norm")


def _minimised(board: Board) -> tuple[str, ...]:
    """Return the keys of the loss and, where another value is minimized, of the objective."""
    last = board.series.last
    return ("loss", "objective") if last.objective not in (None, last.loss) else ("loss",)
