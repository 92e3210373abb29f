"""Files that are one JSON array of records, on one line or many: cut into their elements without being read at once."""

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.records import SourceUnit

BLANKS: Final = re.compile(r"[ \t\r\n]*")
_BEGINNING: Final = re.compile(r"[ \t\r\n]*(\[(?=[ \t\r\n]*\{)|\{)")
UNIT: Final = 1 << 20
"""Characters of the elements that are read together, about."""
HEAD: Final = 1 << 16
"""Bytes of a file by which an array is told from lines."""
LONGEST: Final = 1 << 28
"""Characters of an element."""
# Only where elements end is asked here: any number and any key will do.
_SCAN: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: None, parse_float=len, parse_int=len).raw_decode


def opened(path: Path, data: Iterator[tuple[bytes, int]]) -> tuple[bool, Iterator[tuple[bytes, int]]]:
    """Whether a file is one JSON array of objects, as far as its beginning says, and its blocks.

    Raises DataError if it begins with an object over several lines, which is no record of JSON lines.
    """
    first: list[tuple[bytes, int]] = []
    try:
        while sum(len(block) for block, _ in first) < HEAD and (block := next(data, None)) is not None:
            first.append(block)
    except DataError as error:  # whoever reads says where
        data = _failing(error)
    text = b"".join(block for block, _ in first).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    return _is_array(text, path), chain(first, data)


def _is_array(text: str, path: Path) -> bool:
    found = _BEGINNING.match(text)
    if found is None:
        return False
    line = text.find("\n", found.start(1))
    try:
        _, end = _SCAN(text, found.start(1))
    except (json.JSONDecodeError, RecursionError):  # longer than the beginning, or no JSON
        return found[1] == "["
    several = 0 <= line < end
    if found[1] == "{" and several:
        remedy = "Write each object on one line, or all objects as one array."
        raise DataError("an object over several lines", path=path, line=1, remedy=remedy)
    return found[1] == "[" and (several or not text[end:].strip())  # else more lines follow, of which this is one


def _failing(error: DataError) -> Iterator[tuple[bytes, int]]:
    raise error
    yield


def array_units(path: Path, data: Iterator[tuple[bytes, int]]) -> Iterator[SourceUnit]:
    """Elements of an array, some at a time; the part of each unit is the lines and the texts of its elements.

    data: blocks of the file, and how many of its bytes each took. Raises DataError where it is not JSON, as the place
    of the next element is then unknown, and for anything after the array.
    """
    text = _Text(path, data)
    text.skip("[")
    group: list[tuple[int, bytes]] = []
    characters = 0
    while text.peek() != "]":
        line, element = text.element()
        group.append((line, element))
        characters += len(element)
        if text.peek() == ",":
            text.skip(",")
            if text.peek() == "]":
                raise text.wrong("a comma before the end of the array")
        elif text.peek() != "]":
            wrong = "neither a comma nor the end of the array after an element"
            raise text.wrong(wrong if text.peek() else "the file ends in the middle of an array")
        if characters >= UNIT:
            yield SourceUnit(size=text.taken(), part=group, path=path, line=group[0][0])
            group, characters = [], 0
    text.skip("]")
    if text.peek():
        raise text.wrong("more after the array; a file is one array, or has an object on each line")
    yield SourceUnit(size=text.taken(), part=group, path=path, line=group[0][0] if group else 1)


class _Text:
    """A file as text, of which a part is in memory."""

    def __init__(self, path: Path, data: Iterator[tuple[bytes, int]]) -> None:
        self._path, self._data = path, data
        # What is no UTF-8 is found again in the element that has it.
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text, self._at, self._line, self._taken, self._ended = "", 0, 1, 0, False

    def peek(self) -> str:
        """The next character that is no blank, without taking it; empty at the end."""
        while True:
            after = BLANKS.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            self._move(after - self._at)
            if after < len(self._text) or not self._read():
                return self._text[after : after + 1]

    def skip(self, sign: str) -> None:
        """Take a character, which has to come next."""
        if (found := self.peek()) != sign:
            raise self.wrong(f"`{sign}` is missing" if found else "the file ends in the middle of an array")
        self._move(1)

    def element(self) -> tuple[int, bytes]:
        """The next element, UTF-8 as far as it is, and the line it begins on."""
        self.peek()
        wanted = 0
        while True:
            try:
                _, end = _SCAN(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._more(wanted := max(2 * wanted, UNIT)):
                    self._move(max(error.pos - self._at, 0))
                    problem = "the file ends in the middle of an array" if not self.peek() else error.msg
                    raise self.wrong(problem) from error
            except RecursionError as error:
                raise self.wrong("nested too deep") from error
            else:
                if end < len(self._text) or self._ended or not self._read():  # else a number may go on
                    break
        line, element = self._line, self._text[self._at : end]
        self._move(end - self._at)
        return line, element.encode(errors="surrogateescape")

    def taken(self) -> int:
        """Bytes of the file that were read since this was asked last."""
        found, self._taken = self._taken, 0
        return found

    def wrong(self, problem: str) -> DataError:
        """The error that something is not JSON where the text stands."""
        remedy = "Write one array of objects, or an object on each line."
        return DataError(f"invalid JSON: {problem}", path=self._path, line=self._line, remedy=remedy)

    def _more(self, characters: int) -> bool:
        """Read on; False if there is nothing more, or too much already."""
        wanted = len(self._text) - self._at + characters
        if wanted > LONGEST or not self._read():
            return False
        while len(self._text) < wanted and self._read():
            pass
        return True

    def _read(self) -> bool:
        if self._ended:
            return False
        data, came = next(self._data, (b"", None))
        self._ended = came is None
        self._taken += came or 0
        self._text, self._at = self._text[self._at :] + self._decode(data, self._ended), 0
        return True

    def _move(self, characters: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + characters)
        self._at += characters
