"""What is wrong when a token does not fit, in words: the usual mistakes by name, the rest as expected and found."""

from typing import Final

from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.syntax.item_mistakes import ITEM_RULES, beginning
from xtrain.dsl.syntax.numbers import MULTIPLIERS, UNIT_WORDS, certain_unit, near_unit
from xtrain.dsl.syntax.tokens import OPENERS, STATEMENTS, Token
from xtrain.dsl.syntax.unexpected_token import ENDS, OPERATORS, VALUES, Explanation, UnexpectedToken, mistake, shown

_MULTIPLIERS_IN_WORDS: Final = {"thousand": "k", "million": "M", "billion": "B", "trillion": "T"}
_UNITS: Final = "units: steps tokens epochs samples, s min h d, B KiB MiB GiB, %"
_WHOLE_VALUES: Final = ("RBRACE", "RPAR", "RSQB", "STRING", "NUMBER", "TRUE", "FALSE", "NONE", "AUTO", "NAME")


def explain(tokens: list[Token], at: int, first: int, accepts: set[str]) -> Explanation:
    """Why `tokens[at]` does not fit, in the item that begins at `tokens[first]`, where `accepts` would have."""
    unexpected = UnexpectedToken(tokens, at, first, accepts)
    if at > first:
        for rule in (*ITEM_RULES, *_VALUE_RULES):
            found = rule(unexpected)
            if found is not None:
                return found
    hint = f"expected {unexpected.expected}"
    return beginning(unexpected) or mistake("X101", f"unexpected {unexpected.found}", unexpected.place, hint)


def _wrong_sign(m: UnexpectedToken) -> Explanation | None:
    if m.token.type == "_COLON" and "_EQ" in m.accepts:
        message = f"`{m.before.text}` is given its value with `=`, not `:`"
        fix = "=" if m.before.end < m.token.start else " ="
        return mistake("X105", message, m.token.span, "write `=`", fix=fix, meant="_EQ", replaces=1)
    if m.token.type == "_EQ" and "_COLON" in m.accepts:
        message = "a key and its value are joined by `:` inside a map"
        fix_at = Span(m.token.source, m.before.end, m.token.end)
        return mistake("X105", message, m.token.span, "write `:`", fix=":", fix_at=fix_at, meant="_COLON", replaces=1)
    return None


def _missing_value(m: UnexpectedToken) -> Explanation | None:
    if not m.accepts >= VALUES or m.token.type not in ENDS:
        return None
    if m.before.type in OPERATORS or m.before.type in ("_EQ", "_ARROW", "_COLON", "_TO"):
        return mistake("X106", f"there is no value after `{m.before.text}`", m.behind, "write the value here")
    if m.token.type == "_COMMA":
        fix_at = Span(m.token.source, m.before.end, m.token.end)
        fix = "" if m.before.type != "LPAR" else None  # the call may have been meant to end there
        return mistake("X106", "there is no value before this `,`", m.token.span, "remove it", fix=fix, fix_at=fix_at)
    return None


def _word_behind_number(m: UnexpectedToken) -> Explanation | None:
    """`8 k`, `20 B tokens`, `10 stpes`: a word behind a number that is no unit."""
    token, before = m.token, m.before
    if before.type != "NUMBER" or token.type != "NAME" or token.span.line != before.span.line:
        return None
    digits, word = before.text.split()[0], token.text
    both = before.span.to(token.span)
    if isinstance(before.value, Quantity):
        if before.text.endswith("B") and word in UNIT_WORDS:
            message = "`B` after a space means bytes; a multiplier follows its number without a space"
            return mistake("X107", message, both, f"write `{digits}B {word}`", fix=f"{digits}B {word}")
        if word in UNIT_WORDS:
            return mistake("X107", f"this number has two units, the second is `{word}`", token.span, "keep one")
        return None
    if m.after.type in ("_EQ", "LBRACE", "LPAR", "_COLON"):
        return None
    sign = word if word in MULTIPLIERS else _MULTIPLIERS_IN_WORDS.get(word.lower())
    if sign is not None:
        return mistake(
            "X107",
            "a multiplier follows its number without a space",
            both,
            f"write `{digits}{sign}`",
            fix=digits + sign,
        )
    meant = near_unit(word)
    hint = f"did you mean `{meant}`?" if meant else _UNITS
    sure = certain_unit(word)
    fix_at = Span(token.source, before.end, token.end) if sure == "%" else token.span
    return mistake("X107", f"`{word}` is not a unit", token.span, hint, fix=sure, fix_at=fix_at)


def _missing_separator(m: UnexpectedToken) -> Explanation | None:
    """Two items, entries or elements without a line end or comma between them."""
    token, before = m.token, m.before
    if "_COMMA" not in m.accepts:
        return None
    if "_NEWLINE" in m.accepts:
        starts = token.type in STATEMENTS.values() or token.type == "NAME"
        goes_on = m.after.type in ("_EQ", "_COLON", "LBRACE", "NAME", "STRING", "NUMBER", "AUTO")
        if starts and before.type in _WHOLE_VALUES and goes_on:
            message = f"`{token.text}` begins a new item on the same line"
            hint = "start a new line, or write `,` before it"
            return mistake("X111", message, token.span, hint, fix=",", fix_at=m.behind, meant="_COMMA")
        return None
    if token.type in ("NAME", "STRING", "NUMBER", *OPENERS) and before.type != "LPAR":
        message = f"there is no `,` before `{shown(token)}`"
        return mistake("X111", message, m.behind, "write `,` here", fix=",", meant="_COMMA")
    return None


def _direction_behind_metric(m: UnexpectedToken) -> Explanation | None:
    """`objective = eval.web.loss min`."""
    token = m.token
    if token.type != "NAME" or token.text not in ("min", "max") or m.before.text not in ("loss", "objective"):
        return None
    message, least = f"a metric has no `{token.text}` behind it", "the least value is the best"
    if token.text == "max":
        return mistake("X101", message, token.span, f"remove it: {least}, of any metric")
    at = Span(token.source, m.before.end, token.end)
    return mistake("X101", message, token.span, f"remove it: {least}", fix="", fix_at=at)


def _unit_behind_name(m: UnexpectedToken) -> Explanation | None:
    token, before = m.token, m.before
    if token.type != "NAME" or token.text not in UNIT_WORDS or before.type not in ("NAME", "RPAR"):
        return None
    hint = f"multiply: `{before.text} * 1 {token.text}`" if before.type == "NAME" else f"multiply by `1 {token.text}`"
    message = f"the unit `{token.text}` has no number before it"
    return mistake("X107", message, token.span, hint, fix=f"* 1 {token.text}")


def _string_behind_name(m: UnexpectedToken) -> Explanation | None:
    if m.token.type != "STRING" or m.before.type != "NAME":
        return None
    hint = f"write `{m.before.text}({shown(m.token)})`"
    alone = m.after.type in ENDS
    whole = Span(m.token.source, m.before.end, m.token.end)
    fix = f"({m.token.text})" if alone else None
    return mistake("X101", "arguments are written in parentheses", m.token.span, hint, fix=fix, fix_at=whole)


def _point(m: UnexpectedToken) -> Explanation | None:
    """`.5`, `5.`, `1.2.3` and `2...4`: a number has one point and digits on both sides of it, a range has two."""
    token = m.token
    if token.type != "_DOT":
        return None
    if m.before.type == "_TO" and m.before.end == token.start:
        both = m.before.span.to(token.span)
        return mistake("X101", "a range is written with two points", both, "write `..`", fix="..")
    touches = m.before.type == "NUMBER" and m.before.end == token.start
    follows = m.after.type == "NUMBER" and m.after.start == token.end
    if touches and follows:
        return mistake("X101", "a number has one point", token.span, "remove one")
    if follows:
        both = token.span.to(m.after.span)
        return mistake("X101", "a number begins with a digit", both, f"write `0{both.text}`", fix=f"0{both.text}")
    if touches:
        both = m.before.span.to(token.span)
        return mistake("X101", "a number ends with a digit", both, f"write `{both.text}0`", fix=f"{both.text}0")
    return None


def _comment_sign(m: UnexpectedToken) -> Explanation | None:
    for token in (*m.head, m.token):
        if token.type == "DSLASH" and token.span.line == m.token.span.line:
            message = "a comment begins with `#`, and `//` divides"
            fix = "#" if token is m.token or _is_prose(m) else None
            return mistake("X101", message, token.span, "write `#`", fix=fix)
    return None


def _comment_of_words(m: UnexpectedToken) -> Explanation | None:
    """`micro = 8 // rows of a step`: words side by side behind the sign."""
    return _comment_sign(m) if _is_prose(m) else None


def _is_prose(m: UnexpectedToken) -> bool:
    goes_on = m.after.type in ("_EQ", "_COLON", "LBRACE", "LPAR")
    return m.before.type == "NAME" and m.token.type == "NAME" and not goes_on


_VALUE_RULES: Final = (
    _wrong_sign, _missing_value, _word_behind_number, _direction_behind_metric, _unit_behind_name, _comment_of_words,
    _missing_separator,
    _string_behind_name, _point, _comment_sign,
)  # fmt: skip
