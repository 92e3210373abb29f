"""What is wrong when a token does not fit, in words: the usual mistakes by name, the rest as expected and found."""

from typing import Final

from attrs import frozen

from .diagnostics import Diagnostic, Fix
from .numerals import MULTIPLIERS, UNIT_WORDS, near_unit
from .quantity import Quantity
from .source import Span
from .tokens import OPENERS, STATEMENTS, Token

_VALUES: Final = {"NUMBER", "STRING", "TRUE", "LSQB"}  # where all of these fit, a value is expected
_WORDS: Final = {
    "NAME": "a name", "STRING": "a string", "NUMBER": "a number", "AUTO": "`auto`", "_EQ": "`=`", "_COLON": "`:`",
    "LBRACE": "`{`", "RBRACE": "`}`", "RPAR": "`)`", "RSQB": "`]`", "_COMMA": "`,`", "_NEWLINE": "a new line",
    "THEN": "`then`",
}  # fmt: skip
_OPERATORS: Final = {"PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW"}
_ENDS: Final = {"_NEWLINE", "_COMMA", "RBRACE", "RPAR", "RSQB", "$END", "THEN"}


@frozen
class Explanation:
    """meant: a token whose insertion before the wrong one mends the item; `replaces` tokens are dropped for it."""

    diagnostic: Diagnostic
    meant: str | None = None
    replaces: int = 0


def explain(tokens: list[Token], at: int, first: int, accepts: set[str]) -> Explanation:
    """Why `tokens[at]` does not fit, in the item that begins at `tokens[first]`, where `accepts` would have."""
    token, before = tokens[at], tokens[at - 1] if at else None
    after = tokens[at + 1] if at + 1 < len(tokens) else token
    if before is not None and at > first:
        found = (
            _wrong_sign(token, before, accepts)
            or _missing_value(token, before, accepts)
            or _after_number(token, before, after)
            or _missing_separator(token, before, after, accepts)
            or _comment_sign(tokens, at, first)
            or _keyword_as_name(token, before)
            or _block_with_sign(tokens, at, first, accepts)
            or _incomplete_reaction(tokens, at, first, accepts)
            or _point(token, before, after)
        )
        if found is not None:
            return found
    return _start_of_item(token, after, accepts) or _generic(token, accepts)


def _error(
    code: str, message: str, span: Span, hint: str | None = None, *, fix: Fix | None = None,
    meant: str | None = None, replaces: int = 0,
) -> Explanation:  # fmt: skip
    diagnostic = Diagnostic(severity="error", code=code, message=message, span=span, hint=hint, fix=fix)
    return Explanation(diagnostic, meant, replaces)


def _wrong_sign(token: Token, before: Token, accepts: set[str]) -> Explanation | None:
    if token.type == "_COLON" and "_EQ" in accepts:
        return _error(
            "X105", f"`{before.text}` is given its value with `=`, not `:`", token.span, "write `=`",
            fix=(token.span, "="), meant="_EQ", replaces=1,
        )  # fmt: skip
    if token.type == "_EQ" and "_COLON" in accepts:
        return _error(
            "X105", "a key and its value are joined by `:` inside a map", token.span, "write `:`",
            fix=(token.span, ":"), meant="_COLON", replaces=1,
        )  # fmt: skip
    return None


def _missing_value(token: Token, before: Token, accepts: set[str]) -> Explanation | None:
    if not accepts >= _VALUES or token.type not in _ENDS:
        return None
    sign = before.text
    behind = Span(before.source, before.end, before.end)
    if before.type == "_EQ":
        return _error("X106", "there is no value behind `=`", behind, "write the value here")
    if before.type in _OPERATORS or before.type in ("_ARROW", "_COLON"):
        return _error("X106", f"there is no value behind `{sign}`", behind, "write the value here")
    if token.type == "_COMMA":
        return _error("X106", "there is no value before this `,`", token.span, "remove it", fix=(token.span, ""))
    return None


def _after_number(token: Token, before: Token, after: Token) -> Explanation | None:
    """`8 k`, `20 B tokens`, `10 stpes`: a word behind a number that is no unit."""
    if before.type != "NUMBER" or token.type != "NAME" or _same_line(token, before) is False:
        return None
    digits = before.text.split()[0]
    word, both = token.text, Span(token.source, before.start, token.end)
    if isinstance(before.value, Quantity):
        if before.text.endswith("B") and word in UNIT_WORDS:
            meant = f"{digits}B {word}"
            return _error(
                "X107", "a multiplier touches its number; apart from it, `B` means bytes", both, f"write `{meant}`",
                fix=(both, meant),
            )  # fmt: skip
        if word in UNIT_WORDS:
            return _error("X107", f"this number has two units, the second is `{word}`", token.span, "keep one")
        return None
    if after.type in ("_EQ", "LBRACE", "LPAR", "_COLON"):
        return None
    if word in MULTIPLIERS:
        return _error(
            "X107", "a multiplier touches its number", both, f"write `{digits}{word}`", fix=(both, f"{digits}{word}")
        )
    meant = near_unit(word)
    if meant is not None:
        return _error(
            "X107", f"`{word}` is not a unit", token.span, f"did you mean `{meant}`?", fix=(token.span, meant)
        )
    units = "units: steps tokens epochs samples, s min h d, B KiB MiB GiB, %"
    return _error("X107", f"`{word}` is not a unit", token.span, units)


def _missing_separator(token: Token, before: Token, after: Token, accepts: set[str]) -> Explanation | None:
    """Two items or entries without a line end or comma between them."""
    if "_COMMA" not in accepts:
        return None
    behind = Span(before.source, before.end, before.end)
    if "_NEWLINE" in accepts:
        starts = token.type in STATEMENTS.values() or token.type == "NAME"
        whole = before.type in ("RBRACE", "RPAR", "RSQB", "STRING", "NUMBER", "TRUE", "FALSE", "NONE", "AUTO", "NAME")
        if starts and whole and after.type in ("_EQ", "_COLON", "LBRACE", "NAME", "STRING", "NUMBER", "AUTO"):
            return _error(
                "X111", f"`{token.text}` begins a new item on the same line", token.span,
                "start a new line, or write `,` before it", fix=(behind, ","), meant="_COMMA",
            )  # fmt: skip
        return None
    if token.type in ("NAME", "STRING", "NUMBER", *OPENERS) and before.type != "LPAR":
        return _error(
            "X111", f"there is no `,` before `{_shown(token)}`", behind, "write `,` here", fix=(behind, ","),
            meant="_COMMA",
        )  # fmt: skip
    return None


def _comment_sign(tokens: list[Token], at: int, first: int) -> Explanation | None:
    for token in tokens[first : at + 1]:
        if token.type == "DSLASH" and token.span.line == tokens[at].span.line:
            return _error("X101", "a comment begins with `#`, and `//` divides", token.span, "write `#`")
    return None


def _keyword_as_name(token: Token, before: Token) -> Explanation | None:
    if before.type in STATEMENTS.values() and token.type in ("_EQ", "LBRACE"):
        message = f"`{before.text}` starts a statement, so nothing can be called that here"
        return _error("X101", message, before.span, "choose another name")
    return None


def _block_with_sign(tokens: list[Token], at: int, first: int, accepts: set[str]) -> Explanation | None:
    """`model = qwen3 { … }` and `model qwen3 = { … }`."""
    token, before = tokens[at], tokens[at - 1]
    if token.type == "LBRACE" and "LBRACE" not in accepts and before.type in ("NAME", "STRING", "NUMBER", "AUTO"):
        return _error("X101", "a value has no body", token.span, "a block is written `kind label { … }`, without `=`")
    head = tokens[first:at]
    labelled = len(head) > 1 and all(t.type in ("NAME", "STRING", "NUMBER", "AUTO") for t in head)
    if token.type == "_EQ" and labelled:
        written = " ".join(t.text for t in head)
        return _error("X101", f"`{written}` is a block and takes no `=`", token.span, "remove it")
    return None


def _incomplete_reaction(tokens: list[Token], at: int, first: int, accepts: set[str]) -> Explanation | None:
    """`every` or `on` that stops before its actions."""
    begin, token = tokens[first], tokens[at]
    if begin.type not in ("EVERY", "ON") or "NAME" not in accepts or "_NEWLINE" in accepts:
        return None
    if begin.type == "EVERY" and at == first + 2 and tokens[at - 1].type == "NAME":
        action = tokens[at - 1]
        return _error(
            "X101", "there is no period between `every` and its action", action.span,
            f"write `every 10 steps {action.text}`",
        )  # fmt: skip
    if at == first + 1:
        wanted = "a period, such as `10 steps`" if begin.type == "EVERY" else "the name of an event, such as `sigterm`"
        return _error("X101", f"`{begin.text}` needs {wanted}", begin.span)
    if token.type in _ENDS:
        return _error("X101", "an action is missing", _place(token), "write one here, such as `checkpoint`")
    return None


def _point(token: Token, before: Token, after: Token) -> Explanation | None:
    """`.5` and `5.`: numbers have digits on both sides of the point."""
    if token.type != "_DOT":
        return None
    if after.type == "NUMBER" and after.start == token.end:
        both = Span(token.source, token.start, after.end)
        meant = f"0{both.text}"
        return _error("X101", "a number begins with a digit", both, f"write `{meant}`", fix=(both, meant))
    if before.type == "NUMBER":
        both = Span(token.source, before.start, token.end)
        meant = f"{both.text}0"
        return _error("X101", "a number ends with a digit", both, f"write `{meant}`", fix=(both, meant))
    return None


def _start_of_item(token: Token, after: Token, accepts: set[str]) -> Explanation | None:
    """A token that no item begins with."""
    if "BROKEN" not in accepts:
        return None
    if token.type == "THEN":
        return _error(
            "X101", "a new line has ended the statement that this `then` belongs to", token.span,
            "put it on the line above",
        )  # fmt: skip
    if token.type == "LBRACE":
        return _error("X101", "this `{` has no block", token.span, "put it on the line of the block it belongs to")
    if token.type == "_ARROW" or token.type in _OPERATORS - {"DSLASH", "SLASH"}:
        hint = "put it at the end of the line above, inside parentheses"
        return _error("X101", f"a line cannot begin with `{token.text}`", token.span, hint)
    if token.type in ("SLASH", "DSLASH"):
        return _error("X101", "a comment begins with `#`", token.span, "write `#`")
    if token.type == "_COMMA":
        return _error("X101", "there is nothing before this `,`", token.span, "remove it", fix=(token.span, ""))
    if token.type in ("NUMBER", "STRING"):
        return _error("X101", f"a setting begins with its name, not with {_found(token)}", token.span,
                      "write `name = value`")  # fmt: skip
    return None


def _generic(token: Token, accepts: set[str]) -> Explanation:
    expected = _expected(accepts)
    hint = f"expected {expected}" if expected else None
    return _error("X101", f"unexpected {_found(token)}", _place(token), hint)


def _expected(accepts: set[str]) -> str:
    """The acceptable tokens in English; operators only widen what is there and are not named."""
    names: list[str] = []
    rest = set(accepts)
    if rest >= _VALUES:
        names.append("a value")
        rest -= {"NUMBER", "STRING", "TRUE", "FALSE", "NONE", "AUTO", "LSQB", "LBRACE", "LPAR", "MINUS", "NAME"}
    if "BROKEN" in rest:
        names.append("an item")
        rest -= {"NAME", "BROKEN", "_NEWLINE", "_COMMA"}
    elif {"NAME", "STRING", "NUMBER", "AUTO"} <= rest:
        names.append("a label")
        rest -= {"NAME", "STRING", "NUMBER", "AUTO"}
    names += [word for kind, word in _WORDS.items() if kind in rest]
    if len(names) > 1:
        return f"{', '.join(names[:-1])} or {names[-1]}"
    return names[0] if names else "the end of the spec"


def _found(token: Token) -> str:
    match token.type:
        case "_NEWLINE":
            return "end of the line"
        case "$END":
            return "end of the spec"
        case "NUMBER":
            return f"number `{token.text}`"
        case "STRING":
            return "string"
        case _:
            return f"`{token.text}`"


def _shown(token: Token) -> str:
    return token.text if len(token.text) <= 24 else token.text[:20] + "…"


def _place(token: Token) -> Span:
    """The span of a token; of the end of a line, the empty one before it."""
    return Span(token.source, token.start, token.start) if token.type in ("_NEWLINE", "$END") else token.span


def _same_line(token: Token, before: Token) -> bool:
    return token.span.line == before.span.line
