"""The keys of a plot, and the mouse on it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from xtrain.tui.board import plot as plot_module
from xtrain.tui.board.plot import Line, Plot, terminal_glyphs
from xtrain.tui.curves.canvas import ASCII, UNICODE

LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")
STEPS = np.arange(10.0, 2001.0, 10.0)
LOSS = 2 + np.exp(-STEPS / 300)


class Alone(App[None]):
    def compose(self) -> ComposeResult:
        yield Plot()


def driven(script: Callable[[Plot, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 16)) -> None:
    """Run `script` on a plot of one line that has the focus."""

    async def main() -> None:
        app = Alone()
        async with app.run_test(size=size) as pilot:
            plot = app.query_one(Plot)
            plot.show([Line("loss", STEPS, LOSS)], title="loss")
            plot.focus()
            await pilot.pause()
            await script(plot, pilot)

    asyncio.run(main())


def test_every_key() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        assert plot.text.startswith("loss  2.001")
        await pilot.press("l")
        assert plot.view.log and plot.text.startswith("loss  log  2.001")
        await pilot.press("l", "s")
        assert not plot.view.log and plot.text.startswith("loss  smoothed 0.9  2.001")
        await pilot.press("s", "s", "s")
        assert plot.view.smoothing == 0
        await pilot.press("plus")
        assert plot.view.seen((10, 2000)) == (1005, 2000) and "zoomed" in plot.text
        await pilot.press("left")
        assert plot.view.seen((10, 2000)) == (756.25, 1751.25)
        await pilot.press("shift+left")
        assert plot.view.seen((10, 2000)) == (10, 1005)
        await pilot.press("right", "minus")
        assert plot.view.span is None
        await pilot.press("plus", "0")
        assert plot.view.span is None

    driven(script)


def test_the_cursor_reads_what_the_file_says() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        await pilot.press("c")
        assert f"step 2,000  {float(LOSS[-1])!r}" in plot.text.split("\n")[0]
        await pilot.press("left")
        moved = plot.view.cursor
        assert moved == 1990
        await pilot.press("shift+left", "shift+left", "right")
        place = int(np.searchsorted(STEPS, plot.view.cursor))
        assert f"step {int(STEPS[place]):,}  {float(LOSS[place])!r}" in plot.text
        await pilot.press("c")
        assert plot.view.cursor is None and "│" not in plot.text.split("\n")[3][10:]

    driven(script)


def test_the_mouse() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        await pilot.click(Plot, offset=(40, 5))
        assert plot.view.cursor is not None and abs(plot.view.cursor - 1000) < 60
        await pilot.press("c")
        await pilot._post_mouse_events([plot_module.events.MouseScrollUp], Plot, offset=(40, 5), button=0)
        low, high = plot.view.seen((10, 2000))
        assert 10 < low < 1000 < high < 2000
        await pilot.mouse_down(Plot, offset=(40, 5))
        await pilot.hover(Plot, offset=(30, 5))
        await pilot.mouse_up(Plot, offset=(30, 5))
        assert plot.view.seen((10, 2000))[0] > low and plot.view.cursor is None
        for _ in range(9):
            await pilot._post_mouse_events([plot_module.events.MouseScrollDown], Plot, offset=(40, 5), button=0)
        assert plot.view.span is None

    driven(script)


def test_lines_that_grow_are_followed_and_choices_kept() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        await pilot.press("s")
        plot.show([Line("loss", np.append(STEPS, 4000.0), np.append(LOSS, 7.5))], title="loss")
        await pilot.pause()
        assert plot.text.startswith("loss  smoothed 0.9  7.5") and "4k" in plot.text
        await pilot.press("plus")
        plot.show([Line("loss", STEPS * 1e6, LOSS)], title="loss", x_label="tokens")
        await pilot.pause()
        # Another axis: the part that was seen is none of it.
        assert plot.view.span is None and plot.view.smoothing == 0.9

    driven(script)


def test_the_same_lines_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        real = plot_module.draw
        monkeypatch.setattr(plot_module, "draw", lambda *given, **named: drawn.append(1) or real(*given, **named))
        for _ in range(5):
            plot.show([Line("loss", STEPS, LOSS)], title="loss")
            await pilot.pause()
        assert not drawn
        plot.show([Line("loss", STEPS, LOSS + 1)], title="loss")
        await pilot.pause()
        assert plot.text and len(drawn) == 1

    driven(script)


def test_without_any_line_no_key_does_harm() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        plot.show([], title="eval loss")
        await pilot.press("l", "s", "plus", "minus", "left", "right", "0", "c", "shift+right")
        await pilot.click(Plot, offset=(3, 3))
        assert "no values yet" in plot.text

    driven(script)


def test_signs_follow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        encoding = "utf-8"

    for name in ("LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    monkeypatch.setattr(plot_module.sys, "__stdout__", Stream)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_glyphs() is UNICODE
    monkeypatch.setenv("TERM", "linux")
    assert terminal_glyphs() is ASCII
    monkeypatch.setenv("TERM", "xterm")
    Stream.encoding = "iso8859-1"
    assert terminal_glyphs() is ASCII


@pytest.mark.parametrize(("settings", "glyphs"), [
    ({"LC_ALL": "C"}, ASCII),
    ({"LC_ALL": "POSIX", "PYTHONUTF8": "1"}, ASCII),
    ({"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "1"}, ASCII),
    ({"LC_ALL": "C.UTF-8"}, UNICODE),
    ({"LC_ALL": "xx_XX.utf8"}, UNICODE),  # not installed
    ({"LC_ALL": "", "LC_CTYPE": "C.UTF-8", "LANG": "C"}, UNICODE),
    ({"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, ASCII),
])  # fmt: skip
def test_signs_follow_the_locale_whatever_python_writes(
    settings: dict[str, str], glyphs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {name: value for name, value in os.environ.items() if name not in LOCALE}
    environment = bare | {"TERM": "xterm"} | settings
    # The interpreter decides before it runs anything; of this package little is needed for what it has decided.
    code = "import locale, sys; print(sys.stdout.encoding, locale.getencoding())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    class Stream:
        encoding, charset = done.stdout.split()

    for name in LOCALE:
        monkeypatch.setenv(name, environment.get(name, ""))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(plot_module.sys, "__stdout__", Stream)
    monkeypatch.setattr(plot_module.locale, "getencoding", lambda: Stream.charset)
    assert terminal_glyphs() is glyphs


def test_the_head_tells_a_newer_value_than_the_curve_has(monkeypatch) -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        before, widths = plot.text.split("\n"), {len(row) for row in plot.text.split("\n")}
        monkeypatch.setattr(plot_module, "draw", None)  # the curve is not drawn anew for it
        plot.show_newest([1.5])
        now = plot.text.split("\n")
        assert now[0].startswith("loss  1.500") and now[1:] == before[1:]
        assert {len(row) for row in now} == widths
        assert [strip.text for strip in plot._strips] == now
        monkeypatch.undo()
        await pilot.press("c")  # what is read at the cursor is of the curve
        assert repr(float(LOSS[-1])) in plot.text

    driven(script)


def test_a_head_that_needs_more_rows_has_everything_drawn_anew() -> None:
    async def script(plot: Plot, pilot: Pilot[None]) -> None:
        plot.show([Line(f"a line {i}", STEPS, LOSS) for i in range(2)], title="loss")
        heads = plot_heads(plot)
        plot.show_newest([1e-300] * 2)
        assert "1.0000e-300" in plot.text and plot_heads(plot) > heads
        assert len(plot.text.split("\n")) == plot.size.height

    driven(script, (44, 16))


def plot_heads(plot: Plot) -> int:
    return [("│" in row or "┤" in row) for row in plot.text.split("\n")].index(True)
