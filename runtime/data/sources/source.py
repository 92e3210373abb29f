"""Where documents come from: files of several formats, the standard library's modules, or what is made on the spot."""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ....planner.canonical import DATA, text
from ..documents.tokenizers import TextTokenizer
from ..errors import DataError
from ..records.bad_records import BadRecord
from ..records.records import Reads, Record, SourceUnit
from ..stores.digests import file_digest
from .former import options_before
from .readers import JsonLinesFiles, SourceReader, TextFiles
from .readers_columns import TableFiles
from .readers_hub import HubDataset
from .readers_made import SyntheticDocuments, UserRecords
from .readers_tokens import TokenFiles
from .token_files import files_of, is_store

WITH_PATTERNS = ("text", "jsonl", "parquet", "arrow", "tokens")
KINDS = ("python_stdlib", *WITH_PATTERNS, "huggingface", "synthetic", "python")


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
    reader: SourceReader

    def units(self) -> Iterator[SourceUnit]:
        """All there is to read, in order, in small parts; the same ones each time. To be called in one process.

        Raises DataError if a file cannot be opened, or is damaged.
        """
        return self.reader.units()

    def read(self, unit: SourceUnit) -> Iterator[Record | BadRecord]:
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
        fetched = self.reader.content() if isinstance(self.reader, HubDataset) else []

        def over(decisive: str, names: tuple[str, ...]) -> str:
            whole = blake2b(decisive.encode(), digest_size=16)
            for name, content in zip(names, contents, strict=True):
                whole.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
            for content in fetched:
                whole.update(bytes.fromhex(content))
            return whole.hexdigest()

        own = text(self._decisive(self.options), DATA)
        before = [json.dumps(self._decisive(options)) for options in options_before(self.kind, self.options)]
        found = [over(each, self.names) for each in (own, *before)]
        if self.kind in WITH_PATTERNS:
            found.append(over(own, tuple(map(self._named_otherwise, self.files, self.names))))
        return tuple(dict.fromkeys(found))

    def _decisive(self, options: Mapping[str, Any]) -> list[Any]:
        """What decides which records there are, but the files."""
        # Where a folder is does not matter, as its files do not know either.
        rest = {name: value for name, value in options.items() if not (name == "name" and self.files)}
        return [self.kind, self.reads.form, self.reads.fields, rest]

    def _named_otherwise(self, path: Path, name: str) -> str:
        return _name(path, self.base) if Path(name).is_absolute() else Path(os.path.normpath(path)).as_posix()


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
    `options` and `reads` are those of a plan; `base` is the folder of the spec where the kind is python.
    `tokenizer` decides where `tokens` end a document, unless `separator` does.
    `python_stdlib` ignores `bad_record_limit`: nobody repairs their interpreter's files.
    Raises DataError for an unknown kind, a missing or superfluous pattern, or a pattern that matches no file.
    """
    what = Reads.of(reads or {})
    options, base = dict(options or {}), base.absolute()
    if kind not in KINDS:
        raise DataError(f"unknown source kind `{kind}`", remedy=f"Use one of: {', '.join(KINDS)}.")
    if kind not in WITH_PATTERNS and patterns:
        raise DataError(f"source `{kind}` takes no patterns", remedy="Use source `text` to choose files.")
    if kind in WITH_PATTERNS and not patterns:
        raise DataError(f"source `{kind}` needs a pattern", remedy="Name its files, for example `data/**/*.txt`.")
    limit: int | None = bad_record_limit
    if kind == "python_stdlib":
        base, limit = Path(sysconfig.get_path("stdlib")), None
        patterns = ("*.py",)
    files = matched(patterns, base, folder=is_store if kind == "tokens" else None)
    reader: SourceReader
    match kind:
        case "python_stdlib" | "text":
            reader = TextFiles(files=files)
        case "jsonl":
            reader = JsonLinesFiles(files=files, reads=what)
        case "parquet" | "arrow":
            reader = TableFiles(kind=kind, files=files, reads=what)
        case "tokens":
            # The index of a pair of files is read with the file that it belongs to.
            units = tuple(dict.fromkeys(path.with_suffix(".bin") if path.suffix == ".idx" else path for path in files))
            if options["separator"] is None:
                if tokenizer is None:
                    raise DataError("source `tokens` needs a separator, or a tokenizer that has one")
                options["separator"] = tokenizer.eos
            elif tokenizer is not None and not 0 <= options["separator"] < tokenizer.vocab_size:
                message = f"separator {options['separator']} is no token: the vocabulary has {tokenizer.vocab_size:,}"
                raise DataError(message, remedy="Set `separator` to the id that ends documents in these files.")
            reader = TokenFiles(files=units, dtype=options["dtype"], separator=options["separator"])
            files = tuple(file for path in units for file in files_of(path))
        case "huggingface":
            folder = base / options["name"]
            folder = folder if folder.is_dir() else None
            reader = HubDataset(
                name=options["name"], folder=folder, config=options["config"], split=options["split"], reads=what
            )
            if folder is not None:
                files, base = matched(("**/*",), folder), folder
        case "synthetic":
            reader = SyntheticDocuments(**options)
        case _:
            reader = UserRecords(options=options, base=base, reads=what)
    absolute = bool(patterns) and all(Path(pattern).is_absolute() for pattern in patterns)
    return DataSource(
        kind=kind,
        base=base,
        files=files,
        names=tuple(path.as_posix() if absolute else _name(path, base) for path in files),
        reads=what,
        bad_record_limit=limit,
        options=options,
        reader=reader,
    )


def matched(patterns: tuple[str, ...], base: Path, folder: Callable[[Path], bool] | None = None) -> tuple[Path, ...]:
    """The files that patterns match, each once, by name; and the folders among them that `folder` takes for files.

    Raises DataError for a pattern that matches none, and for what is neither a file nor a folder.
    """
    unique = {path for pattern in patterns for path in _match(pattern, base, folder)}
    return tuple(sorted(unique, key=lambda path: _name(path, base)))


def _match(pattern: str, base: Path, folder: Callable[[Path], bool] | None) -> list[Path]:
    # Path.glob takes no absolute pattern. root_dir, not a joined one: a `[` in the base's own name is no glob.
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
    if not files:
        raise DataError(
            f"pattern matches no file: {base / pattern}",
            remedy=f"Correct the pattern; relative ones start at {base}.",
        )
    return files


def _name(path: Path, base: Path) -> str:
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
