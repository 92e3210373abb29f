"""`UnexpectedToken`: a token that does not fit and what is around it; `Explanation`: what is said about it."""

from typing import Final

from attrs import frozen

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Fix
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.syntax.tokens import Token

VALUES: Final = {"NUMBER", "STRING", "TRUE", "LSQB"}  # where all of these fit, a value is expected
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
    """meant: a token whose insertion before the wrong one repairs the item; `replaces` tokens are dropped for it."""

    diagnostic: Diagnostic
    meant: str | None = None
    replaces: int = 0


@frozen
class UnexpectedToken:
    """The token `tokens[at]` in the item that begins at `tokens[first]`, where one of `accepts` would have fitted."""

    tokens: list[Token]
    at: int
    first: int
    accepts: set[str]

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def before(self) -> Token:
        """The token before; itself if it is the first of the text."""
        return self.tokens[max(self.at - 1, 0)]

    @property
    def after(self) -> Token:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    @property
    def begin(self) -> Token:
        return self.tokens[self.first]

    @property
    def head(self) -> list[Token]:
        """What the item has before the token."""
        return self.tokens[self.first : self.at]

    @property
    def place(self) -> Span:
        """The span of the token; for the end of a line, the empty one before it."""
        token = self.token
        return Span(token.source, token.start, token.start) if token.type in ("_NEWLINE", "$END") else token.span

    @property
    def behind(self) -> Span:
        """The empty span behind the token before."""
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
        """The acceptable tokens in English; operators only widen what is there and are not named."""
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
    """The text of a token, cut if it is long."""
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
    """An explanation. fix: what a tool may write in the place of the span, or of `fix_at`."""
    replacement = Fix(fix_at or span, fix) if fix is not None else None
    diagnostic = Diagnostic(severity="error", code=code, message=message, span=span, hint=hint, fix=replacement)
    return Explanation(diagnostic, meant, replaces)
