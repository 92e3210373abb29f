"""Makes boards of the files in a run's directory, a bounded bit of work at a time."""

import heapq
import time
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from xtrain.records.events import events_of
from xtrain.records.lines import AnyRecord, Event, Record, objects, read_all
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.status import SERVER_FILE, ServerStatus
from xtrain.records.sweep import SWEEP_FILE, SweepState
from xtrain.records.training_events import HorizonEvent
from xtrain.regular_files import MOST_JSON, read_regular
from xtrain.tui.feed import Tail
from xtrain.tui.model.board import BUDGET_SECONDS, AlertTracker, Board
from xtrain.tui.model.columns import Values
from xtrain.tui.model.event_log import EventReader
from xtrain.tui.model.life import LifeReader
from xtrain.tui.model.metrics import Metrics, TrialCurves
from xtrain.tui.model.planned import Planned, counted, planned
from xtrain.tui.model.rank_reader import RankReader
from xtrain.tui.model.series import LIMIT_BYTES, Series
from xtrain.tui.state import RunState, begun_again, reduce_all

# Bytes of events that are parsed at a time, and seconds that the first poll may take to read a run of usual length.
EVENT_BYTES = 256 << 10
# With more than twice this many new steps, as when a run is opened, its state reads only some of them and this many of
# the newest: progress, newest record and pace need no more.
NEWEST_STEPS = 512
FIRST_SECONDS = 0.3
_STATUS: Final = msgspec.json.Decoder(ServerStatus)
ValueT = TypeVar("ValueT")


class _Watched(Generic[ValueT]):
    """File that is parsed again when it has changed; its value stays as it was while the file is missing, or `parse`
    raises ValueError or DecodeError because only half of it has been written."""

    def __init__(self, path: Path, parse: Callable[[Path], ValueT | None]) -> None:
        self._path, self._parse = path, parse
        self._state: tuple[int, int, int] | None = None
        self.value: ValueT | None = None

    def look(self) -> None:
        """Parse the file, if it is another one than before."""
        with suppress(OSError, ValueError, msgspec.DecodeError):
            status = self._path.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if state != self._state:
                self.value, self._state = self._parse(self._path), state


def _plan_in(path: Path) -> Planned:
    found = objects(read_regular(path, MOST_JSON).replace(b"\n", b" "))[0]
    plan = planned(found[0]) if found else None
    if plan is None:
        raise ValueError(f"{path} holds no plan")
    return plan


def _sweep_of(path: Path, run: str) -> SweepState | None:
    """Return the sweep whose file it is, if the run is one of its trials."""
    sweep = SweepState.read(path.parent)
    return sweep if any(trial.name == run for trial in sweep.trials.values()) else None


class RunReader:
    """Incremental reader of a run directory. The directory may not exist yet, may disappear at any time, and may be
    replaced by another run; none of these is an error. All polls must come from one thread. limit_bytes: size of all
    columns. with_trials: also read the other trials of its sweep."""

    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES, *, with_trials: bool = True) -> None:
        self.directory = directory
        self._series = Series(limit_bytes)
        self._metrics = Metrics(directory / METRICS_FILE, self._series)
        self._events = Tail(directory / EVENTS_FILE, chunk_bytes=EVENT_BYTES)
        self._begun_anew = 0
        self._plan = _Watched(directory / "plan.json", _plan_in)
        self._counted: tuple[Planned, HorizonEvent, Planned] | None = None
        self._ranks = RankReader(directory)
        self._log = EventReader(directory)
        self._onlooker = AlertTracker()
        self._life = LifeReader(directory)
        self._state = RunState()
        self._again: tuple[RunState, RunState] | None = None
        self._newest: float | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._first = True
        self._board = Board(directory=directory, now=time.time(), series=self._series)
        self._server = _Watched(directory / SERVER_FILE, lambda path: _STATUS.decode(read_regular(path, MOST_JSON)))
        self._sweep = _Watched(directory.parent / SWEEP_FILE, lambda path: _sweep_of(path, directory.name))
        self._trials = TrialCurves(directory.parent)
        self._with_trials = with_trials
        self._parts: tuple[object, ...] = ()

    def poll(self, budget_seconds: float = BUDGET_SECONDS) -> Board:
        """Return the current board. Never raises because of the files."""
        began = time.monotonic()
        deadline = began + budget_seconds
        for file in (self._plan, self._server, self._sweep):
            file.look()
        self._read_records(began + FIRST_SECONDS if self._first else deadline)
        if self._sweep.value is not None and self._with_trials:
            self._trials.poll(self._sweep.value, deadline)
        self._first = False
        start = self._state.start
        planned = self._plan.value
        world_size = (start and start.world_size) or (planned.world_size if planned else 0)
        self._ranks.poll(world_size, planned, self._state.attempt, deadline)
        self._log.look({each.rank for each in self._state.failures if each.rank is not None and not each.lost})
        return self._new_board()

    def _new_board(self) -> Board:
        now, ranks = time.time(), self._ranks.ranks()
        life = self._life.look(self._state, ranks, self._newest)
        run = self._begun_again() if life.again else self._state
        plan = self._counted_plan(run)
        parts = {
            "run": run,
            "ranks": ranks,
            "planned": plan,
            "events": self._log.log(),
            "alerts": self._onlooker.alerts(run, ranks, life, now),
            "life": life,
            "loading": self._metrics.loading,
            "damaged": self._metrics.damaged + self._events.damaged,
            "server": self._server.value,
            "sweep": self._sweep.value,
            "trials": self._trials.series,
        }
        # The parts are values, the same ones while nothing is new; the series is not.
        drawn = (*map(id, (run, ranks, plan, parts["events"], parts["server"], parts["sweep"])), self._series.version)
        drawn += (self._trials.version, parts["alerts"], life, parts["loading"], parts["damaged"])
        version = self._board.version + (drawn != self._parts)
        self._parts = drawn
        self._board = Board(directory=self.directory, now=now, version=version, series=self._series, **parts)
        return self._board

    def _counted_plan(self, run: RunState) -> Planned | None:
        """Return the plan with the counts that the run reported; the same object while neither changes."""
        plan, horizon = self._plan.value, run.horizon
        if plan is None or horizon is None:
            return plan
        if self._counted is None or self._counted[0] is not plan or self._counted[1] is not horizon:
            self._counted = plan, horizon, counted(plan, horizon)
        return self._counted[2]

    def _begun_again(self) -> RunState:
        if self._again is None or self._again[0] is not self._state:
            self._again = self._state, begun_again(self._state)
        return self._again[1]

    def _read_records(self, deadline: float) -> None:
        """Read new records in order of time; at equal times, a step comes before the events that followed it."""
        logged = self._metrics.poll(deadline)
        if said := self._read_events(deadline):
            # An event may close over steps logged between the two reads: `run_end` must not overtake the last.
            logged += self._metrics.poll(0.0)
            self._log.take(said)
        self._waiting += _timed(said)
        until = self._metrics.newest if self._metrics.behind else float("inf")
        ready = [timed for timed in self._waiting if timed[0] <= until]
        del self._waiting[: len(ready)]
        if not ready and not logged:
            return
        lanes: tuple[list[tuple[float, Record]], ...] = ([*_timed(read_all(StepMetrics, _enough(logged)))], [*ready])
        merged = [record for _, record in heapq.merge(*lanes, key=itemgetter(0))]
        self._state = reduce_all(self._state, merged)
        times = [lane[-1][0] for lane in lanes if lane and lane[-1][0] > float("-inf")]
        self._newest = max([*times, *([] if self._newest is None else [self._newest])], default=None)

    def _read_events(self, deadline: float) -> list[Event]:
        said = self._events.read()
        while self._events.behind and time.monotonic() < deadline:
            said += self._events.read()
        if self._events.begun_anew != self._begun_anew:
            # Another run has come in the place of this one: nothing that was said before is of it.
            self._begun_anew = self._events.begun_anew
            self._state, self._newest, self._waiting = RunState(), None, []
            self._log.forget()
        return events_of(said)


def _enough(logged: list[Values]) -> list[Values]:
    """Return a sample of the step records, and the newest ones."""
    if len(logged) <= 2 * NEWEST_STEPS:
        return logged
    return logged[: -NEWEST_STEPS : len(logged) // NEWEST_STEPS] + logged[-NEWEST_STEPS:]


def _timed(found: list[AnyRecord]) -> list[tuple[float, AnyRecord]]:
    """Return records with the times that order them: a clock that is set back does not reorder a file."""
    latest, timed = float("-inf"), []
    for record in found:
        latest = max(latest, record.time or latest)
        timed.append((latest, record))
    return timed
