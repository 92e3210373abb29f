"""Reader of MDS shards: https://github.com/mosaicml/streaming, streaming/base/format/mds.

A shard is the number of its samples and their offsets as uint32, a JSON object that names the columns, and the samples:
of each the sizes of the columns of varying size as uint32, then the values.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import Reads, Unusable, decoded
from xtrain.runtime.feed.sources.samples import StoredSample, Stream, json_in, open_samples
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

NUMBERS: Final = {
    **{name: name for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")},
    **{name: name for name in ("float16", "float32", "float64")},
    "int": "int64",
}
ARRAYS: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
TEXTS: Final = {"str_int": int, "str_float": float}
READ: Final = ("str", "bytes", "json", "ndarray", *TEXTS, *NUMBERS)


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none, and for a folder that lacks a
    shard which its index.json names."""
    opened = open_samples(request, shard_samples)
    for folder in dict.fromkeys(path.parent for path in opened.files):
        _check_index(folder)
    return opened


def shard_samples(path: Path, reads: Reads) -> Iterator[StoredSample]:
    """Yield the samples of a shard. Raises DataError for a damaged file."""
    stream = Stream(path)
    (count,) = np.frombuffer(stream.exactly(4), "<u4").tolist()
    offsets = np.frombuffer(stream.exactly(4 * (count + 1)), "<u4").tolist()
    columns = _columns(stream, offsets[0] - 4 - 4 * len(offsets), reads)
    for number, (begin, end) in enumerate(pairwise(offsets)):
        data = stream.exactly(end - begin)
        try:
            fields = _fields(data, columns, reads)
        except ValueError as error:
            raise stream.damaged(f"sample {number}: {error}") from error
        yield StoredSample(str(number), fields, len(data), stream.taken())
    if stream.read(1):
        raise stream.damaged("more follows the last sample")


Column = tuple[str, str, int | None, bool]
"""Name, encoding, bytes of a value if they are fixed, and whether it is read."""


def _columns(stream: Stream, size: int, reads: Reads) -> list[Column]:
    try:
        config = json.loads(stream.exactly(size))
        names, encodings, sizes = (config[f"column_{key}"] for key in ("names", "encodings", "sizes"))
        columns = [
            (str(n), str(e), s and int(s), reads.has(n)) for n, e, s in zip(names, encodings, sizes, strict=True)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise stream.damaged("it does not begin as a shard") from error
    for name, encoding, _, is_read in columns:
        if is_read and encoding.partition(":")[0] not in READ:
            remedy = f"Columns of {', '.join(READ)} are read."
            raise DataError(f"column `{name}` is `{encoding}`", path=stream.path, remedy=remedy)
    return columns


def _fields(data: bytes, columns: list[Column], reads: Reads) -> dict[str, Any]:
    """Decode a sample. Raises ValueError if its parts do not fill it."""
    varying = sum(size is None for *_, size, _ in columns)
    sizes = iter(np.frombuffer(data, "<u4", varying).tolist())
    at, fields = 4 * varying, dict[str, Any]()
    for name, encoding, size, is_read in columns:
        size = next(sizes) if size is None else size
        value, at = data[at : at + size], at + size
        if is_read and encoding == "bytes" and reads.form == "tokens":
            encoding = "ndarray:int64:-1"  # as LLM Foundry reads them by default
        fields[name] = _value(encoding, value) if is_read and at <= len(data) else None
    if at != len(data):
        raise ValueError(f"it has {len(data):,} bytes, and its columns {at:,}")
    return fields


def _value(encoding: str, data: bytes) -> Any:
    """Decode a value. Raises ValueError for an array or number that is none."""
    kind, _, form = encoding.partition(":")
    if kind in NUMBERS:
        (number,) = _numbers(data, NUMBERS[kind]).tolist()
        return number
    if kind == "ndarray":
        return _array(data, form)
    text = json_in(data) if kind == "json" else decoded(data)
    return text if isinstance(text, Unusable) or kind not in TEXTS else TEXTS[kind](text)


def _array(data: bytes, form: str) -> Any:
    """form: type of the numbers, and after a colon the shape; what is missing stands before the numbers."""
    kind, _, shape = form.partition(":")
    if not kind:
        kind, data = ARRAYS.get(data[0] if data else 0, ""), data[1:]
    if kind not in ARRAYS.values():
        raise ValueError("an array of no known type")
    if shape:
        return _numbers(data, kind).reshape([int(size) for size in shape.split(",")]).tolist()
    head, data = data[0] if data else 0, data[1:]
    width = 1 << head % 4  # bytes of a size
    sizes = _numbers(data[: width * (head >> 2)], f"uint{8 * width}").tolist()
    return _numbers(data[width * (head >> 2) :], kind).reshape(sizes).tolist()


def _numbers(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


def _check_index(folder: Path) -> None:
    try:
        shards = json.loads((folder / "index.json").read_bytes())["shards"]
        names = [[shard[key]["basename"] for key in ("raw_data", "zip_data") if shard.get(key)] for shard in shards]
    except FileNotFoundError:
        return  # as for objects of a store, which are read one by one
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError("it is no index of shards", path=folder / "index.json", remedy="Write it again.") from error
    for files in names:
        if not any((folder / Path(str(name)).name).is_file() for name in files):
            raise DataError(f"shard {files[0]} is missing", path=folder / "index.json", remedy="Download it again.")
