"""Lexer: text into tokens, numbers with their multipliers and units, and a diagnostic for every invalid word.

Numbers: `42`, `1_000`, `3e-4`, `8Ki`, `20B tokens`, `1.5 GiB`, `10%`.
"""

import re
import sys
from fractions import Fraction
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix, SourceText, Span
from xtrain.dsl.diagnostics.suggest import certain, closest
from xtrain.dsl.syntax.tree import Token
from xtrain.dsl.values import UNITS, Quantity

MULTIPLIERS: Final = {
    "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
}  # fmt: skip
UNIT_WORDS: Final = tuple(unit for unit in UNITS if unit != "%")
OTHER_WORDS: Final = {
    "second": "s", "seconds": "s", "sec": "s", "secs": "s", "minute": "min", "minutes": "min", "mins": "min",
    "hour": "h", "hours": "h", "day": "d", "days": "d", "percent": "%", "iters": "steps", "iterations": "steps",
    "bytes": "B", "KB": "KiB", "kB": "KiB", "MB": "MiB", "GB": "GiB",
}  # fmt: skip
_LESS: Final = ("kb", "mb", "gb", "mi")  # ambiguous: 10^3 or 2^10 bytes, minutes or 2^20
_NUMBER: Final = re.compile(r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?:_[0-9]+)*)?(?:[eE][-+]?[0-9]+)?")
_TAIL: Final = re.compile(r"\w+")
# A unit word after blanks, unless it is the name of a setting, a function or a map key itself.
_UNIT: Final = re.compile(r"[ \t]*(" + "|".join(sorted(UNIT_WORDS, key=len, reverse=True)) + r")(?!\w|[ \t]*[=(:])")
_LARGEST_EXPONENT: Final = 300


def near_unit(word: str) -> str | None:
    """Return the unit closest to a wrong word."""
    return OTHER_WORDS.get(word) or closest(word, UNIT_WORDS)


def certain_unit(word: str, candidates: tuple[str, ...] = UNIT_WORDS) -> str | None:
    """Return the only unit that a wrong word can mean; None for `GB`, which is less than a GiB."""
    if word.lower() in _LESS:
        return None
    return OTHER_WORDS.get(word) or certain(word, candidates)


def read_number(source: SourceText, start: int, end: int, diagnostics: Diagnostics) -> Token:
    """Return the number at `start` as a `NUMBER` token whose value is an int, a float or a `Quantity`."""
    match = _NUMBER.match(source.text, start, end)
    assert match is not None  # the lexer saw a digit
    digits, at = match.group(), match.end()
    scale: int | float = 1
    unit: str | None = None
    tail = _TAIL.match(source.text, at, end)
    if tail is not None:
        word = tail.group()
        if word in MULTIPLIERS:
            scale, at = MULTIPLIERS[word], tail.end()
        elif word in UNITS:
            unit, at = word, tail.end()
        else:
            return _bad_tail(Span(source, start, tail.end()), digits, word, diagnostics)
    if unit is None:
        found = _UNIT.match(source.text, at, end)
        if found is not None:
            unit, at = found.group(1), found.end()
        else:
            percent = _percent(source.text, at, end)
            if percent is not None:
                unit, at = "%", percent
    span = Span(source, start, at)
    value = _value(digits, scale, unit)
    if value is None:
        diagnostics.error("X108", "this number is too large or too small to compute with", span)
        return Token("ERROR", source, start, at)
    return Token("NUMBER", source, start, at, value)


def _value(digits: str, scale: int | float, unit: str | None) -> int | float | Quantity | None:
    plain = digits.replace("_", "").lower()
    mantissa, _, exponent = plain.partition("e")
    if len(mantissa) > _LARGEST_EXPONENT or abs(int(exponent[:9] or 0)) > _LARGEST_EXPONENT:
        return None
    exact = Fraction(plain) * Fraction(scale)
    if unit is not None:
        stored, factor = UNITS[unit]
        return Quantity(number(exact * Fraction(factor)), stored)
    # 1e9 and 1.5k are whole numbers; 2.0 is not: the point signals a real number.
    if "." in plain and not exponent and scale == 1:
        return float(plain)
    return number(exact)


def spelling(text: str) -> str:
    """Return the preferred spelling of a number: no blank before the multiplier or `%`, one before a unit word."""
    match = _NUMBER.match(text)
    assert match is not None
    digits, tail = match.group(), text[match.end() :]
    for multiplier in sorted(MULTIPLIERS, key=len, reverse=True):
        if re.match(rf"{multiplier}(?!\w)", tail):
            digits, tail = digits + multiplier, tail[len(multiplier) :]
            break
    unit = tail.strip()
    return digits + unit if unit in ("", "%") else f"{digits} {unit}"


def number(exact: Fraction) -> int | float:
    return exact.numerator if exact.denominator == 1 else float(exact)


def _percent(text: str, at: int, end: int) -> int | None:
    """Return the offset after a percent sign of the number; None if there is none or it is the operator.

    `10%` and `10 %` are percentages; in `10%3`, `10%n` and `10 % 3` an operand follows, so it is the operator.
    """
    sign = re.compile(r"[ \t]*%").match(text, at, end)
    if sign is None:
        return None
    attached = sign.end() == at + 1
    blanks = "" if attached else r"[ \t]*"
    operand = re.compile(blanks + r"[\w(\"]").match(text, sign.end(), end)
    return None if operand else sign.end()


def _bad_tail(span: Span, digits: str, word: str, diagnostics: Diagnostics) -> Token:
    """Report text glued to a number. A word that merely begins with a digit (`1f1b`) becomes a string."""
    source = span.source
    at_word = Span(source, span.end - len(word), span.end)
    meant = OTHER_WORDS.get(word) or closest(word, (*MULTIPLIERS, *UNIT_WORDS))
    fix: Fix | None = None
    if digits == "0" and word[0] in "xXbBoO" and (decimal := _decimal(word)) is not None:
        message, hint, at_word = "numbers are decimal", f"write `{decimal}`", span
        fix = Fix(span, str(decimal))
    elif word == "K":
        message, hint = "`K` is not a multiplier", "`k` is 1000, `Ki` is 1024"
    elif word in ("m", "G", "Mb"):
        message, hint = (
            f"`{word}` is neither a multiplier nor a unit",
            "write M for a million, min for minutes, Gi or GiB",
        )
    elif any(c.isdigit() for c in word) and not digits.startswith("0"):
        text = span.text
        diagnostics.error(
            "X107", f"`{text}` is neither a number nor a name", span,
            hint=f'write "{text}" if it is a word', fix=Fix(span, f'"{text}"'),
        )  # fmt: skip
        return Token("STRING", source, span.start, span.end, text)
    elif meant is not None:
        message, hint = f"`{word}` is neither a multiplier nor a unit", f"did you mean `{meant}`?"
        sure = certain_unit(word, (*MULTIPLIERS, *UNIT_WORDS))
        fix = Fix(at_word, sure) if sure else None
    else:
        message, hint = f"`{word}` is neither a multiplier nor a unit", "multipliers: k M B T, Ki Mi Gi"
    diagnostics.error("X107", message, at_word, hint=hint, fix=fix)
    return Token("ERROR", source, span.start, span.end)


def _decimal(word: str) -> int | None:
    """Return the value of a hexadecimal, binary or octal number without its leading 0."""
    try:
        return int(f"0{word}", 0)
    except ValueError:
        return None


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
CORRECTED: Final = {"==": "=", ":=": "=", "=>": "->"}  # reported, then read as what was meant
_CONDITIONS: Final = ("?", "<", ">", "!", "&&", "||")
_STRING: Final = re.compile(r'"((?:[^"\\\n]|\\[^\n])*)"')
_TRIPLE: Final = re.compile(r'"""((?:[^\\]|\\.)*?)"""', re.DOTALL)
_NOTHING_ELSE: Final = re.compile(r"[ \t)\]}]*(#.*)?")  # after an unclosed string: the assumed end is certain
_OTHER_QUOTES: Final = {"'": "'", "`": "`", "“": "”", "„": "“", "‘": "’", "”": "”", "’": "’"}
_ESCAPE: Final = re.compile(r"\\(?:u\{([0-9A-Fa-f]*)\}|(.))", re.DOTALL)
_ESCAPES: Final = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}


def tokenize(
    source: SourceText, diagnostics: Diagnostics, start: int = 0, end: int | None = None, most: int = sys.maxsize
) -> list[Token]:
    """Return the tokens between two offsets, including comments (`COMMENT`) and every line end (`_NEWLINE`); if there
    are more than `most`, the first `most` and one more."""
    return _Lexer(source, diagnostics, start, len(source.text) if end is None else end).run(most)


class _Lexer:
    def __init__(self, source: SourceText, diagnostics: Diagnostics, start: int, end: int) -> None:
        self.source, self.text, self.diagnostics = source, source.text, diagnostics
        self.at, self.end = start, end
        self.tokens: list[Token] = []

    def run(self, most: int) -> list[Token]:
        while self.at < self.end and len(self.tokens) <= most:
            match = _WORDS.match(self.text, self.at, self.end)
            assert match is not None  # the last alternative matches any character
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
        what = "a value is assigned with" if meant == "=" else "links of a chain are joined with"
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
        """Report an unterminated string. It is assumed to end before the first closing bracket or comma of the line."""
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
                what = "`\\u` needs hexadecimal digits in braces" if letter == "u" else "this escape does not exist"
                hint = r"write \u{1F600}" if digits is not None or letter == "u" else r"write \\ for a backslash"
                self.diagnostics.error("X110", what, span, hint=hint)
            return ""

        return _ESCAPE.sub(replace, raw)
