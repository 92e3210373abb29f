"""One event in full: what it says, texts unshortened, then its other fields as they were written."""

import time

import msgspec

from xtrain.records.control_words import ControlState
from xtrain.records.end_status import EndStatus
from xtrain.records.event import kind_of
from xtrain.records.lines import as_object
from xtrain.records.run_events import (
    AlertEvent,
    ControlEvent,
    FailureEvent,
    RestartEvent,
    RunEndEvent,
    StuckEvent,
    WarningEvent,
)
from xtrain.records.step_events import (
    CheckpointEvent,
    GeneratedText,
    GenerateEvent,
    ModelEvent,
    NonFiniteEvent,
    RollbackEvent,
    SkippedEvent,
)
from xtrain.tui.event_text import event_text
from xtrain.tui.model.event_log import LogEntry
from xtrain.tui.pages.sheet import Row, cells, row, wrapped
from xtrain.tui.words import printable, text

# Problems and near problems, in order of importance.
_PROBLEMS = (
    FailureEvent, StuckEvent, NonFiniteEvent, AlertEvent, RollbackEvent, RestartEvent, SkippedEvent, WarningEvent,
)  # fmt: skip
PROBLEMS = tuple(map(kind_of, _PROBLEMS))
_STYLES = {
    **dict.fromkeys(_PROBLEMS, "warn"), FailureEvent: "bad", StuckEvent: "bad", CheckpointEvent: "good",
    ModelEvent: "good",
}  # fmt: skip
_GOOD_ENDS = (EndStatus.DONE, EndStatus.COMPLETE)
# Fields that the words above have said already.
_SAID = ("event", "step", "time", "traceback", "error", "samples", "message")


def style_of(entry: LogEntry) -> str:
    """Return `bad`, `warn`, `good` or nothing."""
    event = entry.event
    if isinstance(event, RunEndEvent):
        return "good" if event.status in _GOOD_ENDS else "bad" if event.status == EndStatus.FAILED else "warn"
    if isinstance(event, AlertEvent) and event.state == "cleared":
        return "good"
    if isinstance(event, ControlEvent) and event.state == ControlState.REFUSED:
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
    if isinstance(entry.event, GenerateEvent):
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


def _written(sample: GeneratedText, width: int) -> list[Row]:
    """Return the prompt in bold and the generated text, with its own line ends and blanks."""
    prompt = printable(sample.prompt)
    after = printable(sample.text).removeprefix(prompt)
    rows: list[Row] = []
    line: list[tuple[str, str]] = []
    for part, style in ((prompt, "bold"), (after, "")):
        for number, piece in enumerate(part.split("\n")):
            if number:
                rows.append(tuple(line))
                line = []
            while piece:
                room = width - cells(tuple(line))
                if room < 1:
                    rows.append(tuple(line))
                    line = []
                    continue
                first = head(piece, room)
                line.append((first, style))
                piece = piece[len(first) :]
    return [*rows, tuple(line)]


def head(text: str, room: int) -> str:
    """Return as much of a text as fits, at least one character."""
    end = min(len(text), room)
    while end > 1 and cells(((text[:end], ""),)) > room:
        end -= 1
    return text[:end]


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(one)}" for key, one in value.items())
    return text(value)
