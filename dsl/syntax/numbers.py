"""Reading a number with its multiplier and unit: `42`, `1_000`, `3e-4`, `8Ki`, `20B tokens`, `1.5 GiB`, `10%`."""

import re
from fractions import Fraction
from typing import Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix
from xtrain.dsl.diagnostics.source import SourceText, Span
from xtrain.dsl.diagnostics.suggest import certain, closest
from xtrain.dsl.quantity import UNITS, Quantity
from xtrain.dsl.syntax.tokens import Token

MULTIPLIERS: Final = {
    "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
}  # fmt: skip
UNIT_WORDS: Final = tuple(unit for unit in UNITS if unit != "%")
_OTHER_WORDS: Final = {
    "second": "s", "seconds": "s", "sec": "s", "secs": "s", "minute": "min", "minutes": "min", "mins": "min",
    "hour": "h", "hours": "h", "day": "d", "days": "d", "percent": "%", "iters": "steps", "iterations": "steps",
    "bytes": "B", "KB": "KiB", "kB": "KiB", "MB": "MiB", "GB": "GiB",
}  # fmt: skip
_LESS: Final = ("kb", "mb", "gb", "mi")  # two things each: 10^3 or 2^10 bytes, minutes or 2^20
_NUMBER: Final = re.compile(r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?:_[0-9]+)*)?(?:[eE][-+]?[0-9]+)?")
_TAIL: Final = re.compile(r"\w+")
# A unit word behind blanks; not if it is itself the name of a setting, a function or a map key.
_UNIT: Final = re.compile(r"[ \t]*(" + "|".join(sorted(UNIT_WORDS, key=len, reverse=True)) + r")(?!\w|[ \t]*[=(:])")
_LARGEST_EXPONENT: Final = 300


def near_unit(word: str) -> str | None:
    """The unit that a wrong word was probably meant to be."""
    return _OTHER_WORDS.get(word) or closest(word, UNIT_WORDS)


def certain_unit(word: str, candidates: tuple[str, ...] = UNIT_WORDS) -> str | None:
    """The unit that a wrong word must have been meant to be; not for `GB`, which is less than a GiB."""
    if word.lower() in _LESS:
        return None
    return _OTHER_WORDS.get(word) or certain(word, candidates)


def read_number(source: SourceText, start: int, end: int, diagnostics: Diagnostics) -> Token:
    """The number at `start` as a `NUMBER` token whose value is an int, a float or a `Quantity`."""
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
    # 1e9 and 1.5k are whole numbers; 2.0 is not, because whoever writes the point means a real number.
    if "." in plain and not exponent and scale == 1:
        return float(plain)
    return number(exact)


def spelling(text: str) -> str:
    """A number as it is written best: the multiplier touches it, one blank before a unit word, none before `%`."""
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
    """The offset behind a percent sign that belongs to the number; None if there is none or it is the operator.

    `10%` and `10 %` are percentages; in `10%3`, `10%n` and `10 % 3` an operand follows, which makes it the operator.
    """
    sign = re.compile(r"[ \t]*%").match(text, at, end)
    if sign is None:
        return None
    attached = sign.end() == at + 1
    blanks = "" if attached else r"[ \t]*"
    operand = re.compile(blanks + r"[\w(\"]").match(text, sign.end(), end)
    return None if operand else sign.end()


def _bad_tail(span: Span, digits: str, word: str, diagnostics: Diagnostics) -> Token:
    """Report what is glued to a number. A word that merely begins with a digit (`1f1b`) becomes a string."""
    source = span.source
    at_word = Span(source, span.end - len(word), span.end)
    meant = _OTHER_WORDS.get(word) or closest(word, (*MULTIPLIERS, *UNIT_WORDS))
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
    """The value of a hexadecimal, binary or octal number without its leading 0."""
    try:
        return int(f"0{word}", 0)
    except ValueError:
        return None
