"""Liveness of a run and its ranks from files, processes and locks of this machine."""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Literal

from attrs import field, frozen

from xtrain.records.metrics import RankMetrics
from xtrain.records.names import EndStatus
from xtrain.records.status import Heartbeat
from xtrain.regular_files import open_regular
from xtrain.tui.state import RunState

LOCKS = Path("/proc/locks")


def is_running(pid: int, born: int) -> bool:
    """Return True if that process of this machine exists and has not ended.

    born: its start time in clock ticks, as process ids are reused; 0 where unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return _answers(pid)
    return fields[0] not in "ZX" and (not born or int(fields[19]) == born)


def _answers(pid: int) -> bool:
    """Return the result of `is_running` without /proc."""
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def is_locked(path: Path, *, shared: bool) -> bool | None:
    """Return True if a process holds the lock on a file; None where unknown, as when no such file can be read.

    A lock that the kernel lists is not touched. An unlisted lock may belong to another container: only taking it for a
    moment shows that. On a file system shared by machines (shared), this would affect all of them and prove little; the
    result is None there.
    """
    try:
        if is_listed(path):
            return True
        if shared:
            return None
        lock = open_regular(path)
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def is_listed(path: Path) -> bool:
    """Return True if the kernel lists a lock on a file, held by a process visible from here. Raises OSError."""
    status = path.stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = LOCKS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # `7: FLOCK  ADVISORY  WRITE 13861 fe:00:3581860 0 EOF`; who waits for one has `->` after the number.
    return any(fields[1:2] == ["FLOCK"] and place in fields[4:] for fields in map(str.split, lines))


def is_folder(path: Path) -> bool:
    """Return True if the path is a folder that can be read; an error counts as False."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_shared(path: Path) -> bool:
    """Return True if a path is on a file system that other machines write to as well: their locks may not be visible
    here."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        place = str(path.resolve())
    except OSError:
        return True
    kinds = [fields[1:3] for line in mounts if len(fields := line.split()) > 2]
    fitting = [(len(at), kind) for at, kind in kinds if place == at or place.startswith(at.rstrip("/") + "/")]
    return max(fitting, default=(0, ""))[1] in SHARED


SHARED = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "glusterfs", "afs",
        "pvfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.lustre", "fuse.s3fs",
        "fuse.gcsfuse", "panfs", "wekafs", "vboxsf",
    }
)  # fmt: skip


# Number of step times kept per rank.
RING = 64
# A rank is a straggler if it computes this much longer than the others, and by this multiple of their deviation.
SLOWER = 0.10
VARIATION = 5.0
# The usual deviation of a normal distribution over the median one.
_NORMAL = 1.4826

Pulse = Literal["alive", "idle", "silent", "gone", "unknown"]


@frozen(kw_only=True)
class OneRank:
    """State of one rank.

    coordinates: its position on every axis of the mesh, empty without a plan. last: the newest line of its own file,
    None without one; step: of that line. step_seconds, data_seconds, comm_seconds, memory_bytes: numbers of that line,
    None where missing. busy_seconds: the part of a step without communication, the lower quartile over the newest
    lines; None if several ranks do not report their communication time; busy_most: the upper quartile. recent: (step,
    seconds per step), oldest first, at most RING. beat: its progress line, None without one of this start. pulse:
    `alive`; `idle` (Python runs, but work makes no progress); `silent` (its line does not change); `gone` (its process
    has ended); `unknown` (no line yet). seconds_silent: time since the line last changed, by the reader's clock.
    """

    rank: int
    coordinates: Mapping[str, int] = field(factory=dict)
    machine: int | None = None
    last: RankMetrics | None = None
    step: int | None = None
    step_seconds: float | None = None
    data_seconds: float | None = None
    comm_seconds: float | None = None
    busy_seconds: float | None = None
    busy_most: float = 0.0
    memory_bytes: float | None = None
    node_seconds: Mapping[str, float] = field(factory=dict)
    recent: tuple[tuple[int, float], ...] = ()
    beat: Heartbeat | None = None
    pulse: Pulse = "unknown"
    seconds_silent: float = 0.0


@frozen(kw_only=True)
class Straggler:
    """Rank that computes longer than the others. seconds: its own time; median: of the others that do the same work;
    share: relative delay, 0.25 for a quarter."""

    rank: int
    seconds: float
    median: float
    share: float


@frozen(kw_only=True)
class Ranks:
    """All ranks of the run, by number. world_size: the planned number. seconds_old: time of one read of all their
    lines, if it is long."""

    world_size: int = 0
    all: tuple[OneRank, ...] = ()
    seconds_old: float = 0.0

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[OneRank]:
        return iter(self.all)

    def __getitem__(self, rank: int) -> OneRank:
        return self.all[rank]

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the ranks that slow the others down, slowest first; empty where ranks are not `measured`.

        All ranks take equally long for a step, as they wait for each other; they differ in the part without
        communication. Ranks with the same pipeline coordinate do the same work and are compared. A rank is slow if its
        quick steps exceed the (lower) median of its group by SLOWER of that median, and by VARIATION times the median
        deviation, so that no slow rank can hide itself. They must also exceed the slow steps of the others: transient
        load, such as other processes, makes some steps of any rank longer.
        """
        groups: dict[int, list[OneRank]] = {}
        for each in self.all:
            if each.busy_seconds is not None:
                groups.setdefault(each.coordinates.get("pp", 0), []).append(each)
        found = [slow for group in groups.values() for slow in _slow(group)]
        return tuple(sorted(found, key=lambda slow: -slow.share))

    @property
    def measured(self) -> bool:
        """True if slow ranks can be found: ranks must measure how long they wait for each other."""
        return any(each.busy_seconds is not None for each in self.all)


def _slow(group: list[OneRank]) -> Iterator[Straggler]:
    if len(group) < 2:
        return
    times = [(each.rank, each.busy_seconds or 0.0) for each in group]
    middle = median_low([seconds for _, seconds in times])
    deviation = _NORMAL * median_low([abs(seconds - middle) for _, seconds in times])
    limit = max(middle + max(SLOWER * middle, VARIATION * deviation), median_low([each.busy_most for each in group]))
    for rank, seconds in times:
        if middle > 0 and seconds > limit:
            yield Straggler(rank=rank, seconds=seconds, median=middle, share=seconds / middle - 1)


Phase = Literal["waiting", "starting", "training", "paused", "ended", "lost"]

LAUNCHER_LOCK = ".launcher.lock"
WORKER_LOCK = ".worker.lock"
# Seconds between two checks of the locks.
LOOK_SECONDS = 0.5
# On a file system shared by machines: after this time without a progress line, lock or record, no process is left.
QUIET_SECONDS = 120.0


@frozen(kw_only=True)
class Life:
    """State of a run.

    state: `waiting` (no record yet), `starting` (set-up), `training`, `paused` (until `resume`), `ended` (by its own
    record), `lost` (its processes are gone, or write nothing, without a record of the end). status: of an ended run, as
    in `run_end`: `done`, `complete`, `stopped`, `interrupted`, `failed`. why: the evidence, in words. again: a launcher
    has started that has not written anything yet; the other fields describe the previous start.
    """

    state: Phase = "waiting"
    status: str = ""
    why: str = ""
    again: bool = False

    @property
    def over(self) -> bool:
        """True if nothing more will come."""
        return self.state in ("ended", "lost")

    @property
    def in_words(self) -> str:
        """One word for a headline: `training`, `done`, `lost`."""
        return self.status or self.state


class LifeReader:
    """Repeated check whether the run in a directory is alive."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looked = float("-inf")
        self._shared = True
        self._locked: bool | None = None
        self._launched: bool | None = None
        self._launched_at: float | None = None
        self._nobody = 0
        self._newest_at = time.monotonic()
        self._newest: float | None = None

    def look(self, run: RunState, ranks: Ranks, newest: float | None) -> Life:
        """Return the state of the run. newest: time of the newest record. To be called after the records were read: a
        run records its end before it releases its locks."""
        if newest != self._newest:
            self._newest, self._newest_at = newest, time.monotonic()
        why = self._why_nobody(ranks, between_starts=run.restarting)
        begun = run.start.time if run.start else None
        if begun is not None and self._launched_at is not None and self._launched_at > begun:
            return Life(state="starting", again=True)
        if run.end is not None:
            return Life(state="ended", status=run.end.status)
        # A run with neither records nor a lock has not started yet.
        if not why or (run.start is None and newest is None and self._launched is None):
            return _while_alive(run)
        if run.failures:
            return Life(state="ended", status=EndStatus.FAILED, why=why)
        return Life(state="lost", why=why)

    def _why_nobody(self, ranks: Ranks, *, between_starts: bool) -> str:
        """Return the evidence that no process is left; empty while one is. between_starts: the previous ranks have
        ended, and new ones are about to start."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
            # Twice: a record written just before the locks were released may come after the last read.
            self._nobody = 0 if self._is_somebody(ranks) else self._nobody + 1
        if self._nobody < 2:
            return ""
        if not is_folder(self._directory):
            return "its directory is gone"
        with_beat = [each for each in ranks if each.beat is not None and not between_starts]
        if with_beat and all(each.pulse == "gone" for each in with_beat):
            return "its processes are gone"
        if self._shared:
            if with_beat:
                return "its ranks send no heartbeat any more"
            return "there was no record for two minutes" if now - self._newest_at >= QUIET_SECONDS else ""
        return "no process holds its lock files"

    def _look(self) -> None:
        shared = is_shared(self._directory)
        self._launched = is_locked(self._directory / LAUNCHER_LOCK, shared=shared)
        self._launched_at = None
        with suppress(OSError):  # the time at which the lock was taken
            if self._launched:
                self._launched_at = (self._directory / LAUNCHER_LOCK).stat().st_mtime
        self._locked = is_locked(self._directory / WORKER_LOCK, shared=shared)
        # A copied directory, or one of another user, may have no locks to check.
        unknown = self._launched is None and self._locked is None
        self._shared = unknown or shared

    def _is_somebody(self, ranks: Ranks) -> bool:
        pulses = [each.pulse for each in ranks if each.beat is not None]
        if self._launched or any(pulse in ("alive", "idle") for pulse in pulses):
            return True
        # A child of a rank that was killed may hold its lock a little longer.
        return bool(self._locked) and not (pulses and all(pulse == "gone" for pulse in pulses))


def _while_alive(run: RunState) -> Life:
    if run.paused_since is not None:
        return Life(state="paused", why="it waits for `xtrain control … resume`")
    if run.start is None and not run.setup:
        return Life()
    return Life(state="starting" if run.restarting or run.setup_done_time is None else "training")
