"""Sources of documents: files of several formats, the standard library, synthetic text, functions of the user.

The module `…_run` of a source component has a function `open_source(request: SourceRequest) -> OpenedSource`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Final, Protocol

from attrs import evolve, field, frozen

from xtrain.contracts.data import FileSource, scheme_of
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.plan.canonical import DATA, text
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import code_of
from xtrain.runtime.feed.digests import file_digest
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, SourceUnit
from xtrain.runtime.feed.sources.files import name_of
from xtrain.runtime.feed.sources.remote import RemoteItems
from xtrain.runtime.feed.tokenizers import TextTokenizer


class SourceReader(Protocol):
    """Reader of one kind of source. Can be pickled."""

    def units(self) -> Iterator[SourceUnit]:
        """Yield all units in reading order; a unit has a few MiB at most unless one record is larger."""
        ...

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of a unit in order, in any process."""
        ...

    def num_bytes(self) -> int | None:
        """Return the total size of all units, if it is known beforehand."""
        ...


@frozen(kw_only=True)
class SourceRequest:
    """A source in a plan, before anything is read."""

    kind: str
    base: Path
    """Folder that relative paths start at."""
    patterns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(factory=dict)
    reads: Reads
    tokenizer: TextTokenizer | None = None


@frozen(kw_only=True)
class OpenedSource:
    """A source whose files are found."""

    reader: SourceReader
    files: tuple[Path, ...] = ()
    base: Path | None = None
    """Folder that names of files are relative to, if it is not the request's."""
    options: Mapping[str, Any] | None = None
    """Options that affect the records, if they are not the request's."""
    any_bad_records: bool = False
    """True if any number of records may be unreadable, because nobody can repair them."""
    fetched: Callable[[], list[str]] | None = None
    """Returns digests of data in no known files, fetching it if needed."""


@frozen(kw_only=True)
class DataSource:
    """Records of a dataset in reading order. Can be pickled; `read` works in any process."""

    kind: str
    base: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]
    """Name of each file in the fingerprint: its path from `base`, or its absolute path if all patterns are absolute, so
    that the working folder does not matter."""
    reads: Reads
    bad_record_limit: int | None
    """None: any number, as for the interpreter's own files."""
    options: Mapping[str, Any] = field(factory=dict)
    """Options that affect the records."""
    reader: SourceReader
    fetched: Callable[[], list[str]] | None = None
    """See `OpenedSource`."""
    remote: RemoteItems | None = None
    """Objects that are read after the files of this machine."""

    @property
    def num_files(self) -> int:
        """Number of files of this machine and objects of stores. Raises DataError if these cannot be listed."""
        return len(self.files) + (len(self.remote.items) if self.remote is not None else 0)

    def units(self) -> Iterator[SourceUnit]:
        """Yield everything to read, in order, in small parts; the same ones each time. Call it in one process.

        Raises DataError if a file cannot be opened, or is damaged.
        """
        if self.remote is None:
            yield from self.reader.units()
            return
        if self.files:
            yield from self.reader.units()
        for path in self.remote.paths():
            try:
                yield from evolve(self.reader, files=(path,)).units()
            except DataError as error:
                raise self.remote.failed(error) from error

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of a unit in order, including bad ones.

        Raises DataError if a file cannot be opened, or is damaged.
        """
        if self.remote is None:
            yield from self.reader.read(unit)
            return
        try:
            yield from map(self.remote.named, self.reader.read(unit))
        except DataError as error:
            raise self.remote.failed(error) from error

    def num_bytes(self) -> int | None:
        """Return the total `Unit.size` of all units in bytes, if it is known beforehand."""
        local = self.reader.num_bytes()
        remote = 0 if self.remote is None else self.remote.num_bytes()
        return None if local is None or remote is None else local + remote

    def fingerprints(self) -> tuple[str, ...]:
        """Return hex digests of every file's name and content and of every option; the first is independent of how the
        plan was stored, the others are earlier forms for the same records.

        Earlier versions used options in their order in memory, and named files below the working folder by their path
        from there; and a pattern may have been relative where it is absolute now, or the other way round. A dataset
        that was moved together with the folder that its patterns start at keeps its name. Raises DataError if a file
        cannot be read.
        """
        contents = [bytes.fromhex(file_digest(path)) for path in self.files]
        fetched = self.fetched() if self.fetched is not None else []

        def over(decisive: str, names: tuple[str, ...]) -> str:
            whole = blake2b(decisive.encode(), digest_size=16)
            for name, content in zip(names, contents, strict=True):
                whole.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
            for content in fetched:
                whole.update(bytes.fromhex(content))
            return whole.hexdigest()

        own = text(self._decisive(self.options), DATA)
        source = SOURCES.of_kind(self.kind)
        order = source.former_options if source is not None else ()
        before = [json.dumps(self._decisive(options)) for options in options_before(order, self.options)]
        digests = [over(decisive_text, self.names) for decisive_text in (own, *before)]
        if source is not None and issubclass(source, FileSource):
            digests.append(over(own, tuple(map(self._named_otherwise, self.files, self.names))))
        return tuple(dict.fromkeys(digests))

    def _decisive(self, options: Mapping[str, Any]) -> list[Any]:
        """Return everything except the files that affects the records."""
        return [self.kind, self.reads.form, self.reads.fields, options]

    def _named_otherwise(self, path: Path, name: str) -> str:
        return name_of(path, self.base) if Path(name).is_absolute() else Path(os.path.normpath(path)).as_posix()


def open_source(
    kind: str,
    *,
    patterns: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    reads: Mapping[str, Any] | None = None,
    base: Path,
    bad_record_limit: int = 0,
    tokenizer: TextTokenizer | None = None,
    objects: Path | None = None,
) -> DataSource:
    """Find the files of a source, without reading them.

    `patterns` are globs relative to `base` (`**` crosses folders); a file that several match is taken once. `options`
    and `reads` are from a plan; `base` is the folder of the spec for a source next to it. `tokenizer` decides where
    `tokens` end a document, unless `separator` does. `objects` is the folder of copies of objects, which patterns that
    are URLs match; they are listed when they are needed.

    Raises DataError for an unknown kind, a missing or superfluous pattern, or a pattern that matches no file.
    """
    what = Reads.of(reads or {})
    base = base.absolute()
    source = SOURCES.of_kind(kind)
    if source is None:
        raise DataError(f"unknown source kind `{kind}`", remedy=f"Use one of: {', '.join(SOURCES)}.")
    if not issubclass(source, FileSource) and patterns:
        raise DataError(f"source `{kind}` takes no patterns", remedy="Use a source of files to choose some.")
    if issubclass(source, FileSource) and not patterns:
        raise DataError(f"source `{kind}` needs a pattern", remedy="Name its files, for example `data/**/*.txt`.")
    local = tuple(pattern for pattern in patterns if not scheme_of(pattern))
    remote = None
    if issubclass(source, FileSource) and len(local) < len(patterns):
        urls = tuple(pattern for pattern in patterns if scheme_of(pattern))
        remote = RemoteItems(source=source, patterns=urls, cache=objects or base)
    request = SourceRequest(
        kind=kind, patterns=local, options=dict(options or {}), reads=what, base=base, tokenizer=tokenizer
    )
    opened: OpenedSource = code_of(source, source.run_module()).open_source(request)
    absolute = bool(local) and all(Path(pattern).is_absolute() for pattern in local)
    base = base if opened.base is None else opened.base
    return DataSource(
        kind=kind,
        base=base,
        files=opened.files,
        names=tuple(path.as_posix() if absolute else name_of(path, base) for path in opened.files),
        reads=what,
        bad_record_limit=None if opened.any_bad_records else bad_record_limit,
        options=request.options if opened.options is None else opened.options,
        reader=opened.reader,
        fetched=opened.fetched if remote is None else remote.digests,
        remote=remote,
    )


# options in fingerprints of earlier versions -------------------------------------------------------------------------

# Earlier versions used a source's options in the order of a plan in memory. For a plan read back from a run directory,
# whose keys are sorted, the fingerprint differed: it was the present one.


MOST: Final = 720  # orders to try for the arguments of a user's function: all orders of six


def options_before(order: Sequence[str], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `options` in each order that they may have had. order: of their names; empty if it never changed.

    The arguments of a user's function had the order of its parameters, and maps in them the order of the spec, which a
    plan that was read back has lost.
    """
    if not order:
        return
    ordered = {name: options[name] for name in order if name in options}
    for arguments in _orders(ordered.get("arguments", {})):
        yield {**ordered, **({"arguments": arguments} if arguments else {})}


def _orders(value: Any) -> Iterator[Any]:
    """Yield a JSON value with the keys of its mappings in every order, the present one first; at most MOST."""
    if isinstance(value, Mapping):
        orders = (
            dict(zip(names, items, strict=True))
            for names in permutations(value)
            for items in product(*(_orders(value[name]) for name in names))
        )
        yield from islice(orders, MOST)
    elif isinstance(value, list | tuple):
        yield from islice((list(items) for items in product(*map(_orders, value))), MOST)
    else:
        yield value
