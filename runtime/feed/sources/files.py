"""Files of a source: pattern matching, reading plain and compressed files in blocks, splitting JSON arrays.

Damaged files are reported, never cut short. A JSON array, on one line or many, is split into its elements without
reading the whole file into memory.
"""

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from glob import glob
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

from xtrain.dsl.schema.data_components import SOURCES
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import SourceUnit


def matched(patterns: tuple[str, ...], base: Path, folder: Callable[[Path], bool] | None = None) -> tuple[Path, ...]:
    """Return the files that patterns match, each once, by name; also folders that `folder` accepts as files.

    Raises DataError for a pattern without match, and for paths that are neither file nor folder.
    """
    unique = {path for pattern in patterns for path in _match(pattern, base, folder)}
    return tuple(sorted(unique, key=lambda path: name_of(path, base)))


def _match(pattern: str, base: Path, folder: Callable[[Path], bool] | None) -> list[Path]:
    # Path.glob takes no absolute pattern. root_dir instead of a joined path: a `[` in the base's own name is no glob.
    paths = [base / name for name in glob(pattern, root_dir=base, recursive=True)]  # noqa: PTH207
    files: list[Path] = []
    for path in paths:
        if path.is_file() or (folder is not None and path.is_dir() and folder(path)):
            files.append(path)
        elif not path.is_dir():
            raise DataError("a broken link, or not a regular file", path=path, remedy="Take it out of the pattern.")
    if not files and paths:
        remedy = f"Name the files in it, for example `{pattern.rstrip('/')}/*`."
        raise DataError(f"pattern matches a folder, not a file: {base / pattern}", remedy=remedy)
    if not files and os.path.isfile(base / pattern):  # noqa: PTH113  is_file raises for names that are too long
        return [base / pattern]  # a name with characters of patterns
    if not files:
        written = "; a `[` that belongs to a name is written `[[]`" if "[" in pattern else ""
        raise DataError(
            f"pattern matches no file: {base / pattern}",
            remedy=f"Correct the pattern; relative ones start at {base}{written}.",
        )
    return files


def name_of(path: Path, base: Path) -> str:
    """Return the path of a file relative to `base` if it is below it."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


BLOCK = 1 << 20
# A few bytes of a packed file can stand for 128 KiB of the same character: this bounds the unpacked size.
ZSTD_BLOCK = 1 << 13

# First bytes of files whose type differs from their name, in addition to those of other sources.
BEGINNINGS = {
    b"\x1f\x8b": ("packed with gzip", "Rename it to end in .gz."),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Rename it to end in .zst."),
    b"\xfd7zXZ\x00": ("packed with xz", "Unpack it, or pack it with gzip or zstd."),
    b"BZh91AY&SY": ("packed with bzip2", "Unpack it, or pack it with gzip or zstd."),
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
}


def blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the content of a file, unpacked if its name ends in .gz, .zst or .zstd, and the bytes of the file that each
    block took.

    Blocks have about BLOCK bytes; the last may be empty. Raises DataError if the file cannot be opened, is damaged or
    incomplete, or is not of the type of its name: a broken archive hides an unknown number of records.
    """
    try:
        with path.open("rb") as file:
            came = 0
            unpacked = _unpacked(file, path)
            for number, data in enumerate(unpacked):
                if not number:
                    _check_beginning(data, path)
                now = file.tell()
                yield data, now - came
                came = now
            if file.tell() > came:
                yield b"", file.tell() - came
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read to its end."""
    cause = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(
        f"cannot be read: {cause}", path=path, remedy="Check the file's permissions and that it is complete."
    )


def needs(package: str, what: str) -> DataError:
    """Return the error for a package that is not installed."""
    return DataError(f"{what} needs the package {package}", remedy="Install it: pip install 'xtrain[data]'")


def size_of(path: Path) -> int:
    """Return the bytes of a file. Raises DataError if they are unknown."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def _unpacked(file: IO[bytes], path: Path) -> Iterator[bytes]:
    if path.suffix in (".zst", ".zstd"):
        yield from _gathered(_unpacked_zstd(file, path))
        return
    if path.suffix == ".gz":
        yield from _gathered(iter(partial(gzip.GzipFile(fileobj=file).read1, BLOCK), b""))
        return
    while data := file.read(BLOCK):
        yield data


def _gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Join small parts into blocks. Parts before an unreadable one are yielded first, so that the error has its
    line."""
    pending: list[bytes] = []
    size = 0
    try:
        for part in parts:
            pending.append(part)
            size += len(part)
            if size >= BLOCK:
                yield b"".join(pending)
                pending, size = [], 0
    except (OSError, EOFError, zlib.error):
        if any(pending):
            yield b"".join(pending)
        raise
    if any(pending):
        yield b"".join(pending)


def _unpacked_zstd(file: IO[bytes], path: Path) -> Iterator[bytes]:
    # Not the package's stream reader: it takes the end of a file inside a frame for the end of the data.
    try:
        import zstandard
    except ImportError as error:
        raise needs("zstandard", f"{path}:") from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame: Any = None
    try:
        while data := file.read(ZSTD_BLOCK):
            while data:
                frame = frame or unpacker.decompressobj()
                yield frame.decompress(data)
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("the file ends in the middle of a frame")


def _check_beginning(data: bytes, path: Path) -> None:
    for beginning, (what, remedy) in beginnings().items():
        if data.startswith(beginning):
            raise DataError(f"it is {what}", path=path, remedy=remedy)


@cache
def beginnings() -> dict[bytes, tuple[str, str]]:
    """Return the first bytes of files without text → type of the file, and the remedy."""
    others = {
        beginning: (what, f"Use source `{name}`.")
        for name, source in SOURCES.items()
        for beginning, what in source.beginnings
    }
    return {**BEGINNINGS, **others}


BLANKS: Final = re.compile(r"[ \t\r\n]*")
_BEGINNING: Final = re.compile(r"[ \t\r\n]*(\[(?=[ \t\r\n]*\{)|\{)")
UNIT: Final = 1 << 20
"""Approximate number of characters of the elements that are read together."""
HEAD: Final = 1 << 16
"""Bytes of a file by which an array is distinguished from lines."""
LONGEST: Final = 1 << 28
"""Most characters of an element."""
# Only the ends of elements matter here: numbers and keys are not checked.
_SCAN: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: None, parse_float=len, parse_int=len).raw_decode


def opened(path: Path, data: Iterator[tuple[bytes, int]]) -> tuple[bool, Iterator[tuple[bytes, int]]]:
    """Return True if a file begins as one JSON array of objects, with its blocks.

    Raises DataError if it begins with an object over several lines, which JSON lines cannot have.
    """
    first: list[tuple[bytes, int]] = []
    try:
        while sum(len(block) for block, _ in first) < HEAD and (block := next(data, None)) is not None:
            first.append(block)
    except DataError as error:  # raised again where the blocks are read
        data = _failing(error)
    text = b"".join(block for block, _ in first).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    return _is_array(text, path), chain(first, data)


def _is_array(text: str, path: Path) -> bool:
    match = _BEGINNING.match(text)
    if match is None:
        return False
    line = text.find("\n", match.start(1))
    try:
        _, end = _SCAN(text, match.start(1))
    except (json.JSONDecodeError, RecursionError):  # longer than the beginning, or no JSON
        return match[1] == "["
    several = 0 <= line < end
    if match[1] == "{" and several:
        remedy = "Write each object on one line, or all objects as one array."
        raise DataError("an object over several lines", path=path, line=1, remedy=remedy)
    return match[1] == "[" and (several or not text[end:].strip())  # otherwise it is one of several lines


def _failing(error: DataError) -> Iterator[tuple[bytes, int]]:
    raise error
    yield


def array_units(path: Path, data: Iterator[tuple[bytes, int]]) -> Iterator[SourceUnit]:
    """Yield elements of an array, some at a time; a unit has the lines and texts of its elements.

    data: blocks of the file, and how many of its bytes each took. Raises DataError for invalid JSON, as the place of
    the next element is then unknown, and for content after the array.
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
        # Invalid UTF-8 is found again in its element.
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text, self._at, self._line, self._taken, self._ended = "", 0, 1, 0, False

    def peek(self) -> str:
        """Return the next nonblank character without taking it; empty at the end."""
        while True:
            after = BLANKS.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            self._move(after - self._at)
            if after < len(self._text) or not self._read():
                return self._text[after : after + 1]

    def skip(self, sign: str) -> None:
        """Take a character, which must come next."""
        if (following := self.peek()) != sign:
            raise self.wrong(f"`{sign}` is missing" if following else "the file ends in the middle of an array")
        self._move(1)

    def element(self) -> tuple[int, bytes]:
        """Return the line and text of the next element; invalid UTF-8 is kept."""
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
                if end < len(self._text) or self._ended or not self._read():  # otherwise a number may continue
                    break
        line, element = self._line, self._text[self._at : end]
        self._move(end - self._at)
        return line, element.encode(errors="surrogateescape")

    def taken(self) -> int:
        """Return the bytes of the file read since the last call."""
        count, self._taken = self._taken, 0
        return count

    def wrong(self, problem: str) -> DataError:
        """Return the error of invalid JSON at the current place."""
        remedy = "Write one array of objects, or an object on each line."
        return DataError(f"invalid JSON: {problem}", path=self._path, line=self._line, remedy=remedy)

    def _more(self, characters: int) -> bool:
        """Read more; return False at the end, or if there is too much already."""
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
