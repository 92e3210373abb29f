"""Files of which it is known, after any crash, what is in them."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import define, field

from xtrain.runtime.data.stores.cache_folder import sync_folder

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
