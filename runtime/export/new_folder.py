"""A folder that is either there as a whole or not at all: written beside its place, and renamed."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from xtrain.regular_files import reason_of
from xtrain.runtime.errors import ExportFailed
from xtrain.runtime.files import durable

# Held by whoever writes: without it, what lies there was left by an export that was killed.
LOCK: Final = ".export.lock"


def check_free(to: Path) -> None:
    """Raise ExportFailed if there is something at a path."""
    if os.path.lexists(to):
        raise ExportFailed(f"{to} is there already, and an export never overwrites anything; name another folder")


@contextmanager
def exporting(to: Path) -> Iterator[None]:
    """Raises ExportFailed if there is something at `to`, and for every OSError inside."""
    check_free(to)
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ExportFailed(f"{where}{reason_of(error)}; nothing is left at {to}") from error


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """An empty folder to write files into; it gets its name when the block ends, with all that is in it on the disk.

    If the block raises, it is removed. Raises ExportFailed if the name is taken or another process is writing it, and
    OSError.
    """
    check_free(to)
    partial = to.with_name(to.name + durable.PARTIAL)
    to.parent.mkdir(parents=True, exist_ok=True)
    lock = _begin(partial)
    try:
        yield partial
        check_free(to)
        durable.forget(partial / LOCK)  # which syncs the folder as well
        durable.rename(partial, to)
    except BaseException:
        with suppress(OSError):
            durable.clear(partial)
        raise
    finally:
        os.close(lock)


def _begin(partial: Path) -> int:
    """Make the folder, without what an export that was killed has left there; its lock."""
    try:
        partial.mkdir()
    except FileExistsError:
        if not (partial / LOCK).is_file():
            raise ExportFailed(f"{partial} is in the way: an export is written there first; remove it") from None
        left = _locked(partial)
        durable.clear(partial)
        os.close(left)
        partial.mkdir()
    try:
        return _locked(partial)
    except OSError:
        with suppress(OSError):
            durable.clear(partial)
        raise


def _locked(partial: Path) -> int:
    fd = durable.create(partial / LOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ExportFailed(f"another process is writing {partial}; wait until it ends") from None
    return fd
