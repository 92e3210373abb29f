"""The locks of a run directory: held for long by one process only, and looked at by others for a moment."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from xtrain.runtime.base import locks
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.locks import LAUNCHER_LOCK, hold


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """How long was waited for the lock, each time."""
    waits: list[float] = []
    monkeypatch.setattr(locks.time, "sleep", waits.append)
    return waits


def test_who_looks_at_a_lock_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onlooker = (tmp_path / LAUNCHER_LOCK).open("a")
    fcntl.flock(onlooker, fcntl.LOCK_SH)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if sum(waits) > 0.5:  # one onlooker after another
            fcntl.flock(onlooker, fcntl.LOCK_UN)

    monkeypatch.setattr(locks.time, "sleep", sleep)
    with hold(tmp_path, LAUNCHER_LOCK), onlooker, pytest.raises(BlockingIOError):
        fcntl.flock(onlooker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert sum(waits) > 0.5


def test_a_run_that_is_there_is_refused_soon(tmp_path: Path, slept: list[float]) -> None:
    with hold(tmp_path, LAUNCHER_LOCK), pytest.raises(EnvironmentFault) as refused:
        hold(tmp_path, LAUNCHER_LOCK)
    assert refused.value.code == "X707" and 1.0 < sum(slept) < 2.0


def test_a_lock_says_since_when_it_is_taken(tmp_path: Path) -> None:
    hold(tmp_path, LAUNCHER_LOCK).close()
    os.utime(tmp_path / LAUNCHER_LOCK, (0, 0))
    begin = time.time()
    with hold(tmp_path, LAUNCHER_LOCK):
        assert begin - 0.01 <= (tmp_path / LAUNCHER_LOCK).stat().st_mtime <= time.time() + 0.01


def test_a_lock_that_nothing_refers_to_is_released_without_a_warning(tmp_path: Path, recwarn) -> None:
    hold(tmp_path, LAUNCHER_LOCK)
    hold(tmp_path, LAUNCHER_LOCK).close()
    assert not [*recwarn]
