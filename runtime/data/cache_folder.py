"""Folders of a cache: each is made once under the hash of what it depends on, and never changed."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial-"
ATTEMPTS = 3
STALE_SECONDS = 86_400


def make_folder(final: Path, write: Callable[[Path], None], is_sound: Callable[[Path], bool]) -> None:
    """Put a folder that `write` fills at `final`, unless another process has put one there meanwhile.

    Any number of processes may do this at once: each writes into a folder of its own and the first rename wins. What
    stands at `final` and is not sound is replaced. Raises OSError if the cache cannot be written, and whatever `write`
    raises.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    partial = _beside(final)
    partial.mkdir()
    try:
        write(partial)
        _publish(partial, final, is_sound)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, final: Path, is_sound: Callable[[Path], bool]) -> None:
    for _ in range(ATTEMPTS):
        with suppress(OSError):
            partial.rename(final)
            return
        if is_sound(final):
            return
        # What stands there is damaged. Moved aside in one step, no reader sees it half deleted, and a process that
        # has it mapped keeps its pages. It may be gone already: another process can be at the same point.
        aside = _beside(final)
        with suppress(FileNotFoundError):
            final.rename(aside)
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
    partial.rename(final)


def _beside(final: Path) -> Path:
    return final.parent / f"{PARTIAL}{final.name}-{uuid4().hex}"


def _sweep(cache: Path) -> None:
    """Delete what killed processes left; a folder that nothing has been written to for a day is abandoned."""
    for partial in cache.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            if time.time() - newest > STALE_SECONDS:
                shutil.rmtree(partial)
