"""Which value of a spec stands where: from offsets of a text to the paths of a plan, and what they come to."""

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.env_text import hidden
from xtrain.dsl.evaluation.functions import FUNCTIONS
from xtrain.dsl.evaluation.values import Value, quantity_text
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.spec_text import value_text
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.figures import provenance, times
from xtrain.lsp.scope import OPERATORS

_PLAIN = (bool, int, float, str)


@frozen
class Hint:
    """An inlay hint: `text`, shown after the offset `at`. why: the source of the value."""

    at: int
    text: str
    why: str = ""


def paths_at(analysis: Analysis, path: str) -> dict[int, str]:
    """Return offset of a value in this file → its path in a plan."""
    spec = analysis.spec
    found: dict[int, str] = {}
    for name, origin in (spec.origins if spec is not None else {}).items():
        span = origin.span
        is_block = name in blocks.KINDS or name.endswith(".name")
        if span is not None and span.source.path == path and not is_block:
            found.setdefault(span.start, name)
    return found


def hints(analysis: Analysis, path: str) -> list[Hint]:
    """Return inlay hints: values of computed constants, `auto`, expressions and omitted settings, and how often ticks
    run."""
    found = _constants(analysis, path)
    plan, spec = analysis.known_plan, analysis.spec
    source = analysis.source(path)
    if plan is None or spec is None or source is None:
        return found
    entries = provenance(plan)
    placed = set[str]()
    for name, entry in entries.items():
        origin = spec.origins.get(name)
        span = origin.span if origin is not None else None
        if span is None or span.source.path != path:
            continue
        placed.add(name)
        if entry.origin == "derived" and span.text == "auto":
            found.append(Hint(span.end, f" = {entry.value}", entry.how))
        elif entry.origin in ("let", "param") or (entry.origin == "text" and _is_sum(analysis, span)):
            found.append(Hint(span.end, f" = {entry.value}", f"from `{span.text}`"))
    for kind in blocks.KINDS:
        head = spec.origins.get(kind)
        if head is None or head.span is None or head.span.source.path != path:
            continue
        unsaid = [
            entry
            for name, entry in entries.items()
            if entry.origin == "derived" and name.startswith(f"{kind}.") and not _is_written(analysis, name)
        ]
        if unsaid:
            text = ", ".join(f"{e.path.removeprefix(f'{kind}.')} = {e.value}" for e in unsaid)
            why = "\n".join(f"{e.path} = {e.value}: {e.how}" for e in unsaid)
            found.append(Hint(head.span.end, f"  {text}", why))
    for number, tick in enumerate(spec.ticks):
        head = spec.origins[f"every.{number}"].span
        if head is not None and head.source.path == path and (text := times(plan, tick)):
            found.append(Hint(head.end, f" ({text})", "in the whole run"))
    return sorted(found, key=lambda each: each.at)


def shown(value: Value) -> str | None:
    """Return a value as spec text; None unless it is a number or a text."""
    data = value.data
    if isinstance(data, Quantity):
        return quantity_text(data)
    if isinstance(data, str):
        return value_text(hidden(data))
    return value_text(data) if isinstance(data, _PLAIN) or data is None else None


def _is_written(analysis: Analysis, name: str) -> bool:
    origin = analysis.spec.origins.get(name) if analysis.spec is not None else None
    return origin is not None and origin.span is not None


def _is_computed(analysis: Analysis, span: Span) -> bool:
    """Return True if a text is computed: it has an operator, a function or a name."""
    words = analysis.words(span.source.path)
    tokens = [token for token in words.tokens if span.start <= token.start < span.end] if words is not None else []
    if not tokens or tokens[0].type in ("LSQB", "LBRACE", "STRING"):
        return False
    if tokens[0].type == "NAME":
        return len(tokens) == 1 or tokens[1].type in OPERATORS or tokens[0].text in FUNCTIONS
    return any(token.type in OPERATORS for token in tokens[1:])


def _is_sum(analysis: Analysis, span: Span) -> bool:
    """Return True if a text is computed and is not a word of a setting."""
    return not span.text.isidentifier() and _is_computed(analysis, span)


def _constants(analysis: Analysis, path: str) -> list[Hint]:
    """Return the values of `let` and `param` whose expressions are computed."""
    reading = analysis.loaded.reading
    found = []
    for definition in reading.definitions if reading is not None else ():
        span, value = definition.expression.span, definition.value
        if span.source.path != path or value is None or not _is_computed(analysis, span):
            continue
        text = shown(value)
        if text is not None:
            found.append(Hint(span.end, f" = {text}", f"`{definition.kind}` {definition.name.text}"))
    return found
