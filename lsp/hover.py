"""Hover and inlay hints: the reference of a word, its value, where the value is from, and its cost."""

from collections.abc import Callable
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Span
from xtrain.dsl.evaluation.evaluate import FUNCTIONS, Definition
from xtrain.dsl.evaluation.values import Value, quantity_text
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Tick
from xtrain.dsl.schema.component import registry_of
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.syntax.tree import CONSTANTS, STATEMENTS, Token
from xtrain.dsl.values import Quantity, hidden
from xtrain.lazy_attrs import frozen
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.names import Occurrence, occurrence_at
from xtrain.lsp.place import (
    OPERATORS,
    WORDS,
    Place,
    Scope,
    Words,
    code_page,
    field_of,
    field_text,
    page_of,
    page_text,
    place_at,
    word_text,
)
from xtrain.plan.plan import Plan, Provenance
from xtrain.plan.views import headroom
from xtrain.text.units import amount_in_epochs, bytes_text, count_text, flops_text, plural, seconds_text, times_text

Figure = Callable[[Plan], str]


def _steps(plan: Plan) -> str:
    timeline = plan.timeline
    if timeline.steps is None:
        return amount_in_epochs(timeline.epochs) if timeline.epochs is not None else ""
    return plural(timeline.steps, "step") + (f", {count_text(timeline.tokens)} tokens" if timeline.tokens else "")


def _duration(plan: Plan) -> str:
    times, steps = plan.estimates.times, plan.timeline.full_steps
    return seconds_text(times.step * steps) if times is not None and steps is not None else ""


def _traffic(plan: Plan) -> str:
    sent = sum(each.bytes for each in headroom(plan).worst.traffic)
    return f"{bytes_text(sent)} sent a step and rank" if sent else ""


FIGURES: Final[dict[str, Figure]] = {
    "checkpoint": lambda plan: f"{bytes_text(plan.estimates.checkpoint_bytes)} a checkpoint",
    "duration": _duration,
    "flops": lambda plan: f"{flops_text(plan.estimates.flops_per_token)} a token",
    "memory": lambda plan: f"{bytes_text(headroom(plan).worst.memory.total_bytes)} a rank",
    "parameters": lambda plan: f"{count_text(plan.parameters.total)} parameters",
    "ranks": lambda plan: plural(plan.mesh.world_size, "rank"),
    "states": lambda plan: f"{bytes_text(headroom(plan).worst.memory.optimizer)} of optimizer state a rank",
    "step": lambda plan: f"{seconds_text(plan.estimates.times.step)} a step" if plan.estimates.times else "",
    "steps": _steps,
    "tokens": lambda plan: f"{count_text(plan.estimates.tokens_per_step)} tokens a step",
    "traffic": _traffic,
}
# Block → figures that its settings change.
FIGURES_OF: Final[dict[str, tuple[str, ...]]] = {
    "experiment": ("steps", "duration"),
    "launch": ("ranks", "step"),
    "cluster": ("memory", "step"),
    "model": ("parameters", "flops", "memory", "step"),
    "adapter": ("parameters", "memory", "step"),
    "batch": ("tokens", "memory", "step"),
    "optimizer": ("states", "memory"),
    "loss": ("memory", "step"),
    "ema": ("memory",),
    "precision": ("memory", "step"),
    "parallel": ("ranks", "memory", "traffic", "step"),
    "activation": ("memory", "flops", "step"),
    "scheduler": ("steps",),
    "phase": ("steps",),
    "checkpoint": ("checkpoint",),
}


def cost(plan: Plan, block: str) -> str:
    """Return the plan's figures that this kind of block affects; empty for other blocks and for a server."""
    if plan.serves:
        return ""
    return " · ".join(text for name in FIGURES_OF.get(block, ()) if (text := FIGURES[name](plan)))


def times(plan: Plan, tick: Tick) -> str:
    """Return how often a tick with a period in steps or tokens runs in the whole run; empty for other periods."""
    every, ops = tick.every, {node.id: node.op for node in plan.nodes}
    for each in plan.timeline.ticks:
        amount = each.steps if every.unit == "steps" else each.tokens if every.unit == "tokens" else None
        ran = {ops[node] for node in each.nodes}
        if amount == every.value and each.count is not None and any(f"tick.{a.kind}" in ran for a in tick.actions):
            return times_text(each.count)
    return ""


def provenance(plan: Plan) -> dict[str, Provenance]:
    """Return the provenance of every value of a plan by its path."""
    return {entry.path: entry for entry in plan.provenance}


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


@frozen
class Hover:
    """A hover text. span: the word it describes. text: Markdown."""

    span: Span
    text: str


def hover(analysis: Analysis, path: str, offset: int, plan: Plan | None) -> Hover | None:
    """Return the hover of the word at an offset. plan: None if the spec has errors."""
    words = analysis.words(path)
    token = words.at(offset) if words is not None else None
    if words is None or token is None or words.in_comment(offset):
        return None
    parts = [*_reference(analysis, words, token, plan), *_diagnosed(analysis, token.span)]
    named = occurrence_at(analysis, path, offset)
    if named is not None and (text := _named(analysis, named, plan)) is not None:
        parts = [text, *parts] if named.kind != "dataset" or named.defines is False else [*parts, text]
    return Hover(token.span, "\n\n---\n\n".join(parts)) if parts else None


def _reference(analysis: Analysis, words: Words, token: Token, plan: Plan | None) -> list[str]:
    """Return the reference of a word of the language, and the plan's values for it."""
    place = place_at(words, token.start)
    scopes = analysis.scopes
    scope, item = scopes.scope(place), place.item
    behind = _following(words, token)
    setting = scopes.setting(place)
    if token.type in STATEMENTS.values() or (token.text in STATEMENTS and not item and behind != "_EQ"):
        page = page_of(token.text, None)
        return [page_text(page)] if page is not None else _some(word_text("statement", token.text))
    if token.type == "NUMBER":
        return _number(analysis, words, token, setting, plan)
    if not item and behind == "_EQ" and place.inner.kind in ("block", "call"):
        return _setting(analysis, scope, token, words, plan)
    if place.inner.kind == "block" and not item:
        return _block(analysis, scope, token, plan)
    if item and item[0].type in ("EVERY", "ON"):
        return _trigger(analysis, place, token)
    if token.text in CONSTANTS:
        found = _some(word_text("constant", token.text))
        return [*_value(analysis, words, token, plan), *found]
    chosen = next((each for each in scopes.calls(setting) if token.text in each), None)
    if chosen is not None:
        page = page_of(token.text, chosen[token.text])
        return [page_text(page)] if page is not None else []
    if setting is None and item and item[0].type in WORDS:
        return _label(scopes.block_of(scope, item[0].text), token)
    if behind == "LPAR" and (text := word_text("function", token.text)) is not None:
        return [text]
    return _value(analysis, words, token, plan)


def _setting(analysis: Analysis, scope: Scope, token: Token, words: Words, plan: Plan | None) -> list[str]:
    """Return the value, cost and reference of a setting by its name."""
    if scope.block is None and token.text == "collate":
        return _some(word_text("statement", "collate"))
    field = field_of(scope.path, scope.block, token.text, scope.label)
    after = [each for each in words.tokens if each.start > token.start and each.type != "_EQ"]
    value = _value(analysis, words, after[0], plan) if after else []
    return [*value, *([field_text(field)] if field is not None else [])]


def _value(analysis: Analysis, words: Words, token: Token, plan: Plan | None) -> list[str]:
    """Return the resolved value, and the cost of the decisions of its block."""
    name = paths_at(analysis, words.source.path).get(token.start)
    if name is None or plan is None:
        return []
    entry = provenance(plan).get(name)
    block = name.partition(".")[0]
    costs = cost(plan, block)
    if entry is None:
        return [f"→ {costs}"] if costs else []
    how = f" ({entry.how})" if entry.how else ""
    return [f"**{entry.path}: {entry.value}**{how}" + (f" → {costs}" if costs else "")]


def _number(
    analysis: Analysis, words: Words, token: Token, setting: tuple[Scope, str] | None, plan: Plan | None
) -> list[str]:
    found = _value(analysis, words, token, plan)
    if setting is not None and (field := field_of(setting[0].path, setting[0].block, setting[1], setting[0].label)):
        found.append(field_text(field))
    return found


def _block(analysis: Analysis, scope: Scope, token: Token, plan: Plan | None) -> list[str]:
    """Return the word that opens a block."""
    block = analysis.scopes.block_of(scope, token.text)
    path = f"{scope.path}.{token.text}" if scope.path else token.text
    page = page_of(path, block)
    costs = cost(plan, path.partition(".")[0]) if plan is not None else ""
    return [*([f"→ {costs}"] if costs else []), *([page_text(page)] if page is not None else [])]


def _trigger(analysis: Analysis, place: Place, token: Token) -> list[str]:
    if place.item[0].type == "ON" and len(place.item) == 1:
        return _some(word_text("event", token.text))
    page = page_of(token.text, blocks.ACTIONS.get(token.text)) if token.text in blocks.ACTIONS else None
    return [page_text(page)] if page is not None else []


def _label(block: type | None, token: Token) -> list[str]:
    """Return the docstring of a component named after the word that opens its block."""
    registry = registry_of(block) if block is not None else None
    if registry is None or token.text not in registry:
        return []
    return [" ".join((registry[token.text].__doc__ or "").split())]


def _named(analysis: Analysis, named: Occurrence, plan: Plan | None) -> str | None:
    """Return the text of a user-defined name: a constant's value, a dataset's share, a function's purpose."""
    if isinstance(named.owner, Definition):
        value = named.owner.value
        text = shown(value) if value is not None else None
        written = named.owner.expression.span.text
        return f"`{named.kind} {named.name} = {written}`" + (f" = **{text}**" if text not in (None, written) else "")
    if named.owner is not None:
        return f"`@{named.owner.kind}` {named.name}" + (f": {named.owner.does}" if named.owner.does else "")
    if plan is None:
        return None
    entry = provenance(plan).get(f"dataset.{named.name}.source")
    shares = [
        f"{phase.name}: {phase.shares[named.name]:.3g}" for phase in plan.timeline.phases if named.name in phase.shares
    ]
    if entry is None:
        return None
    return f"dataset **{named.name}**: {entry.value}" + (f" · share of rows {', '.join(shares)}" if shares else "")


def _diagnosed(analysis: Analysis, span: Span) -> list[str]:
    """Return the pages of the diagnostics here."""
    there = [
        d
        for d in analysis.diagnostics
        if d.span is not None and d.span.source is span.source and d.span.start < span.end and d.span.end > span.start
    ]
    pages = (code_page(code) for code in dict.fromkeys(d.code for d in there))
    return [page for page in pages if page is not None]


def _following(words: Words, token: Token) -> str:
    """Return the type of the next token."""
    return next((each.type for each in words.tokens if each.start >= token.end and each is not token), "$END")


def _some(text: str | None) -> list[str]:
    return [text] if text is not None else []
