"""The line that moves: what start-up is doing, then how far training is."""

import math

from attrs import frozen
from rich.cells import cell_len
from rich.text import Text

from xtrain.tui.event_text import failed
from xtrain.tui.state import RunState
from xtrain.tui.words import count, decimal, duration, printable, size, took

MIN_BAR, GOOD_BAR, MAX_BAR = 8, 20, 60
# Parts of a higher rank are left out rather than make the bar shorter than a good one.
LAST_ESSENTIAL_RANK = 4
# Without a record for this many times the usual gap (and this many seconds), the line says how long it has been.
QUIET_GAPS, QUIET_SECONDS = 5, 10


@frozen(kw_only=True)
class BarGlyphs:
    """Characters of progress lines; done and remaining differ in shape, so that they can be distinguished without
    color."""

    spinner: str
    done: str
    to_do: str
    tick: str
    cross: str


UNICODE = BarGlyphs(spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", done="━", to_do="─", tick="✓", cross="✗")
ASCII = BarGlyphs(spinner="|/-\\", done="=", to_do="-", tick="+", cross="x")


@frozen
class _Part:
    text: Text
    rank: int
    """Parts with the lowest ranks are kept when the line is narrow."""


def progress_line(state: RunState, *, width: int, now: float, quiet: float, glyphs: BarGlyphs = UNICODE) -> Text:
    """Return the line at unix time `now`, `quiet` seconds after the last record, in fewer than `width` cells."""
    if state.failures:
        return _spinning(f"{failed(state.failures[0])} failed, waiting for the others to end", quiet, now, glyphs)
    if state.restarting:
        return _spinning("restarting the ranks", quiet, now, glyphs)
    if not state.history.origin:
        return _waiting(state, now=now, quiet=quiet, glyphs=glyphs)
    return _training(state, width=width, now=now, quiet=quiet, glyphs=glyphs)


def _waiting(state: RunState, *, now: float, quiet: float, glyphs: BarGlyphs) -> Text:
    """Return a spinner, what is running, and for how long."""
    node = state.under_way
    if node is not None:
        what, since = short_node(node.node), node.began
    elif state.seconds_left is not None:
        what, since = (
            f"training, about {duration(state.seconds_left)} left at step {state.step:,}",
            state.setup_done_time,
        )
    elif state.setup_seconds is not None:
        what, since = "waiting for the first step", state.setup_done_time
    else:
        what, since = ("starting" if state.start else "waiting for the run to begin"), None
    # A clock that differs between machines must not show a start-up node as hours old or yet to come.
    elapsed = quiet if since is None or not 0 <= now - since < 86400 else now - since
    return _spinning(what, elapsed, now, glyphs)


def _spinning(what: str, elapsed: float, now: float, glyphs: BarGlyphs) -> Text:
    turn = int(now * 10) if math.isfinite(now * 10) else 0  # a clock that a record claims can be anything
    spinner = glyphs.spinner[turn % len(glyphs.spinner)]
    return Text.assemble(" ", (spinner, "cyan"), " ", (printable(what), "bold"), "  ", (duration(elapsed), "dim"))


def _training(state: RunState, *, width: int, now: float, quiet: float, glyphs: BarGlyphs) -> Text:
    parts = _parts(state, quiet=quiet)
    # One blank for the cursor at the left, one unused column at the right.
    room = width - 2 - MIN_BAR
    fitting: list[_Part] = []
    for part in sorted(parts, key=lambda part: part.rank):
        cells = cell_len(part.text.plain) + 2
        spare = 0 if part.rank <= LAST_ESSENTIAL_RANK else GOOD_BAR - MIN_BAR
        if cells + spare > room:
            break
        room -= cells
        fitting.append(part)
    bar_width = min(MAX_BAR, MIN_BAR + room)
    bar = _bar(state.progress, bar_width, glyphs) if state.progress is not None else _pulse(now, bar_width, glyphs)
    shown = [part.text for part in parts if part in fitting]
    return Text("  ").join([Text(" ").append_text(bar), *shown])


def _parts(state: RunState, *, quiet: float) -> list[_Part]:
    """Return all parts of a wide line, in order."""
    last = state.history.last
    steps = f"{state.steps:,}" if state.steps else ""
    at = f"{state.step:,}"
    parts = [
        _Part(Text(f"{at:>{len(steps)}}/{steps}" if steps else f"step {at}", "bold"), 0),
        _Part(_labelled("loss", decimal(last.loss, 4), 6), 1),
    ]
    if last.reward is not None:
        parts.append(_Part(_labelled("reward", decimal(last.reward, 3), 5), 1))
    if state.progress is not None:
        parts.insert(1, _Part(Text(f"{state.progress:>4.0%}"), 5))
    if state.epoch:
        parts.append(_Part(Text(f"epoch {state.epoch}"), 4))
    if last.lr is not None:
        parts.append(_Part(_labelled("lr", f"{last.lr:.2e}", 8), 4))
    if last.grad_norm is not None:
        parts.append(_Part(_labelled("grad", decimal(last.grad_norm, 2), 4), 6))
    if last.tokens_per_second is not None:
        parts.append(_Part(Text(f"{count(last.tokens_per_second):>6} tok/s"), 3))
    if last.mfu is not None:
        parts.append(_Part(_labelled("mfu", f"{last.mfu:.0%}", 3), 7))
    if last.memory_bytes:
        parts.append(_Part(Text(size(last.memory_bytes)), 8))
    if last.phase:
        parts.append(_Part(Text(printable(last.phase), "dim"), 9))
    if state.signal:
        parts.append(_Part(Text(f"{printable(state.signal)}, stopping", "yellow"), 2))
    elif quiet > max(QUIET_SECONDS, QUIET_GAPS * (state.history.gap or 0)):
        parts.append(_Part(Text(f"no step for {duration(quiet)}", "yellow"), 2))
    elif state.seconds_left is not None:
        parts.append(_Part(Text(f"{duration(state.seconds_left):>6} left", "cyan"), 2))
    elif state.history.seconds_per_step is not None:
        parts.append(_Part(Text(f"{took(state.history.seconds_per_step)}/step", "cyan"), 2))
    return parts


def _labelled(label: str, value: str, width: int) -> Text:
    """Return `label value`, the value padded so that the line does not move from step to step."""
    return Text.assemble((f"{label} ", "dim"), f"{value:>{width}}")


def _bar(progress: float, width: int, glyphs: BarGlyphs) -> Text:
    done = int(progress * width)
    return Text.assemble((glyphs.done * done, "cyan"), (glyphs.to_do * (width - done), "dim"))


def _pulse(now: float, width: int, glyphs: BarGlyphs) -> Text:
    """Return a block that moves back and forth: running, with an unknown end."""
    block = max(2, width // 5)
    way = width - block
    at = int(now * 10) % (2 * way)
    before = at if at <= way else 2 * way - at
    return Text.assemble(
        (glyphs.to_do * before, "dim"), (glyphs.done * block, "cyan"), (glyphs.to_do * (way - before), "dim")
    )


def short_node(node: str) -> str:
    """Return a start-up node's id without `setup.`, which they all share."""
    return node.removeprefix("setup.")
