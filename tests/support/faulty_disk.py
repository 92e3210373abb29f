"""A disk that fails at a chosen change of a file: with an error once, or with the end of the process."""

import errno
import os
from typing import Any

CHANGES = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "link", "utime")


class Death(BaseException):
    """The process is gone: whatever it would still do fails as well."""


class FaultyDisk:
    """Stands in for the module `os` in `durable`; counts changes of files and lets one of them fail.

    at: which change, from 0; None never. error: an errno for a failure that passes, None for death. links: whether the
    file system knows hard links.
    """

    def __init__(self, at: int | None = None, error: int | None = None, *, links: bool = True) -> None:
        self.at, self.error, self.count, self.links = at, error, 0, links

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name) if name != "link" or self.links else no_links
        return self._guarded(found) if name in CHANGES else found

    def _guarded(self, change: Any) -> Any:
        def run(*args: Any, **rest: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if self.at is not None and self.error is None and number >= self.at:
                raise Death
            if number == self.at:
                raise OSError(self.error, os.strerror(self.error or 0), *args[:1])
            return change(*args, **rest)

        return run


def no_links(path: Any, alias: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)


FULL = errno.ENOSPC
