"""Strings that know the origin of each character through the operations of a chat template.

A template gets the texts of a conversation as `TracedText` strings. Concatenation, slicing, trimming, splitting,
replacing and serialization keep the origin of every character. The result of any other operation is searched for its
inputs.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex

Run = tuple[int, int, int]
"""Number of characters, number of their source, position of the first one in the source.

The source is NOWHERE for text of the template. The position is SOMEWHERE if only the source is known. A run may be
empty: OPENS and CLOSES mark the bounds of a `{% generation %}` block."""

NOWHERE, OPENS, CLOSES = -1, -2, -3
SOMEWHERE = -1
# Mapping each character of an unknown operation's result costs a step of Python.
LONGEST_SUBSEQUENCE = 1 << 16


class TracedText(str):
    """A string with the origins of its characters."""

    __slots__ = ("_runs",)
    _runs: tuple[Run, ...]

    def __new__(cls, text: str, runs: tuple[Run, ...] | None = None) -> "TracedText":
        made = super().__new__(cls, text)
        made._runs = ((len(text), NOWHERE, 0),) if runs is None else runs
        return made

    def __str__(self) -> str:
        return self

    def __getnewargs__(self) -> Any:
        return plain(self), self._runs

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return joined([self] * int(count))

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __mod__(self, values: Any) -> str:
        return guessed(str.__mod__(plain(self), values), [self, values])

    def __rmod__(self, form: str) -> str:
        return guessed(str.__mod__(form, self), [self]) if isinstance(form, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, stop)
            return joined([self._cut(at, at + 1) for at in range(start, stop, step)])
        at = index(key)
        at = at if at >= 0 else at + len(self)
        if not 0 <= at < len(self):
            raise IndexError("string index out of range")
        return self._cut(at, at + 1)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def _cut(self, start: int, stop: int, *, marks: bool = False) -> str:
        """Return characters `start` to `stop`, with the marks at both ends, or with all marks."""
        start = max(start, 0)
        stop = max(stop, start)
        if start == 0 and stop >= len(self):
            return self
        runs, at = [], 0
        for length, source, place in self._runs:
            first, last = max(at, start), min(at + length, stop)
            if first < last:
                runs.append((last - first, source, place if place < 0 else place + first - at))
            elif length == 0 and (marks or start <= at <= stop):
                runs.append((0, source, place))
            at += length
        return TracedText(str.__getitem__(self, slice(start, stop)), tuple(runs))

    def _pieces(self, pieces: Iterable[str]) -> list[str]:
        """Return consecutive parts of this string with their origins."""
        parts, at = [], 0
        text = plain(self)
        for piece in pieces:
            at = text.index(piece, at)
            parts.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return parts

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self), marks=True)

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(str.rstrip(self, chars)), marks=True)

    def removeprefix(self, prefix: str) -> str:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._separated(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._separated(str.rsplit(self, sep, maxsplit), sep)

    def _separated(self, pieces: list[str], sep: str | None) -> list[str]:
        if sep is None:
            return self._pieces(pieces)
        parts, at = [], 0
        for piece in pieces:
            parts.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(sep)
        return parts

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, at = [], 0
        for line, whole in zip(str.splitlines(self), str.splitlines(self, keepends=True), strict=True):
            lines.append(self._cut(at, at + len(whole if keepends else line)))
            at += len(whole)
        return lines

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(str.rpartition(self, sep))

    def _parted(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self._cut(0, first), self._cut(first, second), self._cut(second, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        text, most = plain(self), int(count)
        if not old:
            return guessed(str.replace(text, old, new, most), [self, new])
        parts: list[str] = []
        at = 0
        while most != 0 and (place := text.find(old, at)) >= 0:
            parts += [self._cut(at, place), new]
            at, most = place + len(old), most - 1
        return joined([*parts, self._cut(at, len(self))]) if parts else self

    def join(self, parts: Iterable[str]) -> str:
        return joined_by(self, parts)

    def _same_length(self, text: str) -> str:
        return TracedText(text, self._runs) if len(text) == len(self) else guessed(text, [self])

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def casefold(self) -> str:
        return self._same_length(str.casefold(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def swapcase(self) -> str:
        return self._same_length(str.swapcase(self))


class TracedInt(int):
    """An integer that is written as a `TracedText` string."""

    _source: int

    def __str__(self) -> str:
        return traced(int.__repr__(self), self._source)


class TracedFloat(float):
    """A number that is written as a `TracedText` string."""

    _source: int

    def __str__(self) -> str:
        return traced(float.__repr__(self), self._source)


def traced(value: str | int | float, source: int) -> Any:
    """Return a text or number of a conversation, traced to the source with this number."""
    if isinstance(value, str):
        return TracedText(value, ((len(value), source, 0),)) if value else value
    made = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
    made._source = source
    return made


def plain(text: str) -> str:
    """Return the same characters as an ordinary string."""
    return str.__str__(text)  # of a subclass it makes a copy


def runs_of(text: str) -> tuple[Run, ...]:
    """Return the origins of a string's characters; NOWHERE for strings that are not `TracedText`."""
    return text._runs if isinstance(text, TracedText) else ((len(text), NOWHERE, 0),)


def spelled(value: Any) -> str:
    """Return `str` of a value with origins. Parts of a content that are written in Python syntax have none."""
    if isinstance(value, list) and any(isinstance(part, Mapping) and "text" in part for part in value):
        return str(value)
    return guessed(str(value), [value]) if isinstance(value, list | tuple | Mapping) else str(value)


def joined(parts: Iterable[str]) -> str:
    """Join strings. The result is a plain string if none of them is traced."""
    parts = list(parts)
    text = "".join(parts)
    runs: list[Run] = []
    is_traced = False
    for part in parts:
        if isinstance(part, TracedText):
            is_traced = True
            runs += part._runs
        elif part:
            runs.append((len(part), NOWHERE, 0))
    return TracedText(text, tuple(runs)) if is_traced else text


def joined_by(between: str, parts: Iterable[str]) -> str:
    """Join strings with `between` between them."""
    separated: list[str] = []
    for part in parts:
        separated += [between, part]
    return joined(separated[1:])


def has_origin(text: str) -> bool:
    """Return True if any character of a string comes from the conversation."""
    return isinstance(text, TracedText) and any(source >= 0 for _, source, _ in text._runs)


def guessed(result: Any, inputs: Any) -> Any:
    """Return the result of an untraced operation with the origins of the inputs that are found in it.

    An input that is not found gives the whole result its source without a position, as it may be anywhere in it.
    """
    if not isinstance(result, str) or has_origin(result):
        return result
    texts = [text for text in _traced_in(inputs) if has_origin(text)]
    if not texts or not result:
        return result
    if len(texts) == 1 and (traced_result := _subsequence(result, texts[0])) is not None:
        return traced_result
    parts, at = [], 0
    missing = []
    for text in texts:
        place = result.find(text, at) if text.strip() else -1
        if place < 0:
            missing += [source for _, source, _ in runs_of(text) if source >= 0]
            continue
        parts += [result[at:place], text]
        at = place + len(text)
    parts.append(result[at:])
    if missing:
        parts = [part if isinstance(part, TracedText) else _of_source(part, missing[0]) for part in parts]
        parts += [TracedText("", ((0, source, SOMEWHERE),)) for source in missing]
    return joined(parts)


def _of_source(text: str, source: int) -> str:
    return TracedText(text, ((len(text), source, SOMEWHERE),)) if text else text


def _subsequence(result: str, text: str) -> str | None:
    """Trace a result that has all characters of one input in order, or only such characters."""
    if max(len(result), len(text)) > LONGEST_SUBSEQUENCE:
        return None
    if (place := result.find(text)) >= 0:
        return joined([result[:place], text, result[place + len(text) :]])
    longer, shorter = (result, text) if len(result) >= len(text) else (text, result)
    places, at = [], 0
    for sign in plain(shorter):
        at = str.find(longer, sign, at)
        if at < 0:
            return None
        places.append(at)
        at += 1
    if longer is text:
        return joined([text[place] for place in places])
    characters: list[str] = list(result)
    for place, sign in zip(places, text, strict=True):
        characters[place] = sign
    return joined(characters)


def _traced_in(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, TracedText):
        yield value
    elif isinstance(value, TracedInt | TracedFloat):
        yield str(value)
    elif depth < 8 and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _traced_in(key, depth + 1)
            yield from _traced_in(inner, depth + 1)
    elif depth < 8 and isinstance(value, list | tuple):
        for inner in value:
            yield from _traced_in(inner, depth + 1)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """Return `json.dumps` of a value, with origins."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts: list[str] = []
    at = 0
    for leaf in _leaves(value, sort_keys):
        written = _leaf_json(leaf, ensure_ascii)
        place = text.find(written, at)
        if place < 0:
            return guessed(text, [value])
        parts += [text[at:place], written]
        at = place + len(written)
    return joined([*parts, text[at:]])


def _leaves(value: Any, sort_keys: Any) -> Iterator[Any]:
    """Yield texts and numbers in JSON order."""
    if isinstance(value, Mapping):
        for key, inner in sorted(value.items()) if sort_keys else value.items():
            yield from _leaves(key, sort_keys)
            yield from _leaves(inner, sort_keys)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, sort_keys)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_ESCAPED_ASCII = re.compile(r'["\\\x00-\x1f]|[^\x20-\x7e]')


def _leaf_json(leaf: Any, ensure_ascii: bool) -> str:
    if isinstance(leaf, TracedInt | TracedFloat):
        return str(leaf)
    if not isinstance(leaf, TracedText):
        return json.dumps(leaf, ensure_ascii=ensure_ascii)
    parts: list[str] = ['"']
    at = 0
    for match in (_ESCAPED_ASCII if ensure_ascii else _ESCAPED).finditer(plain(leaf)):
        sign = leaf[match.start()]
        ((_, source, place),) = (run for run in runs_of(sign) if run[0])
        written = json.dumps(plain(sign), ensure_ascii=ensure_ascii)[1:-1]
        parts += [leaf[at : match.start()], TracedText(written, ((len(written), source, place),))]
        at = match.end()
    return joined([*parts, leaf[at:], '"'])
