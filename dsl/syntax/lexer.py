"""The lexer: text into tokens, comments and line ends included, with a diagnostic for every word that cannot be one.

A number takes its multiplier and unit along (`8Ki`, `4k steps`, `10%`): as a word of its own, a unit could not be told
from a name that follows. Where a mistake leaves no doubt about what was meant (`==`, `'text'`), the lexer reports it
and goes on with what was meant; else it leaves an `ERROR` token, and the parser gives up that one item silently.
"""

import re
import sys
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix
from xtrain.dsl.diagnostics.source import SourceText, Span
from xtrain.dsl.syntax.numbers import read_number
from xtrain.dsl.syntax.tokens import Token

_WORDS: Final = re.compile(
    r"""
      (?P<BLANK>[ \t\f\v]+)
    | (?P<COMMENT>\#[^\n]*)
    | (?P<NEWLINE>\n)
    | (?P<NAME>[^\W\d]\w*|1f1b\b) # a schedule goes by that name in every paper about it
    | (?P<NUMBER>[0-9])
    | (?P<TRIPLE>\"\"\")
    | (?P<QUOTE>["'`“”„‘’])
    | (?P<WRONG>==|:=|=>|&&|\|\|)
    | (?P<SIGN>->|\*\*|//|\.\.|[-+*/%=:,.(){}\[\]])
    | (?P<BAD>.)
    """,
    re.VERBOSE | re.DOTALL,
)
SIGNS: Final = {
    "->": "_ARROW", "..": "_TO", "**": "POW", "//": "DSLASH", "+": "PLUS", "-": "MINUS", "*": "STAR", "/": "SLASH",
    "%": "PERCENT",
    "=": "_EQ", ":": "_COLON", ",": "_COMMA", ".": "_DOT", "(": "LPAR", ")": "RPAR", "{": "LBRACE", "}": "RBRACE",
    "[": "LSQB", "]": "RSQB",
}  # fmt: skip
CORRECTED: Final = {"==": "=", ":=": "=", "=>": "->"}  # reported here and read as what was meant
_CONDITIONS: Final = ("?", "<", ">", "!", "&&", "||")
_STRING: Final = re.compile(r'"((?:[^"\\\n]|\\[^\n])*)"')
_TRIPLE: Final = re.compile(r'"""((?:[^\\]|\\.)*?)"""', re.DOTALL)
_NOTHING_ELSE: Final = re.compile(r"[ \t)\]}]*(#.*)?")  # behind an unclosed string: its end is where it is taken to be
_OTHER_QUOTES: Final = {"'": "'", "`": "`", "“": "”", "„": "“", "‘": "’", "”": "”", "’": "’"}
_ESCAPE: Final = re.compile(r"\\(?:u\{([0-9A-Fa-f]*)\}|(.))", re.DOTALL)
_ESCAPES: Final = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}


def tokenize(
    source: SourceText, diagnostics: Diagnostics, start: int = 0, end: int | None = None, most: int = sys.maxsize
) -> list[Token]:
    """The tokens between two offsets, comments (`COMMENT`) and every line end (`_NEWLINE`) among them; of a text that
    has more than `most`, the first `most` and one more."""
    return _Lexer(source, diagnostics, start, len(source.text) if end is None else end).run(most)


class _Lexer:
    def __init__(self, source: SourceText, diagnostics: Diagnostics, start: int, end: int) -> None:
        self.source, self.text, self.diagnostics = source, source.text, diagnostics
        self.at, self.end = start, end
        self.tokens: list[Token] = []

    def run(self, most: int) -> list[Token]:
        while self.at < self.end and len(self.tokens) <= most:
            match = _WORDS.match(self.text, self.at, self.end)
            assert match is not None  # the last alternative takes any character
            kind = match.lastgroup
            if kind == "NAME":
                self._name(match.end())
            elif kind == "BLANK":
                self.at = match.end()
            elif kind == "SIGN":
                self._emit(SIGNS[match.group()], match.end())
            elif kind == "NEWLINE":
                self._emit("_NEWLINE", match.end())
            elif kind == "COMMENT":
                self._emit("COMMENT", match.end())
            elif kind == "NUMBER":
                token = read_number(self.source, self.at, self.end, self.diagnostics)
                self.tokens.append(token)
                self.at = token.end
            elif kind == "TRIPLE":
                self._triple()
            elif kind == "QUOTE":
                self._quote(match.group())
            elif kind == "WRONG":
                self._wrong_sign(match.group(), match.end())
            else:
                self._bad(match.group())
        return self.tokens

    def _emit(self, kind: str, end: int, value: object = None) -> None:
        self.tokens.append(Token(kind, self.source, self.at, end, value))
        self.at = end

    def _span(self, end: int) -> Span:
        return Span(self.source, self.at, end)

    def _name(self, end: int) -> None:
        word = self.text[self.at : end]
        if word.isascii():
            self._emit("NAME", end)
            return
        strange = next(c for c in word if not c.isascii())
        self.diagnostics.error(
            "X109", f"`{strange}` cannot be part of a name", self._span(end), hint="use the letters a-z, digits and `_`"
        )
        self._emit("ERROR", end)

    def _wrong_sign(self, sign: str, end: int) -> None:
        meant = CORRECTED.get(sign)
        if meant is None:
            hint = "a spec has no conditions"
            self.diagnostics.error("X109", f"`{sign}` is not part of the language", self._span(end), hint=hint)
            self._emit("ERROR", end)
            return
        what = "a value is given with" if meant == "=" else "links of a chain are joined by"
        self.diagnostics.error(
            "X105", f"{what} `{meant}`, not `{sign}`", self._span(end), hint=f"write `{meant}`",
            fix=Fix(self._span(end), meant),
        )  # fmt: skip
        self._emit(SIGNS[meant], end)

    def _bad(self, character: str) -> None:
        span = self._span(self.at + 1)
        if character.isspace():
            name = f"U+{ord(character):04X}"
            self.diagnostics.error(
                "X109",
                f"there is an unusual space ({name}) here",
                span,
                hint="write a normal space",
                fix=Fix(span, " "),
            )
            self.at += 1
        elif character == ";":
            self.diagnostics.error(
                "X109", "`;` does not end an item", span, hint="start a new line, or write `,`", fix=Fix(span, ",")
            )
            self._emit("_COMMA", self.at + 1)
        else:
            shown = character if character.isprintable() else f"U+{ord(character):04X}"
            hint = "a spec has no conditions" if character in _CONDITIONS else None
            self.diagnostics.error("X109", f"`{shown}` is not part of the language", span, hint=hint)
            self._emit("ERROR", self.at + 1)

    # Strings ----------------------------------------------------------------------------------------------------------

    def _quote(self, quote: str) -> None:
        if quote == '"':
            match = _STRING.match(self.text, self.at, self.end)
            if match is None:
                self._unterminated()
            else:
                value = self._unescape(match.group(1), match.start(1))
                self._emit("STRING", match.end(), value)
            return
        line_end = self._line_end()
        close = self.text.find(_OTHER_QUOTES[quote], self.at + 1, line_end)
        if close < 0:
            self.diagnostics.error(
                "X109", f"`{quote}` is not part of the language", self._span(self.at + 1),
                hint='strings are written in double quotes: "…"',
            )  # fmt: skip
            self._emit("ERROR", self.at + 1)
            return
        value, span = self.text[self.at + 1 : close], self._span(close + 1)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        self.diagnostics.error(
            "X109", f"strings are written in double quotes, not in `{quote}`", span, hint=f'write "{escaped}"',
            fix=Fix(span, f'"{escaped}"'),
        )  # fmt: skip
        self._emit("STRING", close + 1, value)

    def _triple(self) -> None:
        match = _TRIPLE.match(self.text, self.at, self.end)
        if match is not None:
            value = self._unescape(match.group(1), match.start(1))
            self._emit("STRING", match.end(), value)
            return
        self.diagnostics.error(
            "X102", "this string is never closed", self._span(self.at + 3),
            hint='a string that begins with """ ends with """',
        )  # fmt: skip
        self._emit("ERROR", self.end)

    def _unterminated(self) -> None:
        """Report a string without end. It is taken to end before the first closing bracket or comma of the line."""
        line = self.text[self.at : self._line_end()]
        body = re.split(r"[)\]},]| #", line)[0].rstrip()
        end = self.at + len(body)
        certain = len(body) > 1 and _NOTHING_ELSE.fullmatch(line, len(body)) is not None
        self.diagnostics.error(
            "X102", "this string is never closed", self._span(end), hint='add `"` where it ends',
            fix=Fix(Span(self.source, end, end), '"') if certain else None,
        )  # fmt: skip
        self._emit("ERROR", end)

    def _line_end(self) -> int:
        end = self.text.find("\n", self.at, self.end)
        return self.end if end < 0 else end

    def _unescape(self, raw: str, start: int) -> str:
        if "\\" not in raw:
            return raw

        def replace(match: re.Match[str]) -> str:
            digits, letter = match.groups()
            span = Span(self.source, start + match.start(), start + match.end())
            if digits is None and letter in _ESCAPES:
                return _ESCAPES[letter]
            if digits is not None and 1 <= len(digits) <= 6:
                number = int(digits, 16)
                if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF:
                    return chr(number)
                self.diagnostics.error("X110", f"there is no character U+{number:04X}", span)
            else:
                what = r"`\u` wants hexadecimal digits in braces" if letter == "u" else "this escape does not exist"
                hint = r"write \u{1F600}" if digits is not None or letter == "u" else r"write \\ for a backslash"
                self.diagnostics.error("X110", what, span, hint=hint)
            return ""

        return _ESCAPE.sub(replace, raw)
