"""Crash-safe changes of files and folders: a change is either complete and durable, or the old content remains.

Renaming within a folder is atomic. Content is synced before it gets its name, and a folder after a name in it has
changed. Every change calls `os` of this module, so that tests can make any one of them fail.

`GrowingFile` is a file that is only appended to. `make_folder` and `publish` put complete folders into a cache; any
number of processes may do this at the same time.
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


PARTIAL_PREFIX = ".partial-"
ATTEMPTS = 3
STALE_SECONDS = 86_400


def make_folder(final: Path, write: Callable[[Path], None], is_intact: Callable[[Path], bool]) -> None:
    """Put a folder that `write` fills at `final`, unless another process has put one there meanwhile.

    Any number of processes may do this at once: each writes into a folder of its own and the first rename wins. What
    stands at `final` and is not intact is replaced. Raises OSError if the cache cannot be written, and whatever `write`
    raises.
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
    """Rename a complete folder to `final`, unless an intact one stands there: then it is left where it is.

    What stands there and is not intact makes room. Raises OSError if it cannot be renamed.
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
    """Delete a folder or file so that no reader sees it half deleted; one that has it mapped keeps its pages."""
    aside = _beside(path)
    # It may be gone already: another process can be at the same point.
    with suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def sweep(cache: Path, pattern: str, seconds: float) -> None:
    """Delete what killed processes left: what matches and has not been written to for so long is abandoned."""
    for path in cache.glob(pattern):
        with suppress(OSError):
            parts = (path, *path.iterdir()) if path.is_dir() else (path,)
            if time.time() - max(part.stat().st_mtime for part in parts) > seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk, where its file system can be asked to."""
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
    """A file that only ever becomes longer, and the digest of what is in it. Any method may raise OSError."""

    path: Path
    fd: int = field(init=False)
    size: int = field(default=0, init=False)
    digest: Any = field(factory=lambda: blake2b(digest_size=32), init=False)

    def __attrs_post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, data: bytes | memoryview) -> None:
        if not len(data):
            return  # nothing cannot be cast
        rest = memoryview(data).cast("B")
        self.digest.update(rest)
        self.size += len(rest)
        while len(rest):
            rest = rest[os.write(self.fd, rest) :]

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes, and take their digest. Raises OSError, EOFError if there are fewer."""
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
    """Put `content` at `path` in one step, on the disk before the name points to it."""
    rest = path.with_name(f"{path.name}.new")
    with rest.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rest.replace(path)
    sync_folder(path.parent)
