"""The Experts screen: how tokens fall on the experts of a mixture."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding

from xtrain.tui.board.plot import Line, Plot
from xtrain.tui.board.rows_pane import RowsPane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.pages import expert_page
from xtrain.tui.pages.expert_loads import LayerLoad, layer_loads
from xtrain.tui.pages.expert_page import ExpertsPage, ExpertsView, page
from xtrain.tui.words import whole

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

AUX_LOSS = "moe/aux_loss"
# The plot takes the rows that the map leaves, within these limits; with fewer rows it replaces the map.
_PLOT_ROWS, _MOST_PLOT_ROWS = 7, 26


class ExpertsSheet(Sheet):
    """Expert map; it has the keys of the screen."""


class ExpertsPane(RowsPane[ExpertsView, ExpertsPage]):
    """Experts screen: load of every expert of every layer, relative to an even load, and the balance loss."""

    title = "Experts"
    short = "MoE"
    keys = expert_page

    DEFAULT_CSS = """
    ExpertsPane { layout: vertical; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next layer", show=False),
        Binding("up,k", "do('moved', -1)", "previous layer", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
        Binding("home", "do('moved', -1000000)", "first layer", show=False),
        Binding("end", "do('moved', 1000000)", "last layer", show=False),
        Binding("o", "do('reordered')", "order", tooltip="the most uneven layer first, or by number"),
        Binding("a", "plot", "aux loss", tooltip="only the load-balancing loss, and back"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(ExpertsView(), id=id)
        self._loads: tuple[LayerLoad, ...] = ()
        self._facts: list[str] = []
        self._version: object = None
        self._only_plot = False

    @classmethod
    def available(cls, board: "Board") -> bool:
        planned = board.planned
        if planned is not None and (whole(_architecture(board).get("experts")) or 0) > 1:
            return True
        return AUX_LOSS in board.series.keys or any(key.startswith("moe/") for key in board.series.last.rest)

    def compose(self) -> ComposeResult:
        yield ExpertsSheet()
        yield Plot()

    def show(self, board: "Board") -> None:
        if board.series.version == self._version:
            return
        self._version = board.series.version
        # A record without loads, as of a step that was skipped, leaves those that were there.
        self._loads = layer_loads(board.series.last.rest) or self._loads
        self._facts = _facts(board, self._loads)
        x, y = board.series.xy(AUX_LOSS)
        self.query_one(Plot).show([Line("aux loss", x, y)], title="aux loss (1: balanced)")
        self._draw()

    def _draw(self) -> None:
        sheet, plot = self.query_one(ExpertsSheet), self.query_one(Plot)
        width, height = self.content_size
        if not width or not height:
            return
        wanted = 12 + max(1, len(self._loads))
        rows = min(_MOST_PLOT_ROWS, max(_PLOT_ROWS, height - wanted))
        beside = height - wanted >= _PLOT_ROWS or height >= 30
        sheet.display = not self._only_plot
        plot.display = self._only_plot or beside
        plot.styles.height = "1fr" if self._only_plot else rows
        room = height - (rows if beside else 0)
        self._page = page(self._loads, self._view, width, max(1, room), facts=self._facts)
        self._view = self._page.view
        sheet.draw(self._page.rows)

    def action_plot(self) -> None:
        """Toggle a view of the balance loss alone."""
        self._only_plot = not self._only_plot
        self._draw()
        (self.query_one(Plot) if self._only_plot else self.query_one(ExpertsSheet)).focus()


def _architecture(board: "Board") -> dict[str, object]:
    found = board.planned.content.get("architecture") if board.planned else None
    return found if isinstance(found, dict) else {}


def _facts(board: "Board", loads: tuple[LayerLoad, ...]) -> list[str]:
    """Return `4 layers of 8 experts`, `2 a token`, `step 60`."""
    planned, parts = _architecture(board), []
    if loads:
        parts.append(f"{len(loads)} {'layer' if len(loads) == 1 else 'layers'} of {loads[0].num_experts} experts")
    if taken := whole(planned.get("experts_per_token")):
        parts.append(f"{taken} a token")
    step = board.series.last.step
    return [*parts, f"step {step:,}"] if step is not None else parts
