"""Where documents come from: the standard library's modules, text files, or JSON lines."""

import sysconfig
from collections.abc import Callable, Iterator
from glob import glob
from hashlib import blake2b
from pathlib import Path

from attrs import define

from .bad_records import BadRecord, BadRecordLog
from .errors import DataError
from .readers import read_json_lines, read_text


@define(kw_only=True, frozen=True)
class Document:
    """One text to train on, and where it was read: `path`, or `path:line`."""

    text: str
    origin: str


Reader = Callable[[Path, str], Iterator[tuple[str, str] | BadRecord]]

READERS: dict[str, Reader] = {"python_stdlib": read_text, "text": read_text, "jsonl": read_json_lines}


@define(kw_only=True, frozen=True)
class Source:
    """The files of a data set in reading order, and how to take documents out of them."""

    kind: str
    base: Path
    files: tuple[Path, ...]
    text_field: str
    bad_record_limit: int | None

    def documents(self, log: BadRecordLog) -> Iterator[Document]:
        """Stream the documents in file order, then line order; what cannot be read goes to `log`.

        Raises DataError if a file cannot be opened or unpacked, or when `log` passes its limit.
        """
        read = READERS[self.kind]
        for path in self.files:
            for record in read(path, self.text_field):
                if isinstance(record, BadRecord):
                    log.add(record)
                else:
                    text, origin = record
                    yield Document(text=text, origin=origin)

    def fingerprint(self) -> str:
        """Hex digest of every file's name (relative to `base`) and content, so a moved data set keeps it."""
        digest = blake2b(digest_size=16)
        for path in self.files:
            name = _name(path, self.base).encode()
            digest.update(len(name).to_bytes(8, "little") + name)
            content = blake2b(digest_size=32)
            try:
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        content.update(block)
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}", path=path) from error
            digest.update(content.digest())
        return digest.hexdigest()


def open_source(
    kind: str, *, patterns: tuple[str, ...] = (), text_field: str = "text", base: Path, bad_record_limit: int = 0
) -> Source:
    """Find the files of a source; nothing is read yet.

    `patterns` are globs relative to `base` (`**` crosses folders); a file that several match is taken once.
    `python_stdlib` takes no patterns and ignores `bad_record_limit`: nobody repairs their interpreter's files.
    Raises DataError for an unknown kind, a missing or superfluous pattern, or a pattern that matches no file.
    """
    if kind not in READERS:
        raise DataError(f"unknown source kind `{kind}`", remedy=f"Use one of: {', '.join(READERS)}.")
    if kind == "python_stdlib":
        if patterns:
            raise DataError("source `python_stdlib` takes no patterns", remedy="Use source `text` to choose files.")
        library = Path(sysconfig.get_path("stdlib"))
        files = _match("*.py", library)
        return Source(kind=kind, base=library, files=files, text_field="", bad_record_limit=None)
    if not patterns:
        raise DataError(f"source `{kind}` needs a pattern", remedy="Name its files, for example `corpus/**/*.txt`.")
    base = base.absolute()
    unique = {path for pattern in patterns for path in _match(pattern, base)}
    return Source(
        kind=kind,
        base=base,
        files=tuple(sorted(unique, key=lambda path: _name(path, base))),
        text_field=text_field if kind == "jsonl" else "",
        bad_record_limit=bad_record_limit,
    )


def _match(pattern: str, base: Path) -> tuple[Path, ...]:
    # Path.glob takes no absolute pattern. root_dir, not a joined one: a `[` in the base's own name is no glob.
    paths = (base / name for name in glob(pattern, root_dir=base, recursive=True))  # noqa: PTH207
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.as_posix())
    if not files:
        raise DataError(
            f"pattern matches no file: {base / pattern}",
            remedy=f"Correct the pattern; relative ones start at {base}.",
        )
    return tuple(files)


def _name(path: Path, base: Path) -> str:
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
