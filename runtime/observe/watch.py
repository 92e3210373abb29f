"""Threads next to training: heartbeat and deadline of a rank (`setup.watch`), and files that the first rank polls.

A run ends if no rank makes progress for the deadline. A run directory that was moved or removed is reported.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from attrs import define, field

from xtrain.plan.plan import Plan
from xtrain.records.events import FailureEvent, StuckEvent
from xtrain.records.lines import line_of, object_of, read
from xtrain.records.names import heartbeat_path
from xtrain.records.status import read_heartbeat
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.observe import provenance as metadata
from xtrain.runtime.observe import stacks as collectives_in_flight
from xtrain.runtime.observe.heartbeat import BeatFile, HeartbeatWriter, own_host, process_state
from xtrain.runtime.observe.judge import PAUSE, HealthVerdict, Pace, SeenRank, State, explained, judge, whereabouts_of
from xtrain.runtime.observe.provenance import read_code
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stacks import ASK, answer_when_asked, end, here, save_of, save_own, whereabouts
from xtrain.runtime.observe.stopping import say

# Seconds between two heartbeats. A longer gap means that the whole machine slept.
INTERVAL: Final = 1.0
GAP: Final = 2.0
# Share of the limit without progress after which the other ranks are read.
LOOK: Final = 0.1
# Seconds without a mark after which the heartbeat includes the place of the main thread.
SILENT_SECONDS: Final = 2.0
# Seconds that ranks wait for each other's stacks before they exit.
JOIN_SECONDS: Final = 5.0
VERDICT: Final = "verdict.json"
SUMMARY: Final = "summary.txt"


@op("setup.watch", gives="watch", traced=False)
def watch(
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    exit_process: Callable[[int], None],
    stuck_seconds: float | None,
) -> "Watchdog":
    """Start this rank's heartbeat and watch the other ranks' heartbeats. Collective."""
    number = records.attempts()
    if rank.is_first:  # remove the verdict of an earlier start that could not report itself on a full disk
        with suppress(OSError):
            (verdict_folder(records.directory, number) / VERDICT).unlink(missing_ok=True)
    before = 0 if rank.replica is None else rank.replica.first
    attempt = torch.tensor([float(number)], device=rank.device)
    if rank.world_size > 1:
        dist.broadcast(attempt, src=0)  # the first rank has reported the start, which other machines may see late
    watchdog = Watchdog(
        beat=beat,
        file=BeatFile(heartbeat_path(records.directory, records.rank), records.rank, int(attempt.item())),
        records=records,
        rank=records.rank,
        world=rank.world_size,
        before=before,
        stuck=stuck_seconds,
        exit_process=exit_process,
    )
    watchdog.begin()
    return watchdog


def verdict_folder(directory: Path, attempt: int) -> Path:
    """Return the folder for the stacks and the verdict of a start."""
    return directory / "logs" / f"stuck-{attempt}"


@define(eq=False, kw_only=True)
class Watchdog:
    """Heartbeat thread of a rank that also ends a stuck run.

    stuck: seconds without progress after which ranks are named; None: only nodes with a limit of their own count.
    world: ranks that wait for each other. before: number of ranks in earlier replica groups.
    """

    beat: HeartbeatWriter
    file: BeatFile
    records: Records
    rank: int
    world: int
    stuck: float | None
    exit_process: Callable[[int], None]
    before: int = 0
    observers: list[Callable[[Pace], None]] = field(factory=list)
    """Called about once a second by the thread, until the run is being ended."""
    _host: str = field(factory=own_host)
    _closed: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None
    _answer: int | None = None
    # A clock that stops while the machine sleeps.
    _now: float = 0.0
    _last: float = field(factory=time.monotonic)
    _marks: int = -1
    _moved: float = 0.0
    _seen: dict[int, SeenRank] = field(factory=dict)
    _looked: float = 0.0

    @property
    def ranks(self) -> range:
        return range(self.before, self.before + self.world)

    @property
    def folder(self) -> Path:
        return verdict_folder(self.records.directory, self.file.attempt)

    def begin(self) -> None:
        with suppress(OSError):
            self.file.path.parent.mkdir(parents=True, exist_ok=True)
        self._answer = answer_when_asked()
        self.file.write(self.beat, 0.0, "", False)
        self._thread = threading.Thread(target=self._run, name="watching progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat, because the rank leaves."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)  # it may hang on a disk that does not answer
        if self._answer is not None:
            faulthandler.unregister(ASK)
            os.close(self._answer)

    def condemned(self) -> bool:
        """Return True if the run is being ended, so that later errors need no report. Any thread."""
        try:
            return self._verdict_path.exists()
        except OSError:
            return False

    def leave_if_condemned(self) -> None:
        """Wait for the watching thread to exit if the run is being ended; for the main thread after it lost contact."""
        while self.condemned():
            time.sleep(0.1)

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self.tick()
        self.file.write(self.beat, 0.0, "", False)

    def tick(self) -> None:
        """Write the heartbeat; read the others' if this rank makes no progress."""
        now = time.monotonic()
        self._now += min(now - self._last, GAP)
        self._last = now
        if self.beat.marks != self._marks:
            self._marks, self._moved = self.beat.marks, self._now
        idle = self._now - self._moved
        place, debugger = whereabouts() if idle >= SILENT_SECONDS else ("", False)
        self.file.write(self.beat, idle, place, debugger)
        if self.condemned():
            self._end(self._published_verdict(), first=False)
            return
        for observer in tuple(self.observers):
            observer(Pace(self._now, idle, self.beat.lasting))
        limit = self.beat.limit or self.stuck
        if limit is None or idle < LOOK * limit:
            self._seen.clear()
            return
        if self._due(idle, limit):
            self._look()
            if idle >= limit and (verdict := self._judge(limit)) is not None:
                self._end(*self._publish_verdict(verdict, idle))

    def _due(self, idle: float, limit: float) -> bool:
        """Return True if the heartbeats of all ranks should be read now.

        They are read at intervals, to see how long each is unchanged, and as soon as the limit is reached; not shortly
        before that, as two readings need time between them.
        """
        since = self._now - self._looked
        if not self._seen or idle >= limit:
            return not self._seen or since >= GAP
        return idle <= limit - GAP and since >= max(PAUSE, limit / 20)

    def _look(self) -> None:
        self._looked = self._now
        for rank in self.ranks:
            reading = read_heartbeat(heartbeat_path(self.records.directory, rank))
            if rank not in self._seen:
                self._seen[rank] = SeenRank(reading, self._now, self._now)
            else:
                self._seen[rank].take(reading, self._now)

    def _judge(self, limit: float) -> HealthVerdict | None:
        verdict = judge(self.rank, self._seen, self._now, limit, lasting=self.beat.lasting)
        if verdict is not None and any(self._state(rank) == "t" for rank in verdict.ranks):
            return None  # a debugger holds it
        return verdict

    def _state(self, rank: int) -> str:
        """Return the kernel's state of a rank's process; empty if it is on another machine, or gone."""
        reading = self._seen[rank].reading
        return process_state(reading.pid) if reading and here(reading, self._host) else ""

    # the end --------------------------------------------------------------------------------------------------------

    @property
    def _verdict_path(self) -> Path:
        return self.folder / VERDICT

    def _publish_verdict(self, verdict: HealthVerdict, idle: float) -> tuple[StuckEvent, bool]:
        """Return the verdict, and True if this rank is the first to publish one; otherwise the other rank's verdict
        holds."""
        event = self._stuck_event(verdict, idle)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(self._verdict_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return self._published_verdict(), False
        except OSError:
            fd = None
        if fd is not None:
            with suppress(OSError):
                os.write(fd, line_of(event))
            os.close(fd)
        with suppress(EnvironmentFault):
            self.records.event(event, every_rank=True)
        return event, True

    def _published_verdict(self) -> StuckEvent:
        """Return another rank's verdict; it may still be writing it."""
        for _ in range(20):
            with suppress(OSError):
                if published := object_of(self._verdict_path.read_bytes()):
                    return read(StuckEvent, published)
            time.sleep(0.05)
        return read(StuckEvent, {})

    def _stuck_event(self, verdict: HealthVerdict, idle: float) -> StuckEvent:
        first = self._seen[verdict.ranks[0]].reading if verdict.ranks else None
        # The last heartbeat of a frozen rank is up to a second old; the place where the others wait is certain.
        there = None if verdict.frozen else first
        return StuckEvent(
            step=there.step if there else self.beat.step,
            ranks=[*verdict.ranks],
            state=self._word(verdict),
            node=there.node if there else self.beat.node,
            place=there.place if there else "",
            last_step=first.step if first else None,
            last_node=first.node if first else None,
            host=first.host if first else "",
            pid=first.pid if first else None,
            seconds=round(idle, 1),
            folder=str(self.folder),
        )

    def _word(self, verdict: HealthVerdict) -> State:
        if not verdict.frozen:
            return "stuck" if verdict.ranks else "unknown"
        reading = self._seen[verdict.ranks[0]].reading
        if reading is None or not here(reading, self._host):
            return "frozen"
        words: dict[str, State] = {"T": "stopped", "": "ended", "Z": "ended"}
        return words.get(process_state(reading.pid), "frozen")

    def _report_failure(self, event: StuckEvent) -> None:
        """Report the verdict with the collectives in flight; the others leave once the summary exists."""
        rank, message = event.ranks[0] if event.ranks else None, explained(event)
        seen = collectives_in_flight.read(
            collectives_in_flight.read_collectives(self.folder, self.world, self.before), self.world
        )
        message += "".join(f"\n{line}" for line in seen)
        if rank == 0:  # rank 0 may be the one that displays the run
            say(f"rank 0: {message}")
        with suppress(EnvironmentFault):
            failure = FailureEvent(step=event.step, rank=rank, error=message, exit_code=1, traceback="")
            self.records.event(failure, every_rank=True)
        lines = {rank: read_heartbeat(heartbeat_path(self.records.directory, rank)) for rank in self.ranks}
        with suppress(OSError):
            (self.folder / SUMMARY).write_text(f"{message}\n\n{whereabouts_of(lines)}", encoding="utf-8")

    def _end(self, event: StuckEvent, first: bool) -> None:
        """Save stacks, kill the ranks of this machine that cannot exit by themselves, and exit.

        first: this rank found the verdict and reports once all have saved.
        """
        frozen = event.ranks if event.frozen else []
        lines = (read_heartbeat(heartbeat_path(self.records.directory, rank)) for rank in frozen)
        helpless = [reading for reading in lines if reading is not None and here(reading, self._host)]
        for reading in helpless:  # before anything else: they are killed as soon as any rank has waited long enough
            save_of(self.folder, reading)
        save_own(self.folder, self.rank, self.beat)
        helped = [reading.rank for reading in helpless]
        files = [f"{rank:05d}.txt" for rank in self.ranks if rank not in frozen or rank in helped]
        self._wait_for(files)
        if first:
            self._report_failure(event)
        else:
            self._wait_for([SUMMARY])
        for reading in helpless:
            end(reading)
        self.exit_process(1)

    def _wait_for(self, files: list[str]) -> None:
        """Wait until the others have saved, because the first rank to exit takes them with it."""
        until = time.monotonic() + JOIN_SECONDS
        while time.monotonic() < until and self.folder.is_dir():
            if all((self.folder / file).exists() for file in files):
                return
            time.sleep(0.1)


SECONDS = 1.0


@define(eq=False)
class Poller:
    """Thread that calls each of `looks`, by name, once a second until it is closed. `report` gets each error once."""

    report: Callable[[str], None]
    looks: dict[str, Callable[[], None]] = field(factory=dict)
    _closed: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None
    _reported: set[str] = field(factory=set)

    def begin(self) -> None:
        if self.looks:
            self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; returns when no look is running."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(SECONDS):
            for what, look in self.looks.items():
                try:
                    look()
                except Exception as error:  # a file system may fail in any way, and training must not
                    message = f"{what} could not be checked: {type(error).__name__}: {error}"
                    if message not in self._reported:
                        self._reported.add(message)
                        self.report(message)


@define(eq=False)
class DirectoryWatch:
    """Watch of the run's folder: compares it with the one that the run began in. stop: ends the run, with a reason."""

    directory: Path
    plan: Plan
    records: Records
    report: Callable[[str], None]
    stop: Callable[[str], None]
    _fd: int = field(init=False)
    _looking: threading.RLock = field(factory=threading.RLock, init=False)
    _given_up: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.directory = self.directory.absolute()
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> None:
        """Move a moved folder back, or end the run. Raises OSError."""
        with self._looking:
            if self._given_up or self._is_there():
                return
            place = self._place()
            if place is not None and self._move_back(place):
                self.report(
                    f"the run directory was moved to {place} while the run writes into it, and was moved back to "
                    f"{self.directory}; to move a run, stop it first"
                )
                return
            self._given_up = True
            what = f"moved to {place}, and {self.directory} is another folder" if place is not None else "removed"
            reason = f"the run directory was {what} while the run writes into it"
            self._make_anew()
            self.report(
                f"{reason}: the run saves a checkpoint in {self.directory} and stops; earlier checkpoints are not there"
            )
            self.stop(reason)

    def close(self) -> None:
        """Stop watching."""
        with self._looking:
            if not self._given_up:
                self._given_up = True
                os.close(self._fd)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.directory.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _place(self) -> Path | None:
        """Return the folder's current path; None if it was removed or is unknown."""
        try:
            place = Path(f"/proc/self/fd/{self._fd}").readlink()
            return place if os.path.samestat(place.stat(), os.fstat(self._fd)) else None
        except OSError:
            return None

    def _move_back(self, place: Path) -> bool:
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            place.rename(self.directory)  # replaces an empty folder, but no other
        except OSError:
            return False
        return True

    def _make_anew(self) -> None:
        """Recreate the folder without records and checkpoints, and reopen the files under their names."""
        contents = metadata.describe(
            self.plan, self.plan.spec_text, read_code(Path(self.plan.spec).parent), "anew", None
        )
        for name in ("metadata", "ranks", "logs", "checkpoints"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        metadata.write(self.directory, contents, None)
        self.records.reopen()
