"""The outline of a file: its blocks, constants, ticks and events, with what is inside them."""

from attrs import frozen

from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.syntax import tree as s
from xtrain.lsp.analysis import Analysis


@frozen
class Symbol:
    """A symbol. kind: `block`, `setting`, `constant`, `file`, `event`. span: the whole symbol. name_span: its name."""

    name: str
    kind: str
    span: Span
    name_span: Span
    detail: str = ""
    inner: tuple["Symbol", ...] = ()


def symbols(analysis: Analysis, path: str) -> list[Symbol]:
    """Return the outline of a file of the spec; empty if its blocks nest deeper than Python's stack (X130)."""
    reading = analysis.loaded.reading
    tree = next((each for each in reading.trees if each.source.path == path), None) if reading is not None else None
    try:
        return [found for item in (tree.items if tree is not None else ()) for found in _symbol(item)]
    except RecursionError:
        return []


def _symbol(item: s.Item) -> list[Symbol]:
    match item:
        case s.Block(kind=kind, labels=labels, body=body, span=span):
            name = " ".join([kind.text, *(label.span.text for label in labels)])
            inner = tuple(found for each in (body.items if body is not None else ()) for found in _symbol(each))
            return [Symbol(name, "block", span, kind.span, inner=inner)]
        case s.Assign(name=name, value=value, span=span):
            return [Symbol(name.text, "setting", span, name.span, _line(value.span.text))]
        case s.Let(name=name, value=value, span=span) | s.Param(name=name, value=value, span=span):
            return [Symbol(name.text, "constant", span, name.span, _line(value.span.text))]
        case s.Include(path=target, span=span):
            return [Symbol(target.value or '""', "file", span, target.span, "include")]
        case s.Use(target=target, span=span):
            return [Symbol(target.span.text, "file", span, target.span, "use")]
        case s.Every(span=span, period=period, actions=actions):
            return [Symbol(f"every {_line(period.span.text)}", "event", span, period.span, _actions(actions))]
        case s.On(span=span, event=event, actions=actions):
            return [Symbol(f"on {event.text}", "event", span, event.span, _actions(actions))]
        case _:
            return []


def _actions(actions: tuple[s.Block, ...]) -> str:
    heads = (" ".join([each.kind.text, *(label.span.text for label in each.labels)]) for each in actions)
    return " then ".join(heads)


def _line(text: str) -> str:
    """Return a text in one short line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
