"""Crash-safe changes of files and folders: a change is either complete and durable, or the old content remains.

Renaming within a folder is atomic. Content is synced before it gets its name, and a folder after a name in it has
changed. Every change calls `os` of this module, so that tests can make any one of them fail.

`GrowingFile` is an append-only file. `make_folder` and `publish` put complete folders into a cache; any number of
processes may do this at the same time.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

from attrs import define, field

# ruff: noqa: PTH104, PTH105, PTH106, PTH108


PARTIAL = ".partial"
REMOVING = ".removing"
COPIED_AT_ONCE = 4 * 2**20
# Errors of file systems without hard links, without links to this file, or with too many links to it already.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


def write(path: Path, content: str | bytes) -> None:
    """Replace the content of a file, or create it. Raises OSError, and then keeps the old content."""
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
    """Open an empty file for `append`, dropping old content; close it with `os.close`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def append(fd: int, content: Any) -> None:
    """Write a whole buffer; it is durable once the file has been synced."""
    left = memoryview(content).cast("B")
    while left:
        left = left[os.write(fd, left) :]


def name_also(path: Path, alias: Path) -> None:
    """Give a finished file a second name in the same file system; it replaces the file that had this name.

    Makes a hard link, or a copy where the file system has no hard links. Raises OSError, and then keeps the old file.
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
                forget(partial)  # it may be what fills the disk
            raise
    os.replace(partial, alias)
    # Replacing a name by another of the same file does nothing and keeps both.
    forget(partial)
    sync(alias.parent)


def means(alias: Path, path: Path) -> bool:
    """Return True if `name_also` made `alias` from this very file, by a link or by a copy."""
    try:
        one, other = alias.stat(), path.stat()
    except OSError:
        return False
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _copy(path: Path, to: Path) -> None:
    """Copy a file with its modification time, by which `means` recognizes it."""
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
        # Some network file systems cannot sync folders; there a rename is durable without it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or path.is_file():
            raise
    finally:
        os.close(fd)


def rename(path: Path, to: Path) -> None:
    """Rename a file or folder within its folder."""
    os.rename(path, to)
    sync(to.parent)


def forget(path: Path) -> None:
    """Remove a file if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync(path.parent)


def set_aside(folder: Path) -> Path:
    """Rename a folder, so that a half-deleted one is not taken for the whole; returns its path until `clear`."""
    aside = folder.with_name(folder.name + REMOVING)
    if aside.exists():
        clear(aside)
    rename(folder, aside)
    return aside


def clear(folder: Path) -> None:
    """Delete a folder and its content; readers that have its files open can still read them."""
    for entry in list(os.scandir(folder)):
        clear(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    os.rmdir(folder)


PARTIAL_PREFIX = ".partial-"
ATTEMPTS = 3
STALE_SECONDS = 86_400


def make_folder(final: Path, write: Callable[[Path], None], is_intact: Callable[[Path], bool]) -> None:
    """Put a folder that `write` fills at `final`, unless another process has put one there meanwhile.

    Any number of processes may do this at once: each writes into a folder of its own and the first rename wins. A
    folder at `final` that is not intact is replaced. Raises OSError if the cache cannot be written, and whatever
    `write` raises.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final.parent, f"{PARTIAL_PREFIX}*", STALE_SECONDS)
    partial = _beside(final)
    partial.mkdir()
    try:
        write(partial)
        publish(partial, final, is_intact)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, final: Path, is_intact: Callable[[Path], bool]) -> None:
    """Rename a complete folder to `final`, unless an intact one is there already.

    A folder there that is not intact is moved away. Raises OSError if the rename fails.
    """
    sync_folder(partial)
    for _ in range(ATTEMPTS):
        with suppress(OSError):
            partial.rename(final)
            sync_folder(final.parent)
            return
        if is_intact(final):
            return
        move_aside(final)
    partial.rename(final)


def move_aside(path: Path) -> None:
    """Delete a folder or file so that no reader sees it half deleted; a reader that has it mapped keeps its pages."""
    aside = _beside(path)
    # It may be gone already: another process can be at the same point.
    with suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def sweep(cache: Path, pattern: str, seconds: float) -> None:
    """Delete what killed processes left: paths that match and were not written to for `seconds`."""
    for path in cache.glob(pattern):
        with suppress(OSError):
            parts = (path, *path.iterdir()) if path.is_dir() else (path,)
            if time.time() - max(part.stat().st_mtime for part in parts) > seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, where the file system supports it."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _beside(final: Path) -> Path:
    return final.parent / f"{PARTIAL_PREFIX}{final.name}-{uuid4().hex}"


BLOCK = 1 << 22  # bytes read at a time


@define(eq=False)
class GrowingFile:
    """Append-only file and the digest of its content. Any method may raise OSError."""

    path: Path
    fd: int = field(init=False)
    size: int = field(default=0, init=False)
    digest: Any = field(factory=lambda: blake2b(digest_size=32), init=False)

    def __attrs_post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, data: bytes | memoryview) -> None:
        if not len(data):
            return  # an empty memoryview cannot be cast
        rest = memoryview(data).cast("B")
        self.digest.update(rest)
        self.size += len(rest)
        while len(rest):
            rest = rest[os.write(self.fd, rest) :]

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes and compute their digest. Raises OSError, and EOFError if there are fewer."""
        self.digest = blake2b(digest_size=32)
        os.lseek(self.fd, 0, os.SEEK_SET)
        block = memoryview(bytearray(min(max(size, 1), BLOCK)))
        self.size = 0
        while self.size < size:
            count = os.readv(self.fd, [block[: min(len(block), size - self.size)]])
            if not count:
                raise EOFError(self.path)
            self.digest.update(block[:count])
            self.size += count
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        os.fsync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step; the content is on the disk before the name points to it."""
    rest = path.with_name(f"{path.name}.new")
    with rest.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rest.replace(path)
    sync_folder(path.parent)
