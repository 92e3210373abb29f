"""What a rank says of a failure, on a disk that takes no word of it: the rank is ended all the same."""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from xtrain.runtime.base import json_lines as lines
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.loop import worker
from xtrain.runtime.observe import stopping as signals
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests, report_deadline, report_failure

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no file that is always full")


@pytest.fixture
def records(tmp_path, monkeypatch) -> Records:
    """Of a run whose events find no room."""
    opened = Records.open(tmp_path, 0)
    disk = FaultyDisk()
    monkeypatch.setattr(disk, "write", full, raising=False)
    monkeypatch.setattr(lines, "os", disk)
    return opened


def full(*content: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_log() -> Iterator[None]:
    """What is written to stderr finds no room."""
    log = FULL.open("w", buffering=1)
    with redirect_stderr(log):
        yield
    log.write("was it?")
    with pytest.raises(OSError, match="No space left"):
        log.close()


@pytest.fixture
def left(monkeypatch) -> list[int]:
    """With which codes the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    return codes


def test_a_failure_of_which_nothing_can_be_written_is_no_other_failure(records):
    with full_log():
        report_failure(records, ValueError("x"), step=3, place="step 4", exit_code=1, trace=True)
    with pytest.raises(EnvironmentFault, match="No space left"):
        records.warn("told", step=3)


def test_a_rank_is_ended_at_its_deadline_though_nothing_can_be_reported(records, left):
    requests = StopRequests(deadline_seconds=0.05, report=lambda why: report_deadline(records, why, step=3))
    with full_log():
        requests.hurry("sigterm")
        until = time.monotonic() + 10
        while not left and time.monotonic() < until:
            time.sleep(0.01)
    assert left == [1]


def test_a_process_leaves_though_its_log_takes_nothing(left):
    with full_log():
        sys.stderr.write("half a line")
        worker.exit_process(3)
    assert left == [3]
