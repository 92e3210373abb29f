"""Asking a live run from another process: a file in its `control/`, and its answers in `events.jsonl`."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from attrs import field, frozen

from xtrain.records.control import ControlRequest
from xtrain.records.control_words import ControlState
from xtrain.records.events import event_of
from xtrain.records.lines import object_of
from xtrain.records.paths import CONTROL_FOLDER, EVENTS_FILE
from xtrain.records.run_events import ControlEvent
from xtrain.regular_files import open_regular
from xtrain.runtime.files.locks import LAUNCHER_LOCK, WORKER_LOCK

# Between two looks for an answer.
LOOK_SECONDS = 0.1


class NotLive(Exception):
    """Nobody is there who could answer; the message says where."""


def is_live(directory: Path, lock_name: str = WORKER_LOCK) -> bool:
    """Whether a rank, or what else holds the lock of that name, runs in a run's directory."""
    try:
        lock = open_regular(directory / lock_name)
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def live_run(path: Path, patience: float = 0.0) -> Path:
    """The run at a path, or the live one below it that was started last.

    patience: seconds to wait for ranks of a run at that very path which are about to be started, for the first time
    or again. Raises NotLive.
    """
    if (path / "plan.json").is_file():
        deadline = time.monotonic() + patience
        while not is_live(path):
            if time.monotonic() > deadline or not is_live(path, LAUNCHER_LOCK):
                raise NotLive(f"no rank is running in {path}")
            time.sleep(LOOK_SECONDS)
        return path
    runs = [plan.parent for depth in ("*", "*/*") for plan in path.glob(f"{depth}/plan.json")]
    live = [run for run in runs if is_live(run)]
    if not live:
        where = (
            f"none of the {len(runs)} runs below {path} is live" if runs else f"there is no run at {path} or below it"
        )
        raise NotLive(where)
    return max(live, key=lambda run: (run / "plan.json").stat().st_mtime)


@frozen
class Asked:
    """A command that lies in a run's `control/`, and where its answers begin."""

    run: Path
    id: str
    offset: int
    _path: Path = field(repr=False)

    @classmethod
    def put(cls, run: Path, command: str, argument: str | int | None) -> "Asked":
        """Write the file, whole or not at all. Raises OSError."""
        folder, id = run / CONTROL_FOLDER, f"{time.time_ns()}-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        events = run / EVENTS_FILE
        events.touch()
        offset = events.stat().st_size
        request = ControlRequest(command=command, time=time.time(), arg=argument)
        beside, path = folder / f".{id}.tmp", folder / f"{id}.json"
        beside.write_bytes(msgspec.json.encode(request) + b"\n")
        beside.replace(path)
        return cls(run, id, offset, path)

    def take_back(self) -> bool:
        """Whether the command was taken back before the run has read it."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def answers(self, patience: float) -> Iterator[ControlEvent]:
        """What the run says of the command, as it says it, up to `done` or `refused`.

        Raises NotLive if the run ends without a word, or has not read the command after `patience` seconds: then the
        command is taken back.
        """
        heard, rest, deadline = False, b"", time.monotonic() + patience
        with open_regular(self.run / EVENTS_FILE) as events:
            events.seek(self.offset)
            while True:
                live = is_live(self.run)  # before the last look, so that nothing said meanwhile is missed
                *lines, rest = (rest + events.read()).split(b"\n")
                for answer in self._answers_in(lines):
                    heard = True
                    yield answer
                    if answer.state != ControlState.ACCEPTED:
                        return
                if not live:
                    self.take_back()
                    raise NotLive(f"the run in {self.run} has ended without executing the command")
                if not heard and time.monotonic() > deadline and self.take_back():
                    raise NotLive(
                        f"the run in {self.run} has not read the command within {patience:g} s; "
                        "the command was withdrawn"
                    )
                time.sleep(LOOK_SECONDS)

    def _answers_in(self, lines: list[bytes]) -> Iterator[ControlEvent]:
        for line in lines:
            event = event_of(object_of(line) or {})
            if isinstance(event, ControlEvent) and event.id == self.id:
                yield event
