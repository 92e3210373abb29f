"""Reader of tar files as WebDataset writes them: https://github.com/webdataset/webdataset."""

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.runtime.feed.records import Reads, Unusable, decoded
from xtrain.runtime.feed.sources.files import LONGEST
from xtrain.runtime.feed.sources.samples import StoredSample, Stream, json_in, open_samples
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest

END: Final = bytes(1024)  # the two blocks that end an archive


def _number(data: bytes) -> int | Unusable:
    try:
        return int(data)
    except ValueError:
        return Unusable(f"{data[:20]!r} is not a number")


def _array(data: bytes) -> Any:
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        return Unusable(f"not an array of numpy: {error}")


DECODERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    **dict.fromkeys(("txt", "text", "transcript"), decoded),
    **dict.fromkeys(("json", "jsn"), json_in),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _number),
    "npy": _array,
}
"""By the last part of an extension, as WebDataset's own."""


def open_source(request: SourceRequest) -> OpenedSource:
    """Return the files that match. Raises DataError for a pattern that matches none."""
    return open_samples(request, tar_samples)


def tar_samples(path: Path, reads: Reads) -> Iterator[StoredSample]:
    """Yield a sample for neighbouring members whose names are equal up to the first dot of the last part. Raises
    DataError for a damaged file."""
    stream = Stream(path)
    key, fields, length = "", dict[str, Any](), 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as file:  # type: ignore[call-overload]
            while (member := file.next()) is not None:
                file.members.clear()  # they would be kept
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                extension = extension.lower()
                # Names that begin so are notes about the whole file.
                if not (member.isreg() and stem and extension) or stem.startswith("__"):
                    continue
                if folder + slash + stem != key or extension in fields:
                    if fields:
                        yield StoredSample(key, fields, length, stream.taken())
                    key, length = folder + slash + stem, 0
                    fields = {"__key__": key}
                length += member.size
                fields[extension] = _value(file, member, extension) if reads.has(extension) else None
    except tarfile.TarError as error:
        raise stream.damaged(str(error)) from error
    stream.skip()
    if stream.end != END:
        raise stream.damaged("the archive has no end")
    if fields:
        yield StoredSample(key, fields, length, stream.taken())


def _value(file: tarfile.TarFile, member: tarfile.TarInfo, extension: str) -> Any:
    decode = DECODERS.get(extension.rpartition(".")[2])
    if decode is None:
        return Unusable(f"files .{extension} are not read, only {', '.join(f'.{name}' for name in DECODERS)}")
    if member.size > LONGEST:
        return Unusable(f"it has {member.size:,} bytes, at most {LONGEST:,} are read")
    content = file.extractfile(member)
    assert content is not None, "a regular file"
    return decode(content.read())
