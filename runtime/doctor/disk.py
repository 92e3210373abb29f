"""What the file system below the folder of runs does: room, speed, locks."""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Final

from attrs import frozen

# Bytes written to see how fast that is, and the seconds after which it has been seen.
SAMPLE: Final = 64 << 20
PATIENCE_SECONDS: Final = 2.0
_CHUNK: Final = 4 << 20


@frozen(kw_only=True)
class DiskFacts:
    """folder: that was looked at, the nearest one that exists. free: bytes. speed: bytes a second that reach the disk,
    None where it was too full to see. locks: why locks do not work, empty if they do. fault: why nothing can be written
    there, empty if something can."""

    folder: Path
    free: int
    speed: float | None = None
    locks: str = ""
    fault: str = ""


def look_at_disk(root: Path) -> DiskFacts:
    """Where runs below `root` would be written; nothing is left there. The folder itself may not exist yet."""
    folder = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists() or each.is_symlink())
    if not folder.exists():
        return DiskFacts(
            folder=folder, free=0, fault=f"it is a symbolic link to {folder.readlink()}, which does not exist"
        )
    if not folder.is_dir():
        return DiskFacts(folder=folder, free=0, fault="it is not a folder")
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".xtrain-doctor-") as file:
            speed = _speed(file, min(SAMPLE, free // 4))
        locks = lock_fault(folder)
    except OSError as error:
        return DiskFacts(folder=folder, free=free, fault=error.strerror or str(error))
    return DiskFacts(folder=folder, free=free, speed=speed, locks=locks)


def lock_fault(folder: Path) -> str:
    """Why two processes would not keep each other out of a run directory here; empty if they do. Raises OSError where
    no file can be made."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".xtrain-doctor-") as first,
        Path(first.name).open("ab") as second,
    ):
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"the file system refuses them: {error.strerror}"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"the file system refuses them: {error.strerror}"
    return "two processes get the same one"


def _speed(file: IO[bytes], size: int) -> float | None:
    """Bytes a second, of as many as can be written in PATIENCE_SECONDS."""
    chunk, written, began = os.urandom(_CHUNK), 0, time.perf_counter()
    while written + _CHUNK <= size and time.perf_counter() - began < PATIENCE_SECONDS:
        file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        written += _CHUNK
    return written / (time.perf_counter() - began) if written else None
