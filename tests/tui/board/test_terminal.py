"""The dashboard on a terminal of its own: whatever ends it, the terminal is given back and no traceback is printed."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from made_runs import made_run

from xtrain.tui.board.terminal import Terminal

SECOND_SCREEN, BACK = b"\x1b[?1049h", b"\x1b[?1049l"
SEQUENCE = re.compile(r"\x1b\[[0-9;?<>$]*[a-zA-Z]")
PATIENCE_SECONDS = 30.0


class Seat:
    """A terminal of 80 by 24 with a process at it."""

    def __init__(self, arguments: list[str], folder: Path, columns: int = 80, rows: int = 24) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.seen = b""
        environment = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(folder / "state"), "CI": ""}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment,
            preexec_fn=_lead, close_fds=True,
        )  # fmt: skip
        self.slave = slave

    def read_until(self, wanted: bytes) -> None:
        """Read what is drawn until `wanted` is in it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self._read(0.1)

    def _read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.seen += os.read(self.master, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ends(self) -> int:
        """The exit code, once everything that was written has been read."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._read(0.05)
        self._read(0.05)
        return self.process.returncode

    def given_back(self) -> bool:
        """Whether the terminal is as it was found, and what is seen after the last screen is said in lines."""
        return termios.tcgetattr(self.slave) == self.before and self.seen.rfind(BACK) > self.seen.rfind(SECOND_SCREEN)

    def said(self) -> str:
        """What stands on the terminal after the dashboard has left it."""
        return SEQUENCE.sub("", self.seen[self.seen.rfind(BACK) :].decode(errors="replace")).strip()

    def close(self) -> None:
        for descriptor in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _lead() -> None:
    """In the child: a session of its own, with standard input as its terminal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def seats():
    taken: list[Seat] = []

    def seat(*arguments: str, folder: Path) -> Seat:
        taken.append(Seat(list(arguments), folder))
        return taken[-1]

    yield seat
    for each in taken:
        each.close()


def test_a_directory_that_goes_away_harms_nothing_and_q_leaves(tmp_path, seats):
    run = made_run(tmp_path / "runs" / "a", end="killed", logged=20).directory
    seat = seats("-m", "xtrain", "watch", folder=tmp_path)  # the newest below runs/
    seat.read_until(b"its processes are gone")
    shutil.rmtree(run.parent)
    seat.read_until(b"its directory is gone")
    seat.press(b"6\t\t?")
    seat.read_until(b"freeze the view")  # of the help
    seat.seen = seat.seen[seat.seen.rfind(SECOND_SCREEN) :].replace(b"LOST", b"")
    seat.press(b"\x1b")
    seat.read_until(b"LOST")  # what lies below it
    seat.press(b"q")
    assert seat.ends() == 0
    assert seat.given_back() and seat.said() == ""
    assert not (tmp_path / "state").exists()  # nothing unexpected was written


@pytest.mark.slow
def test_a_signal_leaves_in_order(tmp_path, seats):
    run = made_run(tmp_path / "a", logged=20).directory
    seat = seats("-m", "xtrain", "watch", str(run), folder=tmp_path)
    seat.read_until(b"two_ranks_cpu")
    seat.process.send_signal(signal.SIGTERM)
    assert seat.ends() == 128 + signal.SIGTERM
    assert seat.given_back() and seat.said() == ""


def test_a_terminal_that_takes_nothing_any_more_keeps_nobody(tmp_path, seats):
    run = made_run(tmp_path / "a", logged=20).directory
    seat = seats("-m", "xtrain", "watch", str(run), folder=tmp_path)
    seat.read_until(b"two_ranks_cpu")
    for _ in range(100):  # themes: each draws the whole screen, and nobody reads it
        seat.press(b"t")
        time.sleep(0.02)
    assert len(os.read(seat.master, 1)) == 1
    seat.process.send_signal(signal.SIGTERM)
    seat.process.wait(PATIENCE_SECONDS)


def test_a_terminal_that_is_closed_is_left_in_silence(tmp_path, seats):
    run = made_run(tmp_path / "a", logged=20).directory
    seat = seats("-m", "xtrain", "watch", str(run), folder=tmp_path)
    seat.read_until(b"two_ranks_cpu")
    os.close(seat.slave)
    os.close(seat.master)
    seat.process.wait(PATIENCE_SECONDS)
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_terminal_that_takes_nothing_does_not_keep_the_process(tmp_path, seats):
    run = made_run(tmp_path / "a", logged=20).directory
    seat = seats("-m", "xtrain", "watch", str(run), folder=tmp_path)
    seat.read_until(b"two_ranks_cpu")
    for _ in range(400):  # each draws another screen, and nobody reads
        seat.press(b"t")
    time.sleep(0.5)
    seat.process.send_signal(signal.SIGTERM)
    assert seat.process.wait(PATIENCE_SECONDS) in (0, 128 + signal.SIGTERM)


BROKEN = """
import sys
from pathlib import Path
from xtrain.tui.board.pane import TextBlock
from xtrain.tui.board.opening import open_board
def render(self):
    raise ZeroDivisionError("of all things")
TextBlock.render = render
sys.exit(open_board(Path(sys.argv[1])))
"""


def test_an_error_of_the_dashboard_is_one_line_and_a_file(tmp_path, seats):
    run = made_run(tmp_path / "a", logged=20).directory
    seat = seats("-c", BROKEN, str(run), folder=tmp_path)
    assert seat.ends() == 1
    log = tmp_path / "state" / "xtrain" / "dashboard.log"
    assert "ZeroDivisionError: of all things" in log.read_text()
    assert "Traceback" not in seat.seen.decode()
    assert "".join(seat.said().splitlines()) == (
        f"the dashboard failed and was closed; training continues; details are in {log}"
    )
    assert seat.given_back()


LAUNCHED = """
import os, signal, sys, time
from pathlib import Path
from attrs import frozen
from xtrain.cli.following import Dashboard
@frozen
class Opened:
    directory: Path
    attempt: str = "now"
print("before")
with Dashboard(Opened(Path(sys.argv[1]))):
    print("a word of the launcher")
    until = Path(sys.argv[2])
    while not until.exists():
        time.sleep(0.05)
print("after")
sys.exit(75)
"""


@pytest.fixture
def launched(tmp_path, seats):
    """A launcher beside which a dashboard is open, the run it writes, and the file that says that the run has ended."""
    run = made_run(tmp_path / "a", end="running", logged=20, steps=100, start=time.time() - 20)
    over = tmp_path / "over"
    with run.alive():
        seat = seats("-c", LAUNCHED, str(run.directory), str(over), folder=tmp_path)
        seat.read_until(b"training")
        yield seat, run, over


def dashboard_of(seat: Seat) -> int:
    children = subprocess.run(["pgrep", "-P", str(seat.process.pid)], capture_output=True, text=True, check=True)
    return int(children.stdout.split()[0])


def test_a_dashboard_that_is_killed_gives_way_to_lines_and_the_run_goes_on(launched):
    seat, run, over = launched
    assert b"a word of the launcher" not in seat.seen
    os.kill(dashboard_of(seat), signal.SIGKILL)
    seat.read_until(b"the dashboard is closed and the run continues")
    assert seat.given_back()
    assert "a word of the launcher" in seat.said()
    assert "setup" not in seat.said() and "eval" not in seat.said()  # what was seen before is not printed again
    run.start = time.time() - 24  # so that what follows is of now, however slow the machine
    run.log(21, 30)
    run.checkpoint()
    seat.read_until(b"saved in")
    run.end("stopped")
    over.touch()
    assert seat.ends() == 75
    assert seat.said().endswith("after") and "─ stopped ─" in seat.said()


def test_an_ended_run_is_shown_until_q_and_then_summed_up(launched):
    seat, run, over = launched
    run.end("done")
    over.touch()
    seat.read_until(b"DONE")
    time.sleep(0.3)
    assert seat.process.poll() is None
    seat.press(b"q")
    assert seat.ends() == 75
    assert seat.given_back() and "the run goes on" not in seat.said()
    assert "─ done ─" in seat.said() and seat.said().endswith("after")


@pytest.mark.slow
def test_a_launcher_that_was_asked_to_stop_waits_for_nobody(launched):
    seat, run, over = launched
    run.end("stopped")
    over.touch()
    seat.read_until(b"STOPPED")
    seat.process.send_signal(signal.SIGTERM)  # as a scheduler does that wants its machine back
    assert seat.ends() == 75
    assert seat.given_back() and seat.said().endswith("after")


@pytest.mark.slow
def test_a_dashboard_without_its_launcher_leaves(launched):
    seat, _, _ = launched
    dashboard = dashboard_of(seat)
    seat.process.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{dashboard}").exists() and "Z" not in _state(dashboard):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def test_a_terminal_that_is_gone_is_noticed():
    master, slave = pty.openpty()
    terminal = Terminal(slave)
    assert terminal.there
    os.close(master)
    terminal.give_back()
    assert (Terminal(slave).there, terminal.there) == (False, False)
    os.close(slave)
