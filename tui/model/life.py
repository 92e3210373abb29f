"""Whether a run is alive, as far as its files show: a run that was killed says nothing of it.

On this machine the locks of the run's directory say it at once: its launcher and its first rank each hold one for as
long as they live, from before the first record on. Where other machines write to the file system as well, locks of
theirs are not seen, and the lines of progress are what counts: they stand still, or they do not. The same where there
are no locks.
"""

import time
from pathlib import Path
from typing import Literal

from attrs import frozen

from xtrain.records.end_status import EndStatus
from xtrain.tui.model.processes import is_folder, is_locked, is_shared, time_of
from xtrain.tui.model.ranks import Ranks
from xtrain.tui.state import RunState

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
    in `run_end`: `done`, `complete`, `stopped`, `interrupted`, `failed`. since: start of the state in seconds since
    1970; for a lost run, time of its last output. why: the evidence, in words. again: a launcher has started that has
    not written anything yet; the other fields describe the previous start.
    """

    state: Phase = "waiting"
    status: str = ""
    since: float | None = None
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
        self._lost: Life | None = None

    def look(self, run: RunState, ranks: Ranks, newest: float | None) -> Life:
        """Return the state of the run. newest: time of the newest record. To be called after the records were read: a
        run records its end before it releases its locks."""
        if newest != self._newest:
            self._newest, self._newest_at = newest, time.monotonic()
        why = self._why_nobody(ranks, between_starts=run.restarting)
        begun = run.start.time if run.start else None
        if begun is not None and self._launched_at is not None and self._launched_at > begun:
            return Life(state="starting", since=self._launched_at, again=True)
        if run.end is not None:
            return Life(state="ended", status=run.end.status, since=newest)
        # A run with neither records nor a lock has not started yet.
        if not why or (run.start is None and newest is None and self._launched is None):
            self._lost = None
            return _while_alive(run)
        if run.failures:
            return Life(state="ended", status=EndStatus.FAILED, since=newest, why=why)
        if self._lost is None or self._lost.why != why:
            times = [newest, *(each.beat.time for each in ranks if each.beat is not None)]
            since = self._lost.since if self._lost else max((at for at in times if at is not None), default=None)
            self._lost = Life(state="lost", since=since, why=why)
        return self._lost

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
        self._launched_at = time_of(self._directory / LAUNCHER_LOCK) if self._launched else None
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
        return Life(state="paused", since=run.paused_since, why="it waits for `xtrain control … resume`")
    if run.start is None and not run.setup:
        return Life()
    began = run.start.time if run.start else None
    if run.restarting or run.setup_done_time is None:
        return Life(state="starting", since=began)
    return Life(state="training", since=run.setup_done_time)
