"""Locks are looked at without being taken, wherever that can be done."""

import fcntl
import os
from pathlib import Path

import pytest

from xtrain.tui.model import life as processes
from xtrain.tui.model.life import is_locked


@pytest.fixture
def lock(tmp_path) -> Path:
    path = tmp_path / ".launcher.lock"
    path.touch()
    return path


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Say what the kernel lists, of a file."""

    def says(text: str, path: Path) -> None:
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        (tmp_path / "locks").write_text(text.format(place=place))
        monkeypatch.setattr(processes, "LOCKS", tmp_path / "locks")

    return says


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """How often a lock was taken to see whether it is held."""
    takings: list[int] = []
    flock = fcntl.flock
    monkeypatch.setattr(processes.fcntl, "flock", lambda file, how: takings.append(how) or flock(file, how))
    return takings


@pytest.mark.parametrize("shared", [True, False])
def test_a_lock_that_the_kernel_lists_is_not_touched(lock, listed, taken, shared):
    listed("1: FLOCK  ADVISORY  WRITE 7 00:01:1 0 EOF\n2: FLOCK  ADVISORY  WRITE 13861 {place} 0 EOF\n", lock)
    assert is_locked(lock, shared=shared) is True and taken == []


def test_what_the_kernel_lists_of_other_files_and_kinds_is_no_lock(lock, listed, taken):
    listed("1: POSIX  ADVISORY  WRITE 7 {place} 0 EOF\n2: FLOCK  ADVISORY  WRITE 7 {place}1 0 EOF\n", lock)
    assert is_locked(lock, shared=False) is False and len(taken) == 1


def test_where_other_machines_write_no_lock_is_ever_taken(lock, listed, taken):
    listed("", lock)
    assert is_locked(lock, shared=True) is None and taken == []


def test_a_lock_that_the_kernel_does_not_list_is_found_all_the_same(lock, listed):
    listed("", lock)  # of a process in another container
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(lock, shared=False) is True
    assert is_locked(lock, shared=False) is False


def test_this_kernel_lists_a_lock_where_it_is_looked_for(lock, taken):
    device = lock.stat().st_dev
    mounts = Path("/proc/self/mountinfo")
    if not processes.LOCKS.exists() or f" {os.major(device)}:{os.minor(device)} " not in mounts.read_text():
        pytest.skip("the kernel does not list locks, or names this file system otherwise")
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        taken.clear()
        assert is_locked(lock, shared=False) is True and taken == []


def test_without_a_file_nothing_is_known(tmp_path):
    assert is_locked(tmp_path / "nothing", shared=False) is None
