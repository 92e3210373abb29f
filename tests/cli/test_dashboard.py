"""Opening the dashboard beside a launcher: what fails on the way leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from xtrain.cli import following as dashboard
from xtrain.cli.following import Dashboard


@frozen
class Opened:
    directory: Path
    attempt: str = "now"


@pytest.fixture
def started(monkeypatch) -> Iterator[list[subprocess.Popen]]:
    """What was started in place of the dashboard: something that does not end by itself."""
    found: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def start(arguments):
        found.append(popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return found[-1]

    monkeypatch.setattr(dashboard.subprocess, "Popen", start)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield found
    for each in found:
        each.kill()
        each.wait()


@pytest.fixture
def as_before():
    """Signals and descriptors of this process are as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def test_where_nothing_can_be_written_no_dashboard_is_started(tmp_path, started):
    (tmp_path / "logs/now/launcher.log").mkdir(parents=True)
    with pytest.raises(IsADirectoryError), Dashboard(Opened(tmp_path)):
        pass
    assert started == []


def test_a_launcher_that_fails_on_the_way_takes_its_dashboard_along(tmp_path, started, as_before, capfd, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(dashboard.signal, "set_wakeup_fd", fails)
    monkeypatch.setattr(dashboard.Terminal, "give_back", lambda self: None)
    with pytest.raises(OSError, match="no descriptor is left"), Dashboard(Opened(tmp_path)):
        pass
    monkeypatch.undo()
    assert started[0].poll() == -signal.SIGTERM
    os.write(1, b"to where it was")
    assert capfd.readouterr().out == "to where it was"
