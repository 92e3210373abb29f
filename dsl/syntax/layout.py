"""Layout between lexer and parser: significant line ends, statement words, nesting, and unmatched brackets."""

from itertools import islice, takewhile
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.diagnostics.suggest import closed, without
from xtrain.dsl.syntax.tree import CLOSERS, CONSTANTS, OPENERS, SEPARATORS, STATEMENTS, Token

_LONGEST: Final = 1000  # tokens in a list or call; a longer one lacks more than a bracket
_LOOKED_AT: Final = 16  # tokens of a line that may begin a statement
_SIGN: Final = {"LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}"}


def match_brackets(tokens: list[Token], diagnostics: Diagnostics) -> tuple[list[Token], bool]:
    """Return the tokens with all brackets matched, and whether any had to be added or dropped."""
    if _even(tokens):
        return tokens, False
    return _Repair(tokens, diagnostics).run(), True


def _even(tokens: list[Token]) -> bool:
    opened: list[str] = []
    for token in tokens:
        if token.type in OPENERS:
            opened.append(token.type)
        elif token.type in CLOSERS and (not opened or opened.pop() != CLOSERS[token.type]):
            return False
    return not opened


class _Repair:
    def __init__(self, tokens: list[Token], diagnostics: Diagnostics) -> None:
        self.tokens, self.diagnostics = tokens, diagnostics
        self.result: list[Token] = []
        self.opened: list[Token] = []
        self.excused = False  # an ERROR token was seen, which may have swallowed a closing bracket
        self.last_closed: Token | None = None
        self.suspects = self._find_suspects()

    def run(self) -> list[Token]:
        for place, token in enumerate(self.tokens):
            if token.type == "ERROR":
                self.excused = True
            elif token.type in OPENERS:
                self.opened.append(token)
            elif token.type in CLOSERS and not self._close(token):
                continue
            elif token.type == "_NEWLINE":
                self._line_ends(place)
            self.result.append(token)
        while self.opened:
            self._give_up(self.opened[-1], None)
        return self.result

    def _find_suspects(self) -> set[int]:
        """Return the offsets of braces that are never closed, or closed by a brace that begins a line in another
        column."""
        suspects: set[int] = set()
        opened: list[Token] = []
        for place, token in enumerate(self.tokens):
            if token.type == "LBRACE":
                opened.append(token)
            elif token.type == "RBRACE" and opened:
                opener = opened.pop()
                if self._begins_line(place) and _indent(token) != _indent(opener):
                    suspects.add(opener.start)
        return suspects | {token.start for token in opened}

    def _begins_line(self, place: int) -> bool:
        return place == 0 or self.tokens[place - 1].type == "_NEWLINE"

    def _close(self, token: Token) -> bool:
        """Consume a closing bracket; return False if it closes nothing."""
        wanted = CLOSERS[token.type]
        if not any(opener.type == wanted for opener in self.opened):
            self._stray(token)
            return False
        if token.type != "RBRACE":
            # A `)` or `]` closes nothing outside its block.
            for opener in reversed(self.opened):
                if opener.type == wanted:
                    break
                if opener.type == "LBRACE":
                    self._stray(token)
                    return False
        while self.opened[-1].type != wanted:
            self._give_up(self.opened[-1], token)
        while wanted == "LBRACE" and self._closes_outer(token):
            self._give_up(self.opened[-1], token)
        self.last_closed = self.opened.pop()
        self.excused = False
        return True

    def _closes_outer(self, token: Token) -> bool:
        """Return True if the brace begins a line in the column of an outer block, left of the innermost block."""
        inner = self.opened[-1]
        first = token.source.text[token.source.line_start(token.span.line) : token.start].strip() == ""
        outer = any(o.type == "LBRACE" and _indent(o) == _indent(token) for o in self.opened[:-1])
        return first and outer and inner.start in self.suspects and _indent(inner) > _indent(token)

    def _line_ends(self, place: int) -> None:
        """Decide whether a line that begins here shows that a bracket is missing."""
        following = self.tokens[place + 1 : place + 1 + _LOOKED_AT]
        if not following or following[0].type in ("_NEWLINE", "COMMENT") or following[0].type in CLOSERS:
            return
        first = following[0]
        while self.opened:
            inner = self.opened[-1]
            if inner.type == "LBRACE":
                deeper = _indent(first) > _indent(inner)
                if deeper or inner.start not in self.suspects or inner.span.line == first.span.line:
                    return
            elif not _starts_statement(following, inside=inner.type, after=self.tokens[place - 1]):
                return
            self._give_up(inner, first)

    def _give_up(self, opener: Token, before: Token | None) -> None:
        """Report a bracket that is never closed and close it before a token."""
        assert self.opened.pop() is opener
        sign, closer = _SIGN[opener.type], OPENERS[opener.type]
        end = self._certain_end(opener)
        if not self.excused:
            where = ((f"close it before this `{before.text}`", before.span),) if before else ()
            self.diagnostics.error(
                "X103", f"this `{sign}` is never closed", opener.span, hint=f"add `{_SIGN[closer]}`", notes=where,
                fix=closed(opener.source, opener.span, end, _SIGN[closer]) if end is not None else None,
            )  # fmt: skip
        at = self.result[-1].end if self.result else 0
        assumed = Token(closer, opener.source, at, at, assumed=True)
        self.result.append(assumed)

    def _certain_end(self, opener: Token) -> int | None:
        """Return where the missing bracket must be: after the last token, if the content of the brackets leaves no
        doubt.

        A list contains no `name = value`, so it has ended before one; in a call it may be an argument, so the place is
        unknown.
        """
        last = next((t.end for t in reversed(self.result) if t.type != "_NEWLINE" and not t.assumed), opener.end)
        if opener.type == "LBRACE":
            return last
        inner = list(islice(takewhile(lambda t: t.start > opener.start, reversed(self.result)), _LONGEST))[::-1]
        if len(inner) == _LONGEST:
            return None
        solid = [place for place, token in enumerate(inner) if token.type not in SEPARATORS]
        depth = 0
        for before, place, after in zip([-1, *solid], solid, [*solid[1:], -1], strict=False):
            token = inner[place]
            setting = token.type == "NAME" and after >= 0 and inner[after].type == "_EQ"
            if depth == 0 and setting and place > before + 1:
                return (inner[before].end if before >= 0 else opener.end) if opener.type == "LSQB" else None
            depth += (token.type in OPENERS) - (token.type in CLOSERS)
        return last

    def _stray(self, token: Token) -> None:
        sign = token.text
        notes = ()
        # After another closing bracket it is a surplus one; elsewhere, an earlier one may have been premature.
        last = next((each for each in reversed(self.result) if each.type != "_NEWLINE"), None)
        doubled = last is not None and last.type == token.type
        if token.type == "RBRACE" and self.last_closed is not None:
            notes = (("the last block before it was opened here and is closed already", self.last_closed.span),)
        if not self.excused:
            self.diagnostics.error(
                "X104", f"this `{sign}` closes nothing", token.span, hint="remove it", notes=notes,
                fix=without(token.span) if doubled else None,
            )  # fmt: skip


def _indent(token: Token) -> int:
    """Return the number of blanks before the first character of the token's line."""
    line = token.source.line(token.span.line)
    return len(line) - len(line.lstrip())


def _starts_statement(following: list[Token], *, inside: str, after: Token) -> bool:
    """Return True if a line can only be a new statement, although a `(` or `[` is open."""
    first, second = following[0], following[1] if len(following) > 1 else None
    if first.type != "NAME" or second is None:
        return False
    if second.type == "_EQ":  # in a call, an argument may look the same after a comma
        return inside == "LSQB" or after.type not in ("_COMMA", "LPAR", "_NEWLINE", "COMMENT")
    if second.type == "_DOT":  # `optimizer.lr in …`: no expression has an `in`
        words = list(takewhile(lambda each: each.type in ("NAME", "_DOT") and each.text != "in", following))
        return len(words) < len(following) and following[len(words)].text == "in"
    if first.text in STATEMENTS and second.type in ("NAME", "STRING", "NUMBER"):
        return True
    return second.type in ("NAME", "STRING", "NUMBER", "LBRACE")


# Before a `{` these indicate a value: a map, not the body of a block.
_BEFORE_A_VALUE = frozenset(
    {
        "_EQ", "_COLON", "_ARROW", "_TO", "LPAR", "LSQB", "PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW",
        "EVERY",
    }
)  # fmt: skip


def layout_tokens(tokens: list[Token], source: SourceText, diagnostics: Diagnostics) -> tuple[list[Token], bool]:
    """Return the tokens for the parser, and whether brackets had to be repaired.

    Comments are dropped. A line end counts only between items, once, and not after a comma or an opening bracket. Words
    that start a statement (`let`), `then` and `in` become keywords where they are allowed; elsewhere they are names,
    also before `=` and `.` inside a block, where no statement is allowed.
    """
    tokens, repaired = match_brackets([t for t in tokens if t.type != "COMMENT"], diagnostics)
    result: list[Token] = []
    opened: list[str] = []  # block, map, ( or [
    reacting = [False]  # for each depth: the statement is `every` or `on`, where `then` joins actions
    fresh = True  # the next token is the first of a statement
    for place, token in enumerate(tokens):
        inside = opened[-1] if opened else "block"
        if token.type == "_NEWLINE":
            before = result[-1].type if result else "_NEWLINE"
            if inside in ("LPAR", "LSQB") or before in ("LBRACE", *SEPARATORS):
                continue
        elif token.type == "NAME":
            is_setting = bool(opened) and place + 1 < len(tokens) and tokens[place + 1].type in ("_EQ", "_DOT")
            _classify(token, first=fresh and not is_setting, reacting=reacting[-1])
            if token.text == "in" and opened and inside == "block" and _is_path(result):
                token.type = "IN"
            called = place + 1 < len(tokens) and tokens[place + 1].type == "LPAR"
            if token.text == "hub" and called and result and result[-1].starts_item:
                token.type = "HUB"  # a label: `model hub("…")`
        if token.type in CLOSERS:
            opened.pop()
            reacting.pop()
        token.depth = len(opened)
        token.starts_item = fresh and token.type not in CLOSERS and token.type not in SEPARATORS
        if token.starts_item:
            reacting[-1] = token.type in ("EVERY", "ON")
        if token.type in OPENERS:
            value = inside != "block" or (bool(result) and result[-1].type in _BEFORE_A_VALUE)
            opened.append(token.type if token.type != "LBRACE" else "map" if value else "block")
            reacting.append(False)
        result.append(token)
        inside = opened[-1] if opened else "block"
        fresh = inside == "block" and token.type in ("LBRACE", *SEPARATORS)
    result.append(Token("$END", source, len(source.text.rstrip()), len(source.text.rstrip())))
    return result, repaired


def _is_path(tokens: list[Token]) -> bool:
    """Return True if the current item is a path so far, such as `optimizer.lr`."""
    for token in reversed(tokens):
        if token.type not in ("NAME", "_DOT"):
            return False
        if token.starts_item:
            return tokens[-1].type == "NAME"
    return False


def _classify(token: Token, *, first: bool, reacting: bool) -> None:
    word = token.text
    if first and word in STATEMENTS:
        token.type = STATEMENTS[word]
    elif word in CONSTANTS:
        token.type = CONSTANTS[word]
    elif word == "then" and reacting:
        token.type = "THEN"
