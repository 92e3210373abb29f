"""Runs as other processes see them: commands to a running run, how a run ended, and checkpoints below a path."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, frozen

from xtrain.records.events import ControlEvent, FailureEvent, RunEndEvent, event_of, events_since
from xtrain.records.lines import object_of
from xtrain.records.names import CONTROL_FOLDER, EVENTS_FILE, ControlState
from xtrain.records.status import ControlRequest
from xtrain.records.training_events import RunStartEvent
from xtrain.regular_files import open_regular
from xtrain.runtime.base.locks import LAUNCHER_LOCK, WORKER_LOCK, hold_for_reading
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, entry_of, size_bytes, total_bytes

# Seconds between two checks for an answer.
LOOK_SECONDS = 0.1


class NotLive(Exception):
    """No running process that could answer; the message says where."""


def is_live(directory: Path, lock_name: str = WORKER_LOCK) -> bool:
    """Return True if a process, usually a rank, holds the lock of that name in a run's directory."""
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


def live_run(runs: Sequence[Path], patience: float = 0.0) -> Path:
    """Return the first running run.

    patience: seconds to wait for ranks of a single run that are about to start. Raises NotLive.
    """
    if (run := next(filter(is_live, runs), None)) is not None:
        return run
    if len(runs) > 1:
        raise NotLive(f"none of {len(runs)} runs is running, of which {runs[0]} was started last")
    deadline = time.monotonic() + patience
    while not is_live(runs[0]):
        if time.monotonic() > deadline or not is_live(runs[0], LAUNCHER_LOCK):
            raise NotLive(f"no rank is running in {runs[0]}")
        time.sleep(LOOK_SECONDS)
    return runs[0]


@frozen
class Asked:
    """Command in a run's `control/`, and the offset of its answers."""

    run: Path
    id: str
    offset: int
    _path: Path = field(repr=False)

    @classmethod
    def put(cls, run: Path, command: str, argument: str | int | None) -> "Asked":
        """Write the command file atomically. Raises OSError."""
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
        """Withdraw the command; return True if the run had not read it."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def answers(self, patience: float) -> Iterator[ControlEvent]:
        """Yield the run's answers to the command as they arrive, up to `done` or `refused`.

        Raises NotLive if the run ends without an answer, or has not read the command after `patience` seconds: then the
        command is withdrawn.
        """
        heard, rest, deadline = False, b"", time.monotonic() + patience
        with open_regular(self.run / EVENTS_FILE) as events:
            events.seek(self.offset)
            while True:
                live = is_live(self.run)  # before the last read, so that no answer is missed
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


def last_end(directory: Path) -> RunEndEvent | None:
    """Return the last end of a run; None without one."""
    ends = [event for event in events_since(directory / EVENTS_FILE) if isinstance(event, RunEndEvent)]
    return ends[-1] if ends else None


def would_fail_again(directory: Path) -> bool:
    """Return True if the last start of a run failed over something that all ranks found alike, such as a non-finite
    loss: another start would fail the same way."""
    agreed = False
    for event in events_since(directory / EVENTS_FILE):
        if isinstance(event, RunStartEvent):
            agreed = False
        elif isinstance(event, FailureEvent):
            agreed = agreed or event.agreed
    return agreed


@frozen(kw_only=True)
class SeenCheckpoint:
    """Checkpoint in a list. flaws: by sizes, or by content if it was read; pointers: that name it."""

    entry: CheckpointEntry
    run: str
    pointers: tuple[str, ...]
    flaws: tuple[str, ...]
    state: dict[str, Any]
    bytes: int

    def json(self) -> dict[str, Any]:
        """Return JSON for programs: the checkpoint's description without the long lists of tensors."""
        said = (
            "step",
            "tokens",
            "epoch",
            "epoch_ended",
            "metrics",
            "time",
            "plan_id",
            "config_id",
            "world_size",
            "begun_from",
            "made_by",
        )
        return {
            "name": self.entry.name,
            "path": str(self.entry.path),
            "run": self.run,
            "kind": "full" if self.entry.is_full else "weights",
            "bytes": self.bytes,
            "pointers": list(self.pointers),
            "sound": not self.flaws,
            "flaws": list(self.flaws),
            **{name: self.state.get(name) for name in said},
            "step": self.entry.step,
        }


def folders(path: Path) -> list[CheckpointFolder]:
    """Return the checkpoint folders of a run, of all runs of a lineage or below a root, or the one at `path`; empty
    without any."""
    for candidates in (
        [path],
        [path / "checkpoints"],
        *(sorted(path.glob(p)) for p in ("*/checkpoints", "*/*/checkpoints")),
    ):
        known = [CheckpointFolder(candidate) for candidate in candidates if candidate.is_dir()]
        known = [folder for folder in known if folder.published() or folder.models() or folder.remains()]
        if known:
            return known
    return []


def below(path: Path, *, content: bool = False) -> list[SeenCheckpoint]:
    """List all checkpoints below a path, by run and step; a checkpoint itself is the only one. content: read each in
    full."""
    if entry := entry_of(path):
        return [_seen(entry, CheckpointFolder(path.parent), content)]
    checkpoints = []
    for folder in folders(path):
        for entry in sorted(
            (*folder.published(), *folder.models()), key=lambda checkpoint: (checkpoint.step, not checkpoint.is_full)
        ):
            if (held := hold_for_reading(entry.path)) is not None:  # otherwise the run has removed it
                checkpoints.append(_seen(entry, folder, content))
                held.close()
    return checkpoints


def _seen(entry: CheckpointEntry, folder: CheckpointFolder, content: bool) -> SeenCheckpoint:
    try:
        state = entry.state()
        size = total_bytes(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        state, size = {}, size_bytes(entry.path)
    return SeenCheckpoint(
        entry=entry,
        run=str(folder.root.parent if folder.root.name == "checkpoints" else folder.root),
        pointers=folder.protected().get(entry.name, ()),
        flaws=tuple(entry.flaws(content=content)),
        state=state,
        bytes=size,
    )


def removable(folder: CheckpointFolder, *, keep: int | None, damaged: bool) -> list[tuple[Path, str]]:
    """List what can be removed, with reasons.

    Leftovers of interrupted saves; checkpoints of `CheckpointFolder.old` (None: none of these); damaged ones, if
    requested.
    """
    removals = [(path, "left of a save or removal that was cut off") for path in folder.remains()]
    if damaged:
        known = (*folder.published(), *folder.models())
        removals += [(entry.path, flaws[0]) for entry in known if (flaws := entry.flaws())]
    if keep is not None:
        removals += [(entry.path, f"older than the newest {keep}") for entry in folder.old(keep)]
    return removals
