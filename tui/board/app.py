"""The application: one run, its screens and their keys, themes, and ASCII signs for terminals without UTF-8."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.cells import cell_len
from rich.segment import Segment
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.color import Color
from textual.events import Resize
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import ContentSwitcher

from xtrain.records.names import ControlState, ControlWord
from xtrain.regular_files import read_regular
from xtrain.text.units import printable
from xtrain.tui.board import reading as fault
from xtrain.tui.board.actions import (
    LeaveQuestion,
    answers,
    command_line,
    confirm,
    datasets,
    is_starting,
    refusal,
    which_dataset,
    word_of,
)
from xtrain.tui.board.head import Piece, head, line, tabs, unread
from xtrain.tui.board.help import HelpScreen, all_groups, app_keys, keys_of
from xtrain.tui.board.pane import Pane, TextBlock
from xtrain.tui.board.plot import terminal_glyphs
from xtrain.tui.board.reading import BackgroundReader
from xtrain.tui.board.terminal import NUMBERS, pane_classes
from xtrain.tui.curves.canvas import UNICODE
from xtrain.tui.model.board import Board
from xtrain.tui.pages.comparison import RunColors

DARK = Theme(
    name="dark",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#e0af68",
    success="#73c991",
    warning="#e5c07b",
    error="#f7768e",
    foreground="#d5d9e0",
    background="#15171c",
    surface="#1c1f26",
    panel="#262a33",
)
LIGHT = Theme(
    name="light",
    primary="#0b57d0",
    secondary="#6a3fb5",
    accent="#8a5300",
    success="#146c2e",
    warning="#8a5300",
    error="#b3261e",
    foreground="#1b1c1f",
    background="#fbfbfd",
    surface="#f1f2f5",
    panel="#e2e4ea",
    dark=False,
)
# White on black, and one hue each for good and bad; nothing is dimmed.
CONTRAST = Theme(
    name="contrast",
    primary="#ffffff",
    secondary="#ffffff",
    accent="#ffff00",
    success="#00ff5f",
    warning="#ffff00",
    error="#ff5f5f",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#262626",
    text_alpha=1.0,
)
THEMES = (DARK, LIGHT, CONTRAST)
MOST_THEME_BYTES = 64


def after(name: str) -> str:
    """Return the name of the theme that follows `name`."""
    names = [theme.name for theme in THEMES]
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


def remembered_theme(file: Path) -> str | None:
    """Return the theme that a file remembers."""
    with suppress(OSError, UnicodeDecodeError):
        remembered = read_regular(file, MOST_THEME_BYTES).decode().strip()
        if remembered in [theme.name for theme in THEMES]:
            return remembered
    return None


def first_theme(file: Path, light: bool | None = None) -> str:
    """Return the theme that a file remembers; without one, the theme for the terminal's background. light: the
    terminal's answer; None: the environment says it (COLORFGBG), and otherwise it is taken for dark."""
    if light is None:
        light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    return remembered_theme(file) or (LIGHT.name if light else DARK.name)


_SIGNS = {
    "█▉▊▋▌": "#", "░": ":", "▒": "=", "▓": "%", "▍▎▏▐": "|", "▀▔": "-", "▁▂▃▄▅▆▇": "_", "▶": "*", "▸›→": ">",
    "◀◂‹←": "<", "▾▼↓": "v", "▴▲↑": "^", "─━═–—−": "-", "│┃║": "|", "╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝": "+", "·": ".", "•": "-",
    "…": "~", "×✗": "x", "✓": "+", "“”": '"', "‘’": "'", "µ": "u", "●○■□◆◇": "o",
}  # fmt: skip
_TABLE = str.maketrans({sign: plain for unicode, plain in _SIGNS.items() for sign in unicode})


class PlainSigns(LineFilter):
    """Line filter that leaves only ASCII on the screen, each sign as wide as before."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(in_ascii(text), style, control) for text, style, control in segments]


def in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = text.replace(" · ", " - ").translate(_TABLE)
    return text if text.isascii() else "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in text)


# Ages and clocks move on although nothing was written.
CLOCK_SECONDS = 1.0
# Without a newer board for so long, the top line says that the files are not read.
UNREAD_SECONDS = 2.0
SMALLEST = (40, 12)


class Polled(Message):
    """Message that the reading thread has a newer board."""


class BoardScreen(Screen):
    """The one screen that holds all panes. Its Tab goes to the next pane, not to the next widget."""

    BINDINGS = [  # noqa: RUF012
        Binding("tab", "app.next(1)", "next screen", show=False),
        Binding("shift+tab", "app.next(-1)", "previous screen", show=False),
    ]


class BoardApp(App[int]):
    """Dashboard application of the run in `directory`.

    compared: further runs, for the Compare screen. first: name of the screen that is shown first. launcher: process
    that started the run and this dashboard; with it, leaving asks what to do with the run. no_color: use only the
    terminal's own two colors. theme_file: file that remembers the theme; without it, the theme is dark. light: True or
    False for the terminal's background, if it is known.

    `board` is the board that panes were given last; while the view is frozen, newer boards are read and not shown.
    """

    TITLE = "xtrain"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "narrow"), (80, "wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "short"), (30, "tall")]  # noqa: RUF012
    CSS = """
    Screen { layout: vertical; }
    #head, #keys { background: $panel; }
    #screens { height: 1fr; }
    #tiny { display: none; height: 1fr; }
    .tiny #tiny { display: block; }
    .tiny #head, .tiny #tabs, .tiny #screens, .tiny #keys { display: none; }
    Toast { max-width: 90%; padding: 0 1; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("question_mark", "help", "help", tooltip="all keys"),
        Binding("q", "quit", "quit", tooltip="close the dashboard; training continues"),
        Binding("ctrl+c", "leave", "leave", show=False, priority=True, tooltip="close the dashboard, as q"),
        Binding("space", "freeze", "freeze", tooltip="freeze or unfreeze the view"),
        *(
            Binding(str(place), f"visit('{name}')", name, show=False, tooltip=f"the screen {name.capitalize()}")
            for name, place in NUMBERS.items()
            if name != "server"
        ),
        Binding("n", "app.focus_next", "next pane", show=False, tooltip="the next pane of a screen that has several"),
        Binding("slash", "filter", "filter", show=False, tooltip="filter the events"),
        Binding("S", f"ask('{ControlWord.SAVE}')", ControlWord.SAVE, tooltip="save now"),
        Binding("E", f"ask('{ControlWord.EVAL}')", ControlWord.EVAL, tooltip="evaluate now"),
        Binding("P", f"ask('{ControlWord.PROFILE}')", ControlWord.PROFILE, tooltip="profile some steps"),
        Binding("W", f"ask('{ControlWord.PAUSE}')", ControlWord.PAUSE, tooltip="pause or resume"),
        Binding("X", f"ask('{ControlWord.STOP}')", ControlWord.STOP, tooltip="stop after a checkpoint"),
        Binding("t", "theme", "theme", tooltip="another theme: dark, light, high contrast"),
        Binding("ctrl+z", "suspend_process", "shell", show=False, tooltip="suspend to the shell; fg returns"),
    ]

    def __init__(
        self,
        directory: Path,
        *,
        compared: Sequence[Path] = (),
        first: str = "",
        launcher: int | None = None,
        no_color: bool = False,
        theme_file: Path | None = None,
        light: bool | None = None,
    ) -> None:
        super().__init__(ansi_color=True if no_color else None)
        self.directory = directory
        self.compared = tuple(compared)
        self.run_colors = RunColors()
        self.launcher = launcher
        self.board: Board | None = None
        self.live: Board | None = None
        self.visited = ""
        self.frozen_at = ""
        self.fault: Path | None = None
        self._wanted: str | None = first or None
        self._signs = () if terminal_glyphs() is UNICODE else (PlainSigns(),)
        self._kinds = pane_classes()
        self._panes: dict[str, Pane] = {}
        self._drawn: tuple[str, int] | None = None
        self._drawn_at = 0.0
        self._toasted: set[str] = set()
        self._faulty: set[str] = set()
        self._read_fault_shown = False
        self._head, self._tabs, self._keys_line, self._tiny = (
            TextBlock(id=id) for id in ("head", "tabs", "keys", "tiny")
        )
        self._switcher = ContentSwitcher(id="screens")
        self._reading = BackgroundReader(directory, lambda: self.post_message(Polled()))
        for theme in THEMES:
            self.register_theme(theme)
        self._theme_file = theme_file
        self.theme = first_theme(theme_file, light) if theme_file else THEMES[0].name

    def get_default_screen(self) -> Screen:
        return BoardScreen(id="_default")

    def get_line_filters(self) -> Sequence[LineFilter]:
        return (*super().get_line_filters(), *self._signs)

    def compose(self) -> ComposeResult:
        yield from (self._head, self._tabs, self._switcher, self._keys_line, self._tiny)

    def on_mount(self) -> None:
        self._reading.start()
        self.set_interval(CLOCK_SECONDS, self._look_after_reading)

    def on_unmount(self) -> None:
        self._reading.close()

    async def on_polled(self) -> None:
        """Show a newer board, unless the view is frozen."""
        self.live = self._reading.take()
        if self.live is None or not self.screen_stack:  # without a screen it is being closed
            return
        if not self.frozen_at:
            self.board = self.live
        for alert in self.live.alerts:
            if alert.id not in self._toasted:
                self._toasted.add(alert.id)
                title = alert.kind.replace("_", " ")
                self.notify(alert.message, title=title, severity="error", timeout=10, markup=False)
        if self._wanted and self._has(self._wanted):
            await self.action_visit(self._wanted)
        elif not self.visited:
            await self._go("overview" if self.board is None or self.board.server is None else "server")
        self.draw()

    @property
    def has_no_screen(self) -> bool:
        """True if no screen is left to draw on: pending messages still arrive after that."""
        return not self.screen_stack

    def _look_after_reading(self) -> None:
        """Report a reader that hangs or fails. A hanging disk blocks the reading thread, and an error may recur at
        every read; nothing else would report that the view is out of date."""
        if self.has_no_screen:
            return
        if self._reading.faults and not self._read_fault_shown:
            self._read_fault_shown = True
            self.fault = self._reading.fault
            message = f"reading the run failed and is tried again; details are in {self.fault}"
            self.notify(message, title="dashboard error", severity="error", timeout=20, markup=False)
        if self._old() is not None:
            self._draw_head()

    def _old(self) -> Piece | None:
        seconds = self._reading.unread_seconds
        return unread(seconds, failing=bool(self._reading.faults)) if seconds > UNREAD_SECONDS else None

    # Drawing

    def _draw_head(self) -> None:
        old, width = self._old(), self.size.width
        if self.live is not None:
            self._head.show(head(self.live, width, frozen_at=self.frozen_at, old=old))
        elif old is not None:
            self._head.show(line([Piece(printable(self.directory.name), "bold $primary"), old], width))

    def draw(self, *, anew: bool = False) -> None:
        """Update the screen. anew: also draw unchanged parts, as after a resize."""
        board, live = self.board, self.live
        if board is None or live is None or not self.screen_stack:
            return
        width = self.size.width
        self._draw_head()
        self._tabs.show(tabs(self._screens(), self.visited, width))
        self._keys_line.show(line(self._keys(), width))
        drawn, now = (self.visited, board.version), time.monotonic()
        clocks = now - self._drawn_at >= CLOCK_SECONDS and not self.frozen_at
        if anew or clocks or drawn != self._drawn:
            self._drawn, self._drawn_at = drawn, now
            self._draw_pane(board)

    def _draw_pane(self, board: Board) -> None:
        pane = self._panes.get(self.visited)
        if pane is None:
            return
        try:
            pane.show(board)
        except Exception as error:  # a screen that cannot be drawn leaves the others
            if self.visited in self._faulty:
                return
            self._faulty.add(self.visited)
            self.fault = fault.write(error)
            message = f"{pane.title} cannot be drawn; details are in {self.fault}"
            self.notify(message, title="dashboard error", severity="error", timeout=20, markup=False)

    def _screens(self) -> tuple[tuple[int, str, type[Pane]], ...]:
        """Return the screens that this run has, with their numbers."""
        known = ((number, name, self._kinds[name]) for name, number in NUMBERS.items() if self._has(name))
        return tuple(sorted(known, key=lambda screen: screen[0]))

    def _has(self, name: str) -> bool:
        cls = self._kinds.get(name)
        return cls is not None and self.board is not None and cls.available(self.board)

    def _keys(self) -> tuple[Piece, ...]:
        here = list(self.focused.ancestors_with_self) if self.focused else [self._panes.get(self.visited)]
        return (*app_keys(self.live, view_is_frozen=bool(self.frozen_at)), *keys_of(here))

    def on_resize(self, event: Resize) -> None:
        if self.has_no_screen:
            return
        width, height = event.size
        self.screen_stack[0].set_class(width < SMALLEST[0] or height < SMALLEST[1], "tiny")
        hint = f"{width}×{height}: needs {SMALLEST[0]}×{SMALLEST[1]}"
        self._tiny.show(line([Piece(hint, "bold")], width))
        self.call_after_refresh(self.draw, anew=True)

    # Going about

    async def action_visit(self, name: str) -> None:
        """Go to a screen, if this run has it."""
        if name == "overview" and self.board is not None and self.board.server is not None:
            name = "server"
        if self.board is None:
            self._wanted = name
        elif self._has(name):
            self._wanted = None
            await self._go(name)
        else:
            self.notify(f"this run has no data for {name}", severity="warning")

    async def _go(self, name: str) -> None:
        if self.has_no_screen:
            return
        if name not in self._panes:
            self._panes[name] = self._kinds[name](id=name)
            await self._switcher.mount(self._panes[name])
        self.visited = self._switcher.current = name
        self.screen_stack[0].set_focus(
            next((widget for widget in self._panes[name].query("*") if widget.can_focus), None)
        )
        self.call_after_refresh(self.draw, anew=True)

    async def action_next(self, by: int) -> None:
        """Go to the screen next to this one."""
        names = [name for _, name, _ in self._screens()]
        if names:
            place = names.index(self.visited) if self.visited in names else 0
            await self.action_visit(names[(place + by) % len(names)])

    async def action_filter(self) -> None:
        """Go to the events, and let the reader type."""
        await self.action_visit("events")
        if self.visited == "events":
            await self._panes["events"].run_action("search")

    def action_freeze(self) -> None:
        """Freeze or unfreeze the view."""
        self.frozen_at = "" if self.frozen_at else time.strftime("%H:%M:%S")
        if not self.frozen_at:
            self.board = self.live
        self.draw(anew=True)

    def action_theme(self) -> None:
        """Switch to the next theme, and remember it."""
        self.theme = after(self.theme)
        if self._theme_file is not None:
            with suppress(OSError):  # a home directory that is read-only keeps no theme
                self._theme_file.parent.mkdir(parents=True, exist_ok=True)
                self._theme_file.write_text(self.theme, encoding="utf-8")

    def action_help(self) -> None:
        """Show all keys, those of this screen first."""
        panes = sorted((cls for _, _, cls in self._screens()), key=lambda cls: cls is not self._kinds[self.visited])
        bindings = (binding for binding in self.BINDINGS if isinstance(binding, Binding))
        possible = (binding for binding in bindings if self.check_action(binding.action, ()))
        everywhere = [*possible, *BoardScreen.BINDINGS]
        self.push_screen(HelpScreen(all_groups(everywhere, panes, self._panes.get(self.visited), self.live)))

    # Asking the run

    @work(exclusive=True, group="question")
    async def action_ask(self, word: str) -> None:
        """Ask the reader, then the run."""
        action = ControlWord(word)
        board = self.live
        why = refusal(board, action)
        if board is None or why:
            self.notify(why, title=f"{action}: not now", severity="warning", markup=False)
            return
        dataset = datasets(board)[0][0] if action == ControlWord.EVAL else ""
        if action == ControlWord.EVAL and (which := which_dataset(board)):
            dataset = await self.push_screen_wait(which)
            if not dataset:
                return
        answer = await self.push_screen_wait(confirm(board, action, dataset))
        if answer:
            self.ask_run(word_of(board, action), answer if action == ControlWord.PROFILE else dataset)

    @work(thread=True, group="asking", exit_on_error=False)
    def ask_run(self, word: str, argument: str = "") -> None:
        """Ask the run, and show its answers as they come."""
        title = f"{word} {argument}".strip()
        for answer in answers(command_line(self.directory, word, argument)):
            at = "" if answer.step is None else f"step {answer.step:,}"
            detail = ": ".join(filter(None, (at, answer.detail)))
            severity: Literal["information", "error"]
            severity = "information" if answer.state in (ControlState.ACCEPTED, ControlState.DONE) else "error"
            self.call_from_thread(
                self.notify, detail, title=f"{title}: {answer.state}", severity=severity, timeout=8, markup=False
            )

    # Leaving

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse to suspend a dashboard that a launcher waits for: nobody would resume it."""
        return self.launcher is None if action == "suspend_process" else super().check_action(action, parameters)

    async def action_quit(self) -> None:
        self.action_leave()

    def action_leave(self) -> None:
        """Leave. If the run was started from here, ask first what to do with it; a second request leaves at once."""
        over = self.live is not None and self.live.life.over
        if self.launcher is None or over or isinstance(self.screen, LeaveQuestion):
            self.exit(0)
        else:
            self._ask_before_leaving(self.launcher)

    @work(exclusive=True, group="question")
    async def _ask_before_leaving(self, launcher: int) -> None:
        answer = await self.push_screen_wait(LeaveQuestion(starting=is_starting(self.live)))
        if answer == "leave":
            self.exit(0)
        elif answer == ControlWord.STOP and is_starting(self.live):
            # Before its first step a run accepts signals only; they do what the plan has for `sigterm`.
            os.kill(launcher, signal.SIGTERM)
        elif answer == ControlWord.STOP:
            self.ask_run(ControlWord.STOP)

    def _handle_exception(self, error: Exception) -> None:
        """Close the dashboard after an unhandled exception, written to a file; print no traceback."""
        self.fault = fault.write(error)
        self._return_code = 1
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
        self._close_messages_no_wait()

    def panic(self, *renderables: object) -> None:
        """Close the dashboard when one of Textual's own threads fails; print nothing of `renderables`."""
        self._handle_exception(RuntimeError("a Textual thread has failed: the terminal can no longer be read"))
