"""The place of a cursor in a spec: brackets and tokens around it, its block and setting, and their reference."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args

import attrs
from attrs import field

from xtrain.dsl.checking.user_parts import DeclaredParts
from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.reference.reference import Field, ReferencePage, every_page
from xtrain.dsl.reference.text import TopicWord, words
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.component import Registry, is_call, members_of, registry_of, variant
from xtrain.dsl.schema.data import Weight
from xtrain.dsl.schema.data_components import LINKS
from xtrain.dsl.schema.setting import Setting, open_setting, settings_of
from xtrain.dsl.syntax.layout import layout_tokens
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.dsl.syntax.tree import CLOSERS, OPENERS, SEPARATORS, Token
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.lazy_attrs import frozen

BracketKind = Literal["block", "map", "call", "list"]
_ENDS_MAP_OR_BLOCK = ("block", "map")
# Before a `{` these announce a value, as in the parser.
_BEFORE_A_MAP = ("_EQ", "_COLON", "_ARROW", "LPAR", "LSQB")


@frozen
class Bracket:
    """An open bracket. kind: what it holds. head: tokens of its item before the bracket. opener: None for the whole
    text."""

    kind: BracketKind
    head: tuple[Token, ...] = ()
    opener: Token | None = field(default=None, repr=False)


@frozen
class Place:
    """A place in a text. brackets: the enclosing ones, outermost (the whole text) first. item: tokens from the start of
    the innermost item, element or argument up to here. word: the word, number or string that touches the cursor."""

    brackets: tuple[Bracket, ...]
    item: tuple[Token, ...]
    word: Token | None = None

    @property
    def inner(self) -> Bracket:
        return self.brackets[-1]


@frozen
class Words:
    """The tokens of a text. comments: comment tokens, which the parser does not see."""

    source: SourceText
    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]

    @classmethod
    def of(cls, source: SourceText) -> "Words":
        every = tokenize(source, Diagnostics())
        tokens, _ = layout_tokens(every, source, Diagnostics())
        return cls(source, tuple(tokens), tuple(token for token in every if token.type == "COMMENT"))

    def at(self, offset: int) -> Token | None:
        """Return the word, number or string that touches an offset; of two, the one that begins there."""
        touching = [t for t in self.tokens if t.start <= offset <= t.end and t.start < t.end]
        touching = [t for t in touching if t.text[:1].isalnum() or t.text[:1] in ("_", '"')]
        return touching[-1] if touching else None

    def in_comment(self, offset: int) -> bool:
        return any(token.start < offset <= token.end for token in self.comments)


def places(words: Words) -> Iterator[tuple[Token, Place]]:
    """Yield every token with its place, in order."""
    brackets: list[Bracket] = [Bracket("block")]
    items: list[list[Token]] = [[]]
    for token in words.tokens:
        if token.type in CLOSERS and len(brackets) > 1:
            brackets.pop()
            items.pop()
        yield token, Place(tuple(brackets), tuple(items[-1]), token)
        _step(token, brackets, items)


def place_at(words: Words, offset: int) -> Place:
    """Return the place of a cursor. A word that the cursor touches is not part of the item."""
    word = words.at(offset)
    limit = offset if word is None else word.start
    brackets: list[Bracket] = [Bracket("block")]
    items: list[list[Token]] = [[]]
    tokens = [token for token in words.tokens if token.start < limit or (token.start == limit and token.end <= limit)]
    for number, token in enumerate(tokens):
        if token.type in CLOSERS and len(brackets) > 1:
            if token.assumed and _still_inside(words.source, brackets[-1], tokens[number:], limit):
                continue
            brackets.pop()
            items.pop()
        if token is not word:
            _step(token, brackets, items)
    return Place(tuple(brackets), tuple(items[-1]), word)


def _step(token: Token, brackets: list[Bracket], items: list[list[Token]]) -> None:
    """Update the stack of brackets and items by a token."""
    item = items[-1]
    if token.type in OPENERS:
        brackets.append(Bracket(_kind(token, brackets[-1], item), tuple(item), token))
        item.append(token)
        items.append([])
    elif token.type == "_COMMA" or (token.type == "_NEWLINE" and brackets[-1].kind in _ENDS_MAP_OR_BLOCK):
        item.clear()
    elif token.type not in SEPARATORS and token.type != "$END":
        item.append(token)


def _kind(opener: Token, around: Bracket, item: Sequence[Token]) -> BracketKind:
    if opener.type == "LSQB":
        return "list"
    if opener.type == "LPAR":
        return "call"
    value = around.kind != "block" or bool(item and item[-1].type in _BEFORE_A_MAP)
    return "map" if value else "block"


def _still_inside(source: SourceText, bracket: Bracket, rest: Sequence[Token], offset: int) -> bool:
    """Return True if an unclosed bracket is still open at an offset: no other token is between, and the cursor's line
    is the opening line or is indented deeper."""
    if bracket.opener is None or any(t.type not in (*SEPARATORS, "$END") and not t.assumed for t in rest):
        return False
    line, _ = source.position(offset)
    if line == bracket.opener.span.line:
        return True
    before = source.text[source.line_start(line) : offset]
    return len(before) > _indent(source, bracket.opener) and (bracket.kind == "block" or not before.strip())


def _indent(source: SourceText, token: Token) -> int:
    line = source.line(token.span.line)
    return len(line) - len(line.lstrip())


WORDS = ("NAME", "HUB")
OPERATORS = ("PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW")


@frozen
class Scope:
    """The block, action, source or link around a place. path: its page in the reference, empty for the whole text.
    block: its class, None if unknown. label: its label as written."""

    path: str
    block: type | None
    label: str = ""

    @property
    def settings(self) -> Mapping[str, tuple[attrs.Attribute, Setting]]:
        """Its settings, with the bounds and defaults of its label."""
        if self.block is None:
            return {}
        everything = settings_of(self.block)
        chosen = variant(self.block, self.label) if self.label else self.block
        of_label = settings_of(chosen) if chosen is not self.block else {}
        known = {
            name: of_label.get(name, found)
            for name, found in everything.items()
            if not found[1].only or not self.label or self.label in found[1].only
        }
        return known if self.label in (registry_of(self.block) or ()) or not self.label else {**known, **of_label}

    @property
    def has_weights(self) -> bool:
        """Return True if its free names are dataset names."""
        free = open_setting(self.block) if self.block is not None else None
        return free is not None and free[1].names == "dataset"


class Scopes:
    """Interprets places, including the user functions of a spec."""

    def __init__(self, parts: DeclaredParts) -> None:
        self.parts = parts

    def scope(self, place: Place) -> Scope:
        """Return the innermost block, or call with arguments, around a place."""
        scope = Scope("", None)
        for bracket in place.brackets[1:]:
            if bracket.kind == "block":
                scope = self._inside(scope, bracket)
            elif bracket.kind == "call" and (called := self.called(bracket)) is not None:
                scope = called
        return scope

    def setting(self, place: Place) -> tuple[Scope, str] | None:
        """Return the block and name of the setting whose value a place is in, or None."""
        scope = Scope("", None)
        found: tuple[Scope, str] | None = None
        for bracket, head in zip(place.brackets, (*(b.head for b in place.brackets[1:]), place.item), strict=True):
            if bracket.kind == "block":
                scope, found = (self._inside(scope, bracket) if bracket.opener else scope), None
            elif bracket.kind == "call" and (called := self.called(bracket)) is not None:
                scope, found = called, None
            if len(head) > 1 and head[0].type in WORDS and head[1].type == "_EQ" and bracket.kind in ("block", "call"):
                found = scope, head[0].text
        return found

    def attribute(self, scope: Scope, name: str) -> tuple[attrs.Attribute, Setting] | None:
        """Return a setting of a block, or the meaning of its free names."""
        if not scope.path and scope.block is None and name == "collate":
            return None
        found = scope.settings.get(name)
        if found is None and scope.block is not None:
            return open_setting(scope.block)
        return found

    def calls(self, setting: tuple[Scope, str] | None) -> list[Registry[Any]]:
        """Return the kinds of calls that are valid values of a setting."""
        if setting is None:
            return []
        if setting[0].block is None and setting[1] == "collate":
            return [LINKS]
        found = self.attribute(*setting)
        types = () if found is None else (found[0].type, *get_args(found[0].type))
        return [each.components for each in types if is_call(each)]

    def action(self, item: tuple[Token, ...]) -> int | None:
        """Return the index in the item at which the last action of an `every` or `on` begins; None before the first
        action."""
        behind = max((number for number, token in enumerate(item) if token.type == "THEN"), default=None)
        if behind is not None:
            return behind + 1 if behind + 1 < len(item) else None
        names = (number for number in range(2, len(item)) if item[number].type in WORDS)
        return next((number for number in names if item[number - 1].type not in OPERATORS), None)

    def block_of(self, scope: Scope, kind: str) -> type | None:
        """Return the class of the block that a word opens inside another, or at the top."""
        if scope.block is None:
            return blocks.KINDS.get(kind) if not scope.path else None
        inner = scope.settings.get(kind)
        if inner is None and members_of(scope.block) is not None:
            return next((part.component() for name, part in self.parts.items() if name == kind), None)
        return inner[0].type if inner is not None and blocks.is_block(inner[0].type) else None

    def called(self, bracket: Bracket) -> Scope | None:
        """Return the source, link, action or user function whose arguments a bracket holds."""
        before = bracket.head[-1] if bracket.head else None
        if before is None or before.type not in WORDS:
            return None
        name = before.text
        if bracket.head[0].type in ("EVERY", "ON") and name in blocks.ACTIONS:
            return Scope(name, blocks.ACTIONS[name])
        for registry in Registry.of_calls.values():
            if name in registry:
                return Scope(name, registry[name])
        return Scope(name, self.parts[name].component()) if name in self.parts else None

    def _inside(self, scope: Scope, bracket: Bracket) -> Scope:
        head = bracket.head
        if not head:
            return Scope("?", None)
        if head[0].type in ("EVERY", "ON"):
            at = self.action(head)
            kind = head[at].text if at is not None else ""
            return Scope(kind or "?", self.parts.actions().get(kind))
        # The block of a value: `compute = fp8 { recipe = rowwise }`.
        head = head[2:] if len(head) == 3 and head[1].type == "_EQ" else head
        kind = head[0].text
        block = self.block_of(scope, kind)
        path = f"{scope.path}.{kind}" if scope.path else kind
        label = head[1].text if len(head) > 1 and head[1].type in (*WORDS, "STRING") else ""
        own = self.parts.get(label)
        if block is not None and own is not None and blocks.KINDS.get(PART_KINDS[own.declared.kind].block) is block:
            return Scope(path, own.component())
        known = registry_of(block) if block is not None else None
        return Scope(path, block, label if known is not None and label in known else "")


def takes_datasets(setting: tuple[attrs.Attribute, Setting] | None) -> bool:
    """Return True if the keys of a map are dataset names and its values their weights."""
    kind: Any = setting[0].type if setting is not None else None
    return getattr(kind, "__args__", (None, None))[1:] == (Weight,)


def label_is_dataset(block: type | None) -> bool:
    """Return True if the label of an action is a dataset name."""
    label = blocks.label_of(block) if block is not None else None
    return label is not None and label.name == "dataset"


@cache
def _pages() -> dict[str, list[ReferencePage]]:
    found: dict[str, list[ReferencePage]] = {}
    for page in every_page():
        found.setdefault(page.path, []).append(page)
    return found


@cache
def _words() -> dict[tuple[str, str], TopicWord]:
    return {(word.kind, word.name): word for word in words()}


def read_reference() -> None:
    """Build the reference, which once takes some tenths of a second."""
    _pages()
    _words()


def page_of(path: str, block: type | None) -> ReferencePage | None:
    """Return the page of a block, action, source or link; if several have the name, the page of the class."""
    pages = _pages().get(path, [])
    return next(
        (page for page in pages if block is not None and issubclass(block, page.block)), pages[0] if pages else None
    )


def field_of(path: str, block: type | None, name: str, label: str = "") -> Field | None:
    """Return a setting of a block, as it applies to the component with this label."""
    page = page_of(path, block)
    found = [each for each in page.fields if each.name in (name, "NAME")] if page is not None else []
    exact = [each for each in found if each.name == name] or found
    return next((each for each in exact if label in each.only), exact[0] if exact else None)


def field_text(field: Field) -> str:
    """Return the text of a setting: type, range, default and purpose."""
    facts = [field.kind, field.values, f"default `{field.default}`" if field.default is not None else "must be given"]
    if field.only:
        facts.append("only of " + ", ".join(field.only))
    lines = [f"**{field.path}** · " + " · ".join(fact for fact in facts if fact), "", field.doc]
    return "\n".join([*lines, *(["", f"`{field.usage}`"] if field.usage else [])])


def page_text(page: ReferencePage) -> str:
    """Return the text of a block, action, source or link: syntax and purpose."""
    lines = [f"{page.written}: {page.summary}", *page.more[:1]]
    names = [field.name for field in page.fields] + [inner.name for inner in page.inner]
    if names:
        lines.append("Settings: " + ", ".join(f"`{name}`" for name in names))
    return "\n\n".join(lines)


def word_text(kind: str, name: str) -> str | None:
    """Return the text of a word without a page: a statement, function, unit, multiplier, constant or event."""
    word = _words().get((kind, name))
    return f"`{word.written}`\n\n{word.meaning}" if word is not None else None


def word_line(kind: str, name: str) -> str:
    """Return the meaning of a word, without its syntax."""
    word = _words().get((kind, name))
    return word.meaning if word is not None else ""


def words_of(kind: str) -> list[TopicWord]:
    """Return all words of a kind."""
    return [word for (of, _), word in _words().items() if of == kind]


def code_page(code: str) -> str | None:
    """Return the page of a code as Markdown."""
    page = CODES.get(code)
    if page is None:
        return None
    lines = [f"# {page.code}: {page.title}", *(" ".join(each.split()) for each in page.meaning.strip().split("\n\n"))]
    for heading, text in (("Wrong", page.wrong), ("Right", page.right)):
        if text:
            lines.append(f"{heading}:\n\n```xtrain\n" + text.strip("\n") + "\n```")
    return "\n\n".join(lines) + "\n"
