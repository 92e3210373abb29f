"""Records of tests, written down as they stand in files, for whatever takes them as they are read."""

from collections.abc import Iterable
from typing import Any

from xtrain.records.events import event_of
from xtrain.records.lines import Event, Record, read
from xtrain.records.metrics import StepMetrics
from xtrain.tui import event_text as event_texts
from xtrain.tui import state


def typed(found: dict[str, Any]) -> Record:
    return event_of(found) if "event" in found else read(StepMetrics, found)


def reduce(before: state.RunState, found: dict[str, Any]) -> state.RunState:
    return state.reduce(before, typed(found))


def reduce_all(before: state.RunState, found: Iterable[dict[str, Any]]) -> state.RunState:
    return state.reduce_all(before, map(typed, found))


def event_text(found: dict[str, Any]) -> tuple[event_texts.EventText, ...]:
    return event_texts.event_text(event_of(found))


def in_one_line(found: dict[str, Any]) -> str:
    return event_texts.in_one_line(event_of(found))


def events(*found: dict[str, Any]) -> list[Event]:
    return [event_of(each) for each in found]
