"""Folders of a cache: each is made once under the hash of what it depends on, and never changed."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial-"
ATTEMPTS = 3
STALE_SECONDS = 86_400


def make_folder(final: Path, write: Callable[[Path], None], is_intact: Callable[[Path], bool]) -> None:
    """Put a folder that `write` fills at `final`, unless another process has put one there meanwhile.

    Any number of processes may do this at once: each writes into a folder of its own and the first rename wins. What
    stands at `final` and is not intact is replaced. Raises OSError if the cache cannot be written, and whatever `write`
    raises.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final.parent, f"{PARTIAL}*", STALE_SECONDS)
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
    return final.parent / f"{PARTIAL}{final.name}-{uuid4().hex}"
