"""Opens files of documents, packed or not, and reads them block by block; what is damaged is told, never cut short."""

import gzip
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from xtrain.dsl.schema.sources import SOURCES
from xtrain.runtime.data.errors import DataError

BLOCK = 1 << 20
# A few bytes of a packed file can stand for 128 KiB of the same character: this bounds what they become at once.
ZSTD_BLOCK = 1 << 13

# How files begin that are something else than their names say, beside those that other sources read.
BEGINNINGS = {
    b"\x1f\x8b": ("packed with gzip", "Rename it to end in .gz."),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Rename it to end in .zst."),
    b"\xfd7zXZ\x00": ("packed with xz", "Unpack it, or pack it with gzip or zstd."),
    b"BZh91AY&SY": ("packed with bzip2", "Unpack it, or pack it with gzip or zstd."),
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
}


def blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a file, unpacked if its name ends in .gz or .zst, and how many of its bytes each block took.

    Blocks hold about BLOCK bytes; the last may be empty. Raises DataError if the file cannot be opened, is damaged or
    incomplete, or is not what its name says: a broken archive hides an unknown number of records.
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
    """The diagnostic for a file that cannot be read to its end."""
    cause = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(
        f"cannot be read: {cause}", path=path, remedy="Check the file's permissions and that it is complete."
    )


def needs(package: str, what: str) -> DataError:
    """The diagnostic for a package that is not installed."""
    return DataError(f"{what} needs the package {package}", remedy="Install it: pip install 'xtrain[data]'")


def size_of(path: Path) -> int:
    """Bytes of a file. Raises DataError if the file system does not tell."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def _unpacked(file: IO[bytes], path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _gathered(_unpacked_zstd(file, path))
        return
    if path.suffix == ".gz":
        yield from _gathered(iter(partial(gzip.GzipFile(fileobj=file).read1, BLOCK), b""))
        return
    while data := file.read(BLOCK):
        yield data


def _gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Small parts as blocks. What was read before a part that cannot be is given first: so the break has its line."""
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
    # Not the package's stream reader: it takes the end of a file in the middle of a frame for the end of the data.
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
    """How files begin that hold no text → what such a file is, and what to do with it."""
    others = {
        beginning: (what, f"Use source `{name}`.")
        for name, source in SOURCES.items()
        for beginning, what in source.beginnings
    }
    return {**BEGINNINGS, **others}
