"""What the run side of a source takes and gives: the module `…_run` beside it has an `open_source` of these."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.records.bad_records import BadRecord
from xtrain.runtime.data.records.records import Reads, SourceRecord, SourceUnit


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
