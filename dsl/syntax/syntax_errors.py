"""Explanations of unexpected tokens: specific messages for common mistakes, else expected and found.

Each common mistake is a rule from `UnexpectedToken` to `Explanation` or None.
"""

from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Fix, Span
from xtrain.dsl.syntax.lexer import MULTIPLIERS, UNIT_WORDS, certain_unit, near_unit
from xtrain.dsl.syntax.tree import OPENERS, STATEMENTS, Token
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

VALUES: Final = {"NUMBER", "STRING", "TRUE", "LSQB"}  # if all of these are accepted, a value is expected
LABELS: Final = ("NAME", "STRING", "NUMBER", "AUTO", "NONE")
OPERATORS: Final = {"PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW"}
ENDS: Final = {"_NEWLINE", "_COMMA", "RBRACE", "RPAR", "RSQB", "$END", "THEN"}
_WORDS: Final = {
    "NAME": "a name", "STRING": "a string", "NUMBER": "a number", "AUTO": "`auto`", "_EQ": "`=`", "_COLON": "`:`",
    "LBRACE": "`{`", "RBRACE": "`}`", "RPAR": "`)`", "RSQB": "`]`", "_COMMA": "`,`", "_NEWLINE": "a new line",
    "THEN": "`then`", "IN": "`in`",
}  # fmt: skip


@frozen
class Explanation:
    """A diagnostic of an unexpected token. meant: a token whose insertion before the wrong one repairs the item,
    replacing `replaces` tokens."""

    diagnostic: Diagnostic
    meant: str | None = None
    replaces: int = 0


@frozen
class UnexpectedToken:
    """The token `tokens[at]` in the item that begins at `tokens[first]`, where one of `accepts` was expected."""

    tokens: list[Token]
    at: int
    first: int
    accepts: set[str]

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def before(self) -> Token:
        """The preceding token; itself if it is the first of the text."""
        return self.tokens[max(self.at - 1, 0)]

    @property
    def after(self) -> Token:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    @property
    def begin(self) -> Token:
        return self.tokens[self.first]

    @property
    def head(self) -> list[Token]:
        """Tokens of the item before this one."""
        return self.tokens[self.first : self.at]

    @property
    def place(self) -> Span:
        """Span of the token; for the end of a line, the empty span before it."""
        token = self.token
        return Span(token.source, token.start, token.start) if token.type in ("_NEWLINE", "$END") else token.span

    @property
    def behind(self) -> Span:
        """Empty span after the preceding token."""
        return Span(self.before.source, self.before.end, self.before.end)

    @property
    def found(self) -> str:
        match self.token.type:
            case "_NEWLINE":
                return "end of the line"
            case "$END":
                return "end of the spec"
            case "NUMBER":
                return f"number `{self.token.text}`"
            case "STRING":
                return "string"
            case _:
                return f"`{self.token.text}`"

    @property
    def expected(self) -> str:
        """Acceptable tokens in English; operators only extend what is there and are not named."""
        names: list[str] = []
        rest = set(self.accepts)
        if rest >= VALUES:
            names.append("a value")
            rest -= {"NUMBER", "STRING", "TRUE", "FALSE", "NONE", "AUTO", "LSQB", "LBRACE", "LPAR", "MINUS", "NAME"}
        if "BROKEN" in rest:
            names.append("an item")
            rest -= {"NAME", "BROKEN", "_NEWLINE", "_COMMA"}
        elif {*LABELS} <= rest:
            names.append("a label")
            rest -= {*LABELS}
        names += [word for kind, word in _WORDS.items() if kind in rest]
        if len(names) > 1:
            return f"{', '.join(names[:-1])} or {names[-1]}"
        return names[0] if names else "the end of the spec"


def shown(token: Token) -> str:
    """Return the text of a token, shortened if it is long."""
    return token.text if len(token.text) <= 24 else token.text[:20] + "…"


def mistake(
    code: str,
    message: str,
    span: Span,
    hint: str | None = None,
    *,
    fix: str | None = None,
    fix_at: Span | None = None,
    meant: str | None = None,
    replaces: int = 0,
) -> Explanation:
    """Return an explanation. fix: replacement of the span, or of `fix_at`."""
    replacement = Fix(fix_at or span, fix) if fix is not None else None
    diagnostic = Diagnostic(severity="error", code=code, message=message, span=span, hint=hint, fix=replacement)
    return Explanation(diagnostic, meant, replaces)


def _body_without_braces(m: UnexpectedToken) -> Explanation | None:
    """Explain `model qwen3:`, `model qwen3 (dim = 192)`, `model qwen3 dim = 192`, `tp -2`."""
    token, head = m.token, m.head
    if m.begin.type != "NAME" or not all(t.type in LABELS for t in head):
        return None
    words = [t.text for t in head]
    if token.type == "_EQ" and len(head) > 2 and head[-1].type == "NAME":
        written = f"{' '.join(words[:-1])} {{ {words[-1]} = … }}"
    elif token.type == "_EQ" and len(head) > 1:
        fix = " " if m.after.type == "LBRACE" else None
        fix_at = Span(token.source, m.before.end, m.after.start)
        message = f"`{' '.join(words)}` is a block and takes no `=`"
        return mistake("X101", message, token.span, "remove it", fix=fix, fix_at=fix_at)
    elif token.type in ("LPAR", "LSQB") or (token.type == "_COLON" and (m.after.type in ENDS or len(head) > 1)):
        written = f"{' '.join(words)} {{ … }}"
    elif token.type in OPERATORS - {"DSLASH"}:
        return mistake("X101", "a label is a single name, number or string", token.span, "compute it in a `let`")
    else:
        return None
    message = "write the body of a block in braces"
    closer = _closer(m) if token.type == "LPAR" else None
    if closer is None:
        return mistake("X101", message, token.span, f"write `{written}`")
    whole = token.span.to(closer.span)
    fix = f"{{ {whole.text[1:-1].strip()} }}"
    return mistake("X101", message, token.span, f"write `{written}`", fix=fix, fix_at=whole)


def _closer(m: UnexpectedToken) -> Token | None:
    """Return the bracket that closes the unexpected one, if they enclose settings."""
    inner = m.tokens[m.at + 1 : m.at + 3]
    if [token.type for token in inner] != ["NAME", "_EQ"]:
        return None
    return next((t for t in m.tokens[m.at + 1 :] if t.type == "RPAR" and t.depth == m.token.depth), None)


def _value_with_body(m: UnexpectedToken) -> Explanation | None:
    """Explain `model = qwen3 { … }`."""
    if m.begin.type in ("EVERY", "ON") or m.token.type != "LBRACE" or "LBRACE" in m.accepts:
        return None
    if m.before.type not in LABELS:
        return None
    hint = "a block is written `kind label { … }`, without `=`"
    labelled = len(m.head) == 3 and m.head[1].type == "_EQ"
    fix_at = Span(m.token.source, m.begin.end, m.before.start)
    return mistake("X101", "a value has no body", m.token.span, hint, fix=" " if labelled else None, fix_at=fix_at)


def _trigger(m: UnexpectedToken) -> Explanation | None:
    """Explain `every` or `on` that stops before its actions, or has extra characters around them."""
    if m.begin.type not in ("EVERY", "ON"):
        return None
    if m.token.type == "_COLON":
        return mistake("X101", "there is no `:` before the actions", m.token.span, "remove it", fix="")
    if "NAME" not in m.accepts and m.token.type == "LBRACE":
        return mistake("X101", "write actions without braces", m.token.span, "join them with `then`")
    if "NAME" not in m.accepts or "_NEWLINE" in m.accepts:
        return None
    if m.token.type == "LBRACE":
        return mistake("X101", "write actions without braces", m.token.span, "join them with `then`")
    if m.begin.type == "EVERY" and len(m.head) == 2 and m.before.type == "NAME":
        message = "the period between `every` and its action is missing"
        return mistake("X101", message, m.before.span, f"write `every 10 steps {m.before.text}`")
    if len(m.head) == 1:
        of_every = "a period, such as `10 steps`"
        wanted = of_every if m.begin.type == "EVERY" else "the name of an event, such as `sigterm`"
        return mistake("X101", f"`{m.begin.text}` needs {wanted}", m.begin.span)
    if m.token.type in ENDS:
        return mistake("X101", "an action is missing", m.place, "write one here, such as `checkpoint`")
    return None


def _keyword_as_name(m: UnexpectedToken) -> Explanation | None:
    if m.before.type not in STATEMENTS.values() or m.token.type not in ("_EQ", "LBRACE"):
        return None
    message = f"`{m.before.text}` starts a statement and cannot be a name here"
    return mistake("X101", message, m.before.span, "choose another name")


def _bare_path(m: UnexpectedToken) -> Explanation | None:
    if m.begin.type != "INCLUDE" or len(m.head) != 1 or m.token.type in ENDS:
        return None
    line = m.token.source.text[m.token.start :].split("\n", 1)[0].split("#", 1)[0].rstrip()
    bare = all(character.isalnum() or character in "._-/" for character in line)
    fix_at = Span(m.token.source, m.token.start, m.token.start + len(line))
    hint = 'write `include "base.xtrain"`'
    return mistake(
        "X101",
        "write a path in double quotes",
        m.token.span,
        hint,
        fix=f'"{line}"' if bare else None,
        fix_at=fix_at,
    )


def _path_assigned(m: UnexpectedToken) -> Explanation | None:
    """Explain `optimizer.lr = 3e-4`, the form of `--set`."""
    kinds = {token.type for token in m.head}
    if m.token.type != "_EQ" or kinds != {"NAME", "_DOT"}:
        return None
    path = "".join(token.text for token in m.head)
    block, _, setting = path.rpartition(".")
    opened, closed = block.replace(".", " { "), " }" * block.count(".")
    hint = f"write `{opened} {{ {setting} = … }}{closed}`; in `sweep`, `{path} in […]`"
    return mistake("X101", "write a setting inside its block, not after a path", m.token.span, hint)


ITEM_RULES: Final = (_body_without_braces, _keyword_as_name, _trigger, _value_with_body, _bare_path, _path_assigned)


def beginning(m: UnexpectedToken) -> Explanation | None:
    """Explain a token that no item begins with."""
    token, span = m.token, m.token.span
    if "BROKEN" not in m.accepts:
        return None
    match token.type:
        case "THEN":
            message = "a line end has ended the statement before this `then`"
            return mistake("X101", message, span, "put it on the line above", **_line_above(m))
        case "LBRACE":
            hint = "put it on the line of the block it belongs to"
            return mistake("X101", "this `{` has no block", span, hint, **_line_above(m))
        case "SLASH" | "DSLASH":
            fix = "#" if token.type == "DSLASH" else None
            return mistake("X101", "a comment begins with `#`", span, "write `#`", fix=fix)
        case "_COMMA":
            return mistake("X101", "there is nothing before this `,`", span, "remove it", fix="")
        case "LSQB":
            return mistake("X101", "no item begins with `[`", span, "a block is written `kind label { … }`")
        case "NUMBER" if m.before.type == "_COMMA" and m.before.end == token.start:
            fix_at = m.before.span
            fix = "_" if _groups(m) else None
            message, hint = "commas do not group digits", "write `1_000` for a thousand"
            return mistake("X101", message, span, hint, fix=fix, fix_at=fix_at)
        case "STRING" if token.value and str(token.value).isidentifier():
            return mistake("X101", "a name is written without quotes", span, f"write `{token.value}`", fix=token.value)
        case "NUMBER" | "STRING":
            return mistake("X101", f"an item begins with a name, not with a {m.found}", span, "write `name = value`")
    if token.type == "_ARROW" or token.type in OPERATORS:
        hint = "put it at the end of the line above, inside parentheses"
        above = _line_above(m) if token.type == "_ARROW" else {}
        return mistake("X101", f"a line cannot begin with `{token.text}`", span, hint, **above)
    return None


def _line_above(m: UnexpectedToken) -> dict[str, Any]:
    """Return the fix that joins the token to the line above, unless a comment prevents it."""
    behind = next((t.end for t in reversed(m.tokens[: m.at]) if t.type != "_NEWLINE"), None)
    if behind is None:
        return {}
    between = m.token.source.text[behind : m.token.start]
    if "\n" not in between or between.strip():
        return {}
    return {"fix": " ", "fix_at": Span(m.token.source, behind, m.token.start)}


def _groups(m: UnexpectedToken) -> bool:
    """Return True if the number and the one before the comma are groups of digits: `1,000`."""
    first = m.tokens[max(m.at - 2, 0)]
    digits = m.token.text.split()[0]
    touches = first.type == "NUMBER" and first.end == m.before.start
    return touches and digits.isdecimal() and len(digits) == 3 and first.text.replace("_", "").isdecimal()


_MULTIPLIERS_IN_WORDS: Final = {"thousand": "k", "million": "M", "billion": "B", "trillion": "T"}
_UNITS: Final = "units: steps tokens epochs samples, s min h d, B KiB MiB GiB, %"
_WHOLE_VALUES: Final = ("RBRACE", "RPAR", "RSQB", "STRING", "NUMBER", "TRUE", "FALSE", "NONE", "AUTO", "NAME")


def explain(tokens: list[Token], at: int, first: int, accepts: set[str]) -> Explanation:
    """Explain why `tokens[at]` does not fit in the item that begins at `tokens[first]`, where `accepts` were
    expected."""
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
        message = f"assign a value to `{m.before.text}` with `=`, not `:`"
        fix = "=" if m.before.end < m.token.start else " ="
        return mistake("X105", message, m.token.span, "write `=`", fix=fix, meant="_EQ", replaces=1)
    if m.token.type == "_EQ" and "_COLON" in m.accepts:
        message = "join a key and its value with `:` inside a map"
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
    """Explain `8 k`, `20 B tokens`, `10 stpes`: a word after a number that is not a unit."""
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
    """Explain two items, entries or elements without a line end or comma between them."""
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
    """Explain `objective = eval.web.loss min`."""
    token = m.token
    if token.type != "NAME" or token.text not in ("min", "max") or m.before.text not in ("loss", "objective"):
        return None
    message, least = f"a metric takes no `{token.text}` after it", "the lowest value is the best"
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
    return mistake("X101", "write arguments in parentheses", m.token.span, hint, fix=fix, fix_at=whole)


def _point(m: UnexpectedToken) -> Explanation | None:
    """Explain `.5`, `5.`, `1.2.3` and `2...4`: a number has one point with digits on both sides, a range has two
    points."""
    token = m.token
    if token.type != "_DOT":
        return None
    if m.before.type == "_TO" and m.before.end == token.start:
        both = m.before.span.to(token.span)
        return mistake("X101", "a range has two points", both, "write `..`", fix="..")
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
    """Explain `micro = 8 // rows of a step`: prose after the sign."""
    return _comment_sign(m) if _is_prose(m) else None


def _is_prose(m: UnexpectedToken) -> bool:
    goes_on = m.after.type in ("_EQ", "_COLON", "LBRACE", "LPAR")
    return m.before.type == "NAME" and m.token.type == "NAME" and not goes_on


_VALUE_RULES: Final = (
    _wrong_sign, _missing_value, _word_behind_number, _direction_behind_metric, _unit_behind_name, _comment_of_words,
    _missing_separator,
    _string_behind_name, _point, _comment_sign,
)  # fmt: skip
