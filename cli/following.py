"""A run followed from its files while it runs: lines of this process, or a dashboard in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from xtrain.text.printing import drawn_on
from xtrain.tui.board.terminal import Terminal

if TYPE_CHECKING:
    from xtrain.runtime.store.run_directory import RunDirectory


class Following:
    """Shows the run in a thread until the block ends."""

    def __init__(self, workspace: "RunDirectory", ui: str, *, verbose: bool = False) -> None:
        from xtrain.records.names import EVENTS_FILE, METRICS_FILE
        from xtrain.runtime.base.json_lines import size_of
        from xtrain.tui.lines.view import follow

        directory = workspace.directory
        self._finished = threading.Event()
        offsets = {name: size_of(directory / name) for name in (METRICS_FILE, EVENTS_FILE)}
        out = drawn_on(sys.stdout, ui)
        options = {"ui": ui, "verbose": verbose, "out": out, "offsets": offsets, "finished": self._finished}
        self._thread = threading.Thread(target=follow, args=(directory,), kwargs=options, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Show everything up to now and stop; from any thread."""
        self._finished.set()
        self._thread.join(timeout=10)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Show at most this much of the launcher's output after the dashboard closes; the file keeps all of it.
SAID_BYTES = 64 << 10
# Kill a dashboard that has not exited this long after a request.
LEAVE_SECONDS = 4.0


class Dashboard:
    """Shows the run in a dashboard until the user leaves it or it is stopped from outside, then as lines. Used in the
    main thread.

    While the dashboard has the terminal, output of this process goes to `said`, a file among the logs.
    """

    def __init__(self, workspace: "RunDirectory") -> None:
        from xtrain.records.names import EVENTS_FILE, METRICS_FILE
        from xtrain.runtime.base.json_lines import size_of

        self._directory = workspace.directory
        self._said = workspace.directory / "logs" / workspace.attempt / "launcher.log"
        self._offsets = {name: size_of(self._directory / name) for name in (METRICS_FILE, EVENTS_FILE)}
        self._finished = threading.Event()
        self._terminal = Terminal(sys.stdin.fileno())
        self._thread = threading.Thread(target=self._wait_for_reader, name="dashboard", daemon=True)

    def __enter__(self) -> None:
        self._said.parent.mkdir(parents=True, exist_ok=True)
        arguments = [sys.executable, "-P", "-m", "xtrain.tui.board.opening", str(self._directory), str(os.getpid())]
        # Any failure here must happen before the dashboard starts or must end it: no other code would.
        with self._said.open("ab") as said, contextlib.ExitStack() as cleanup:
            self._process = subprocess.Popen(arguments)
            cleanup.callback(self._end_at_once)
            self._outputs = _Diverted(said.fileno())
            cleanup.callback(self._outputs.restore)
            self._hear_signals()
            self._thread.start()
            cleanup.pop_all()

    def _hear_signals(self) -> None:
        """Record every signal in a pipe, because the launcher changes its signal handlers during the run."""
        self._marks, marked = os.pipe()
        for end in (self._marks, marked):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(marked, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._leave_at_once)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Wait until the user closes the dashboard, unless this process was told to stop or has failed."""
        for number in STOPS:
            signal.signal(number, lambda *_: self._end_dashboard())
        if kind is not None or self._stop_requested():
            self._end_dashboard()
        self._finished.set()
        self._thread.join()
        signal.set_wakeup_fd(-1)

    def _wait_for_reader(self) -> None:
        """Wait for the dashboard to be closed, then draw lines."""
        from xtrain.tui.lines.view import follow

        code = self._process.wait()
        if code < 0:  # killed: it had no chance to do so itself
            self._terminal.give_back()
        self._outputs.restore()
        _show_end_of(self._said)
        if not self._finished.is_set():
            path = self._directory
            print(
                f"the dashboard is closed and the run continues; `xtrain watch {quote(str(path))}` opens it again",
                flush=True,
            )
        follow(
            self._directory,
            ui="console",
            offsets=self._offsets,
            finished=self._finished,
            quiet_until=time.time(),
            out=drawn_on(sys.stdout),
        )

    def _stop_requested(self) -> bool:
        try:
            return bool(set(os.read(self._marks, 4096)) & {int(number) for number in STOPS})
        except BlockingIOError:
            return False

    def _end_dashboard(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        threading.Thread(target=self._kill_late, daemon=True).start()

    def _kill_late(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
            return
        self._process.kill()

    def _leave_at_once(self, *_: object) -> None:
        """Exit at once: no rank has been started, so there is nothing to save."""
        self._end_at_once()
        os._exit(75)

    def _end_at_once(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._terminal.give_back()


class _Diverted:
    """Standard output and error of this process, written to an open file until they are restored."""

    def __init__(self, file: int) -> None:
        self._originals = [os.dup(number) for number in (1, 2)]
        with _flushed():
            for number in (1, 2):
                os.dup2(file, number)

    def restore(self) -> None:
        """Restore the original outputs."""
        with _flushed():
            for number, original in zip((1, 2), self._originals, strict=True):
                os.dup2(original, number)
                os.close(original)


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    yield


def _show_end_of(path: Path) -> None:
    """Print the end of the launcher's output; delete an empty file."""
    with contextlib.suppress(OSError):
        said = path.read_bytes()
        if not said:
            path.unlink()
            return
        sys.stderr.write(said[-SAID_BYTES:].decode(errors="replace"))
        sys.stderr.flush()
