"""Objects of stores and files of web servers as files of a source: listed, copied one after another, removed once read.

fsspec reaches them; credentials and addresses of services come from its configuration and from the environment.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final, TypeVar

from attrs import evolve, frozen

from xtrain.contracts.data import FileSource, has_wildcard, scheme_of
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.files import STALE_SECONDS, sweep
from xtrain.runtime.feed.digests import file_digest
from xtrain.runtime.feed.records import BadRecord, SourceRecord

TRIES: Final = 5
"""Times in a row that a request may fail."""
PAUSE: Final = 0.5
"""Seconds before the second request; each further pause is twice as long."""
BLOCK: Final = 1 << 20
AHEAD: Final = 4
"""Objects that are copied while earlier ones are read."""
# Facts of a listing about the content of an object, the most precise first. A time counts only with the size.
_CONTENT: Final = ("sha256", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "crc32c")
_TIMES: Final = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "modified", "created")
_PREFIX: Final = "objects-"
Result = TypeVar("Result")


@frozen
class RemoteFile:
    """A file of a listing."""

    url: str
    size: int | None
    """Bytes; None if the server does not say."""
    version: str
    """Words of the server that change with the content; empty if it says nothing."""


@frozen
class RemoteItem:
    """An input that a source reads as one file: an object with its companions, or a folder with the files in it."""

    url: str
    files: tuple[RemoteFile, ...]

    @property
    def key(self) -> str:
        """Name of the folder with its copy."""
        return blake2b(self.url.encode(), digest_size=8).hexdigest()

    @property
    def size(self) -> int | None:
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def place(self, file: RemoteFile) -> str:
        """Return the path of the copy of a file from the folder `key`."""
        inside = file.url.removeprefix(f"{self.url}/")
        return _name(file.url) if inside == file.url else f"{_name(self.url)}/{inside}"


@frozen(kw_only=True, slots=False)
class RemoteItems:
    """The objects that patterns of a source match, listed at the first use. Can be pickled.

    Copies of objects lie in a folder below `cache` that this process removes at its end.
    """

    source: type[FileSource]
    patterns: tuple[str, ...]
    cache: Path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_copies"}

    @cached_property
    def items(self) -> tuple[RemoteItem, ...]:
        """All objects by URL, each once. Raises DataError for a pattern that matches none, and for a store that cannot
        be reached or refuses access."""
        found = {item.url: item for pattern in self.patterns for item in self._matches(pattern)}
        return tuple(found[url] for url in sorted(found))

    def paths(self) -> Iterator[Path]:
        """Yield the path of a copy of each object. Copies of a source whose units carry their content are removed when
        the next one is asked for.

        Raises DataError for an object that cannot be read or has changed since it was listed.
        """
        stopped = Event()
        with ThreadPoolExecutor(AHEAD) as pool:
            rest = ((item, pool.submit(self._copy, item, stopped)) for item in self.items)
            coming = deque(islice(rest, AHEAD))
            try:
                while coming:
                    item, copied = coming.popleft()
                    path = copied.result()
                    coming.extend(islice(rest, 1))
                    yield path
                    if not self.source.reads_later:
                        _remove(self._folder / item.key)
            finally:
                stopped.set()
                pool.shutdown(cancel_futures=True)

    def num_bytes(self) -> int | None:
        """Return the bytes of all objects; None if a server does not say."""
        sizes = [item.size for item in self.items]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def digests(self) -> list[str]:
        """List the objects again; return hex digests of the URL and version of each file, or of the URL and the content
        if the server names no version. Raises DataError."""
        for listed in ("items", "_urls"):
            self.__dict__.pop(listed, None)
        return [_digest(file, self._content) for item in self.items for file in item.files]

    def named(self, record: SourceRecord | BadRecord) -> SourceRecord | BadRecord:
        """Return a record that was read from a copy with the URL as its origin."""
        return evolve(record, origin=self.url_of(record.origin))

    def url_of(self, text: str) -> str:
        """Return a text that begins with the path of a copy with the URL in its place."""
        start = f"{self.cache}/{_PREFIX}"
        if not text.startswith(start):
            return text
        _, key, rest = text.removeprefix(start).split("/", 2)
        url = self._urls[key]
        return url + rest.removeprefix(_name(url))

    def failed(self, error: DataError) -> DataError:
        """Return an error of a copy as an error of its object."""
        path = None if error.path is None else self.url_of(str(error.path))
        return DataError(self.url_of(error.message), path=path, line=error.line, remedy=error.remedy)

    @cached_property
    def _urls(self) -> dict[str, str]:
        return {item.key: item.url for item in self.items}

    @cached_property
    def _copies(self) -> "TemporaryDirectory[str]":
        self.cache.mkdir(parents=True, exist_ok=True)
        sweep(self.cache, f"{_PREFIX}*", STALE_SECONDS)
        return TemporaryDirectory(prefix=_PREFIX, dir=self.cache)

    @property
    def _folder(self) -> Path:
        return Path(self._copies.name)

    def _matches(self, pattern: str) -> Iterator[RemoteItem]:
        system, path = _opened(pattern)

        def listed() -> dict[str, Any]:
            if has_wildcard(pattern):
                return system.glob(path, detail=True)
            return {path: system.info(path)}

        def of(place: str, info: Any) -> RemoteFile:
            return _file(pattern if place == path else _url(system, place), info)

        found = _tried(listed, pattern)
        matched = False
        for place, info in found.items():
            if info["type"] == "directory":
                inside = _tried(lambda place=place: system.find(place, detail=True), pattern)
                if not self.source.folder_files or not {_name(each) for each in inside} >= set(
                    self.source.folder_files
                ):
                    continue
                files = tuple(of(each, facts) for each, facts in sorted(inside.items()))
                yield RemoteItem(_url(system, place).rstrip("/"), files)
            elif _suffix(place) in self.source.beside.values() and _swapped(place, self.source.beside) in found:
                pass  # comes with its object
            else:
                other = self._beside(system, place, found, pattern)
                url = pattern if place == path else _url(system, place)
                yield RemoteItem(url, (of(place, info), *(of(name, facts) for name, facts in other)))
            matched = True
        if not matched:
            what = "only folders match" if found else "no object matches"
            raise DataError(f"{what} {pattern}", remedy="Correct the URL; `*` stands for a part of a name.")

    def _beside(self, system: Any, place: str, found: dict[str, Any], pattern: str) -> list[tuple[str, Any]]:
        other = self.source.beside.get(_suffix(place))
        if other is None:
            return []
        name = place.removesuffix(_suffix(place)) + other
        if name not in found and not _tried(lambda: system.exists(name), pattern):
            return []
        return [(name, found.get(name) or _tried(lambda: system.info(name), pattern))]

    def _copy(self, item: RemoteItem, stopped: Event) -> Path:
        folder = self._folder / item.key
        for file in item.files:
            target = folder / item.place(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(file, target, stopped)
        return folder / _name(item.url)

    def _content(self, file: RemoteFile) -> str:
        target = self._folder / RemoteItem(file.url, (file,)).key / "content"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _download(file, target, Event())
            return file_digest(target)
        finally:
            _remove(target.parent)


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it. Raises DataError without the package for it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        remedy = "pip install 'xtrain[objects]', or the package that fsspec names."
        raise DataError(f"{scheme_of(url)}:// needs a package: {_reason(error)}", path=url, remedy=remedy) from error
    except ValueError as error:
        raise DataError(_reason(error), path=url, remedy="Use a scheme that fsspec knows, such as s3://.") from error


def _tried(request: Callable[[], Result], url: str) -> Result:
    """Return the result of a request, repeated while it fails. Raises DataError."""
    for number in range(TRIES):
        try:
            return request()
        except Exception as error:  # each package has exceptions of its own
            if _is_final(error) or number == TRIES - 1:
                raise _refused(error, url) from error
            time.sleep(PAUSE * 2**number)
    raise AssertionError


def _download(file: RemoteFile, target: Path, stopped: Event) -> None:
    """Copy an object; continue where a connection ended. Raises DataError."""
    failures, most = 0, 0
    with target.open("wb", buffering=0) as out:
        while True:
            try:
                _continue(file, out, stopped)
                if file.size is None or out.tell() >= file.size or stopped.is_set():
                    break
                raise EOFError(f"ended after {out.tell():,} of {file.size:,} bytes")
            except Exception as error:  # each package has exceptions of its own
                failures = failures + 1 if out.tell() <= most else 1
                most = max(most, out.tell())
                if _is_final(error) or failures == TRIES:
                    raise _refused(error, file.url) from error
                if isinstance(error, ValueError | NotImplementedError):  # the server cannot send a part
                    out.seek(0)
                    out.truncate()
                stopped.wait(PAUSE * 2 ** (failures - 1))
        size = out.tell()
    if file.size is not None and size != file.size and not stopped.is_set():
        message = f"has {size:,} bytes, and {file.size:,} when it was listed"
        raise DataError(message, path=file.url, remedy="Wait until it is complete, and start again.")


def _continue(file: RemoteFile, out: Any, stopped: Event) -> None:
    """Append what the copy lacks. Raises whatever the package raises, and DataError if the disk is full."""
    system, path = _opened(file.url)
    whole = scheme_of(file.url) in ("http", "https") and not out.tell()
    # A web server may refuse to send parts, and blocks cost a request each: the first request is for everything.
    with system.open(path, "rb", **({"block_size": 0} if whole else {"block_size": BLOCK})) as remote:
        if out.tell():
            remote.seek(out.tell())
        while not stopped.is_set() and (data := remote.read(BLOCK)):
            try:
                out.write(data)
            except OSError as error:
                message = f"its copy cannot be written: {error.strerror}"
                raise DataError(message, path=file.url, remedy=f"Free space on the disk of {out.name}.") from error


def _is_final(error: Exception) -> bool:
    return isinstance(error, DataError | FileNotFoundError | PermissionError | ImportError)


def _refused(error: Exception, url: str) -> DataError:
    if isinstance(error, DataError):
        return error
    if isinstance(error, FileNotFoundError):
        return DataError("there is no such object", path=url, remedy="Correct the URL.")
    if isinstance(error, PermissionError) or "credentials" in str(error).lower():
        remedy = "Give credentials in the environment or the configuration of this service, never in the spec."
        return DataError(f"access is refused: {_reason(error)}", path=url, remedy=remedy)
    return DataError(f"cannot be read: {_reason(error)}", path=url, remedy="Check the network and the service.")


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _file(url: str, info: dict[str, Any]) -> RemoteFile:
    facts = {**info, **(info.get("lfs") or {})}
    size = facts.get("size")
    content = next((f"{name} {facts[name]}" for name in _CONTENT if facts.get(name)), "")
    if not content and size is not None:
        content = next((f"{name} {facts[name]} {size}" for name in _TIMES if facts.get(name)), "")
    return RemoteFile(url, None if size is None else int(size), content)


def _digest(file: RemoteFile, content: Callable[[RemoteFile], str]) -> str:
    version = file.version or content(file)
    return blake2b(f"{file.url}\n{version}".encode(), digest_size=32).hexdigest()


def _url(system: Any, place: str) -> str:
    return place if "://" in place else system.unstrip_protocol(place)


def _name(url: str) -> str:
    """Return the name of the file of a URL, without the query of a web server."""
    return url.rstrip("/").rsplit("/", 1)[-1].partition("?")[0] or "object"


def _suffix(place: str) -> str:
    return Path(_name(place)).suffix


def _swapped(place: str, beside: Any) -> str:
    other = {extra: own for own, extra in beside.items()}
    return place.removesuffix(_suffix(place)) + other[_suffix(place)]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
