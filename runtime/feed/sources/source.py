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

from attrs import field, frozen

from xtrain.dsl.schema.data_components import SOURCES
from xtrain.plan.canonical import DATA, text
from xtrain.plan.data import FileSource
from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.base.ops import code_of
from xtrain.runtime.feed.digests import file_digest
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, SourceUnit
from xtrain.runtime.feed.sources.files import name_of
from xtrain.runtime.feed.tokenizers import TextTokenizer


class SourceReader(Protocol):
    """How one kind of source is read. It can be pickled."""

    def units(self) -> Iterator[SourceUnit]:
        """What there is, in reading order, in parts of a few MiB at most unless one record is larger."""
        ...

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """The records of a unit, in their order, in whatever process."""
        ...

    def num_bytes(self) -> int | None:
        """What the sizes of all units add up to, if it can be known beforehand."""
        ...


@frozen(kw_only=True)
class SourceRequest:
    """What a plan says of a source; nothing is read yet."""

    kind: str
    base: Path
    """Where relative paths start."""
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
    """What the names of files start at, if it is not that of the request."""
    options: Mapping[str, Any] | None = None
    """Those that decide which records there are, if they are not those of the request."""
    any_bad_records: bool = False
    """Whether any number of records may be unreadable: nobody can repair them."""
    fetched: Callable[[], list[str]] | None = None
    """Digests of what is read where that is in no files that are known: it may be fetched for that."""


@frozen(kw_only=True)
class DataSource:
    """The records of a data set in reading order. It can be pickled; `read` works in any process."""

    kind: str
    base: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]
    """What each file is called in the fingerprint: by its path from `base`, or, where all patterns are absolute, by
    that, so that it does not matter which folder a command is given in."""
    reads: Reads
    bad_record_limit: int | None
    """None: any number, for nobody repairs their interpreter's files."""
    options: Mapping[str, Any] = field(factory=dict)
    """Those that decide which records there are."""
    reader: SourceReader
    fetched: Callable[[], list[str]] | None = None
    """See `OpenedSource`."""

    def units(self) -> Iterator[SourceUnit]:
        """All there is to read, in order, in small parts; the same ones each time. To be called in one process.

        Raises DataError if a file cannot be opened, or is damaged.
        """
        return self.reader.units()

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """The records of a unit in their order, those that cannot be used among them.

        Raises DataError if a file cannot be opened, or is damaged.
        """
        return self.reader.read(unit)

    def num_bytes(self) -> int | None:
        """Bytes of input that `Unit.size` of all units adds up to, if that is known beforehand."""
        return self.reader.num_bytes()

    def fingerprints(self) -> tuple[str, ...]:
        """Hex digests of every file's name and content and of every option: the first is the same however a plan has
        travelled, the others are what the same records may be known by besides.

        Earlier versions took options in the order they came in, and called files below the working folder by their
        path from there; and a pattern may have been relative where it is absolute now, or the other way round. A data
        set that was moved together with the folder that its patterns start at keeps its name. Raises DataError if a
        file cannot be read.
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
        found = [over(each, self.names) for each in (own, *before)]
        if source is not None and issubclass(source, FileSource):
            found.append(over(own, tuple(map(self._named_otherwise, self.files, self.names))))
        return tuple(dict.fromkeys(found))

    def _decisive(self, options: Mapping[str, Any]) -> list[Any]:
        """What decides which records there are, but the files."""
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
) -> DataSource:
    """Find the files of a source; nothing is read yet.

    `patterns` are globs relative to `base` (`**` crosses folders); a file that several match is taken once.
    `options` and `reads` are those of a plan; `base` is the folder of the spec for a source that lies beside it.
    `tokenizer` decides where `tokens` end a document, unless `separator` does.
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
    request = SourceRequest(
        kind=kind, patterns=patterns, options=dict(options or {}), reads=what, base=base, tokenizer=tokenizer
    )
    opened: OpenedSource = code_of(source, source.run_module()).open_source(request)
    absolute = bool(patterns) and all(Path(pattern).is_absolute() for pattern in patterns)
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
        fetched=opened.fetched,
    )


# options in fingerprints of earlier versions -------------------------------------------------------------------------

# They took the options of a source into its fingerprint in the order of a plan in memory. Where a plan was read back
# from a run directory, which has its keys sorted, the fingerprint was another one: that of today.


MOST: Final = 720  # orders that are tried of the arguments of a user's function: all there are of six


def options_before(order: Sequence[str], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`options` in each order that they may have had. order: that of their names; none if they never had another.

    The arguments of a user's function had that of its parameters, and maps among them that of the spec, which a plan
    that was read back has lost.
    """
    if not order:
        return
    ordered = {name: options[name] for name in order if name in options}
    for arguments in _orders(ordered.get("arguments", {})):
        yield {**ordered, **({"arguments": arguments} if arguments else {})}


def _orders(value: Any) -> Iterator[Any]:
    """A JSON value with the keys of its mappings in every order, as it stands first; MOST at most."""
    if isinstance(value, Mapping):
        found = (
            dict(zip(names, items, strict=True))
            for names in permutations(value)
            for items in product(*(_orders(value[name]) for name in names))
        )
        yield from islice(found, MOST)
    elif isinstance(value, list | tuple):
        yield from islice((list(items) for items in product(*map(_orders, value))), MOST)
    else:
        yield value
