"""What a window over a word says: the reference of it, the value it comes to, and what it costs."""

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.evaluation.evaluate import Definition
from xtrain.dsl.schema.component import registry_of
from xtrain.dsl.syntax.tokens import CONSTANTS, STATEMENTS, Token
from xtrain.lsp.analysis import Analysis
from xtrain.lsp.derived import paths_at, shown
from xtrain.lsp.figures import cost, provenance
from xtrain.lsp.names import Occurrence, occurrence_at
from xtrain.lsp.place import Place, Words, place_at
from xtrain.lsp.reference import code_page, field_of, field_text, page_of, page_text, word_text
from xtrain.lsp.scope import WORDS, Scope
from xtrain.planner.plan import Plan


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
