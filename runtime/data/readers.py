"""File formats: each reader turns one file into (text, origin) pairs and bad records, in file order."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from attrs import define

from .bad_records import BadRecord
from .errors import DataError


def read_text(path: Path, text_field: str) -> Iterator[tuple[str, str] | BadRecord]:
    """The whole file as one UTF-8 document; `text_field` is not used. Line ends are kept as they are."""
    del text_field
    with _open(path) as file:
        data = file.read()
    text = _decode(data)
    if isinstance(text, str):
        yield text, str(path)
    else:
        yield BadRecord(origin=str(path), reason=text.reason)


def read_json_lines(path: Path, text_field: str) -> Iterator[tuple[str, str] | BadRecord]:
    """One document per line: the string under `text_field` of a JSON object. Blank lines are no records."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            origin = f"{path}:{number}"
            text = _text_of(line, text_field)
            yield (text, origin) if isinstance(text, str) else BadRecord(origin=origin, reason=text.reason)


@define(frozen=True)
class _Unusable:
    reason: str


def _decode(data: bytes) -> str | _Unusable:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _Unusable(f"invalid UTF-8 at byte {error.start}")
    return text or _Unusable("empty text")


def _text_of(line: bytes, text_field: str) -> str | _Unusable:
    source = _decode(line)
    if isinstance(source, _Unusable):
        return source
    try:
        record = json.loads(source)
    except (ValueError, RecursionError) as error:
        return _Unusable(f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return _Unusable(f"a JSON {type(record).__name__}, not an object")
    if text_field not in record:
        return _Unusable(f"no field `{text_field}`")
    text = record[text_field]
    if not isinstance(text, str):
        return _Unusable(f"field `{text_field}` is a {type(text).__name__}, not a string")
    if not text:
        return _Unusable(f"field `{text_field}` is empty")
    # JSON may escape half a surrogate pair, which is a Python string but no text: it has no UTF-8 form.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return _Unusable(f"field `{text_field}` has an unpaired surrogate at character {error.start}")
    return text


@contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        # A broken archive hides an unknown number of records, so no limit on bad records can cover it.
        raise DataError(
            f"cannot be read: {error}", path=path, remedy="Check the file's permissions and that it is complete."
        ) from error
