"""Edits of a user's files: diffs, and atomic writes."""

import difflib
import os
import tempfile
from pathlib import Path

from xtrain.cli.verb import Refused
from xtrain.runtime.base import files as durable

_STYLES = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
_RESET = "\x1b[0m"


def write(path: str | Path, data: bytes) -> None:
    """Replace a file's content by `data`, atomically. Raises OSError.

    Writes a temporary file in the same folder and renames it. Links are followed and permissions kept.
    """
    target = Path(path).resolve()
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "no permission to write it", str(path))
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut after the rename may leave an empty file
        if mode is not None:
            Path(name).chmod(mode & 0o7777)
        else:
            Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(target)
        durable.sync(target.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_new(path: Path, text: str, verb: str, *, force: bool) -> None:
    """Write a file that a verb makes. force: replace an existing one. Raises Refused."""
    try:
        if path.exists() and not force:
            raise Refused(2, f"xtrain {verb}: {path} already exists; use another name, or replace it with --force")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text.encode())
    except OSError as error:
        raise Refused(3, f"xtrain {verb}: {path} cannot be written: {error.strerror}") from None


def like(text: str, before: bytes) -> bytes:
    """Encode a text with the line ends and byte-order mark of the present file."""
    mark = b"\xef\xbb\xbf" if before.startswith(b"\xef\xbb\xbf") else b""
    windows = before.count(b"\r\n")
    ends = {b"\r\n": windows, b"\n": before.count(b"\n") - windows, b"\r": before.count(b"\r") - windows}
    return mark + text.encode().replace(b"\n", max(ends, key=lambda end: ends[end]) if any(ends.values()) else b"\n")


def difference(before: str, after: str, path: str, *, color: bool = False) -> str:
    """Return a unified diff that `patch` understands."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    shown = []
    for line in lines:
        body = line.rstrip("\n")
        painted = f"{_STYLES[line[0]]}{body}{_RESET}" if color and line[0] in _STYLES else body
        shown.append(painted if line.endswith("\n") else f"{painted}\n\\ No newline at end of file")
    return "".join(f"{line}\n" for line in shown)


def _lines(text: str) -> list[str]:
    """Return the lines with their ends; unlike `splitlines`, only `\\n` ends one."""
    return [line + "\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])


def _umask() -> int:
    """Return the umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
