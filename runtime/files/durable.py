"""Changes of files that a crash cannot halve: once one has returned it lasts, and until then what was there before is.

Renaming within a folder is atomic; content is made to last before a name is given to it, and a folder after a name in
it has changed. Every change goes through `os` here, so that tests can let any one of them fail.
"""

# ruff: noqa: PTH104, PTH105, PTH106, PTH108

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
REMOVING = ".removing"
COPIED_AT_ONCE = 4 * 2**20
# What file systems answer that know no hard links, know none of this file, or have given it as many as they can.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


def write(path: Path, content: str | bytes) -> None:
    """Replace the content of a file, or make the file. Raises OSError, and then leaves what was there."""
    partial = path.with_name(path.name + PARTIAL)
    fd = create(partial)
    try:
        append(fd, content.encode() if isinstance(content, str) else content)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, path)
    sync(path.parent)


def create(path: Path) -> int:
    """A file to `append` to, empty whatever was there; to be closed with `os.close`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def append(fd: int, content: Any) -> None:
    """Write all of a buffer; it lasts once the file has been synced."""
    left = memoryview(content).cast("B")
    while left:
        left = left[os.write(fd, left) :]


def name_also(path: Path, alias: Path) -> None:
    """Let a second name in the same file system mean a file that does not change any more; it replaces what had it.

    A hard link, which takes no room; where the disk has none, a copy. Raises OSError, and then leaves what was there.
    """
    partial = alias.with_name(alias.name + PARTIAL)
    forget(partial)
    try:
        os.link(path, partial)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            _copy(path, partial)
        except OSError:
            with suppress(OSError):
                forget(partial)  # which may be what fills the disk
            raise
    os.replace(partial, alias)
    # Replacing a name by another of the same file does nothing, and leaves both.
    forget(partial)
    sync(alias.parent)


def means(alias: Path, path: Path) -> bool:
    """Whether `name_also` has made `alias` of this very file; also where it had to copy it."""
    try:
        one, other = alias.stat(), path.stat()
    except OSError:
        return False
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _copy(path: Path, to: Path) -> None:
    """With its time of change, by which `means` knows it."""
    status = path.stat()
    fd = create(to)
    try:
        with path.open("rb", buffering=0) as file:
            while content := file.read(COPIED_AT_ONCE):
                append(fd, content)
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot do that for folders; there a rename lasts by itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or path.is_file():
            raise
    finally:
        os.close(fd)


def rename(path: Path, to: Path) -> None:
    """Give a file or folder another name in the same folder."""
    os.rename(path, to)
    sync(to.parent)


def forget(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync(path.parent)


def set_aside(folder: Path) -> Path:
    """Take a folder its name, so that nobody takes what is left of it for the whole; where it is until `clear`."""
    aside = folder.with_name(folder.name + REMOVING)
    if aside.exists():
        clear(aside)
    rename(folder, aside)
    return aside


def clear(folder: Path) -> None:
    """Delete a folder and all in it; readers that have its files open may read on."""
    for entry in list(os.scandir(folder)):
        clear(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    os.rmdir(folder)
