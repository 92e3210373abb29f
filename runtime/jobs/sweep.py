"""Driver of a sweep: points, trials, rungs of successive halving, and the measured values."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Final, Protocol

from attrs import define, field, frozen

from xtrain.dsl.schema.sweep import Point, Sweep
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps
from xtrain.planner.compile_sweep import SweepPlan, Trials, point_name, sameness
from xtrain.records.lines import Event, objects_since
from xtrain.records.names import METRICS_FILE, EndStatus
from xtrain.records.sweep import (
    STOP_FILE,
    SWEEP_FILE,
    SWEEP_PLAN_FILE,
    SweepBeginEvent,
    SweepEndEvent,
    SweepState,
    TrialAskedEvent,
    TrialDecidedEvent,
    TrialFailedEvent,
    TrialMeasuredEvent,
    TrialStartedEvent,
    TrialState,
)
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EXIT_CODES, EnvironmentFault
from xtrain.runtime.base.json_lines import JsonLinesFile
from xtrain.runtime.base.locks import LAUNCHER_LOCK, HeldLock, hold
from xtrain.runtime.base.ops import code_of
from xtrain.runtime.jobs.runs import is_live, last_end, would_fail_again
from xtrain.runtime.jobs.trials import StartedTrial, TrialLauncher, TrialStart


@frozen
class Decision:
    """Decision about a trial at a rung. place: among the `of` trials that reached the rung, from 1; later trials do not
    count."""

    trial: int
    rung: int
    goes_on: bool
    place: int
    of: int


def decisions(trials: Mapping[int, TrialState], factor: int) -> list[Decision]:
    """Return the decisions that are possible now: for each trial waiting at a rung, once all earlier trials have
    reached it or ended."""
    decided = []
    for number in sorted(trials):
        trial = trials[number]
        if not trial.undecided or trial.ended:
            continue
        rung = len(trial.decisions)
        earlier = [trials[other] for other in sorted(trials) if other < number and trials[other].same_as is None]
        if all(len(other.values) > rung or other.ended for other in earlier):
            values = [other.values[rung] for other in earlier if len(other.values) > rung]
            decided.append(_decided(trial, rung, values, factor))
    return decided


def _decided(trial: TrialState, rung: int, earlier: list[float | None], factor: int) -> Decision:
    """Decide about a trial. Of equal values the earlier trial is better; a missing or non-finite value never goes
    further."""
    value = trial.values[rung]
    count = len(earlier) + 1
    if value is None:
        return Decision(trial.number, rung, False, count, count)
    better = sum(1 for loss in earlier if loss is not None and math.isfinite(loss) and loss <= value)
    return Decision(trial.number, rung, better < max(count // factor, 1), better + 1, count)


def last_lines(log: Path) -> str:
    """Return the error at the end of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    words = ("error", "failure")
    places = (place for place in reversed(range(len(lines))) if any(word in lines[place] for word in words))
    place = next(places, len(lines))
    return " ".join(line.strip() for line in lines[place : place + 2]) or f"see {log}"


def trained_steps(directory: Path) -> int:
    """Return the step at which a run last ended; 0 if it has not."""
    end = last_end(directory)
    return 0 if end is None else end.step or 0


def measured(directory: Path, key: str, step: int) -> tuple[float | None, int | None]:
    """Return the last value of a metric up to a step, and the tokens of the last logged step up to there."""
    rows = [row for row in objects_since(directory / METRICS_FILE) if int(row.get("step", 0)) <= step]
    tokens = last_number(rows, "tokens")
    return last_number(rows, key), None if tokens is None else int(tokens)


def last_number(rows: Sequence[dict], key: str) -> float | None:
    """Return the last value of a key, None if it is not finite."""
    values = [row[key] for row in rows if key in row]
    if not values or not isinstance(values[-1], int | float) or not math.isfinite(values[-1]):
        return None
    return float(values[-1])


class Study(Protocol):
    """Record of a sweep for other programs."""

    def update(self, state: SweepState) -> None:
        """Record the trials that have ended since."""
        ...


class NoStudy:
    """Empty record, for methods that suggest nothing."""

    def update(self, state: SweepState) -> None:
        """Do nothing."""


def check_method(sweep: Sweep) -> None:
    """Raise EnvironmentFault if a package of the method is missing, or if the code of a method from another package
    cannot be imported."""
    for package in sweep.method.needed():
        try:
            import_module(package)
        except ImportError as error:
            remedy = "install it with `pip install 'xtrain[sweep]'`, or take another method"
            message = f"`method {sweep.method.kind}` needs the package {package}; {remedy}"
            raise EnvironmentFault("X715", message) from error
    if sweep.method.suggests:
        code_of(type(sweep.method), sweep.method.run_module())


def suggested(sweep: Sweep, state: SweepState, basis: Sequence[TrialState], number: int) -> Point:
    """Return the point of a trial, from the results of the trials that it depends on and nothing else."""
    told = [(trial, state.of(trial)) for trial in basis]
    return import_module(sweep.method.run_module()).suggest(sweep.method, sweep.over, told, number)


def study_of(plan: SweepPlan, sweep: Sweep, folder: Path) -> Study:
    """Return the record of the suggesting library, rebuilt from the known results."""
    if not sweep.method.needed():
        return NoStudy()
    return import_module(sweep.method.run_module()).open_study(plan.name, sweep.over, folder)


LOOK_SECONDS: Final = 0.1
UNFIT: Final = (2, EXIT_CODES[EndStatus.ENVIRONMENT])
"""Exit codes of a run that was refused: other trials would be refused too."""


@define(eq=False)
class _Going:
    """Running trial. before: the step that it had ended at before this start."""

    started: StartedTrial
    target: int | None
    before: int
    slot: int


@define(eq=False)
class SweepDriver:
    """Driver of a sweep in its folder. show: called with every event once it is written.

    Raises EnvironmentFault if another driver is running there.
    """

    plan: SweepPlan
    trials: Trials
    launcher: TrialLauncher
    show: Callable[[Event], None] = lambda event: None
    folder: Path = field(init=False)
    state: SweepState = field(init=False)
    stopping: bool = field(default=False, init=False)
    fault: str = field(default="", init=False)
    """A fault of the machine or the data that prevents every trial; empty without one."""
    _lock: HeldLock = field(init=False)
    _lines: JsonLinesFile = field(init=False)
    _going: dict[int, _Going] = field(factory=dict, init=False)
    _tries: dict[int, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.folder = Path(self.plan.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = hold(self.folder, LAUNCHER_LOCK)
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        self._lines = JsonLinesFile(self.folder / SWEEP_FILE)
        self.state = SweepState.read(self.folder)
        durable.write(self.folder / SWEEP_PLAN_FILE, json.dumps(self.plan.to_json(), indent=2))

    def run(self) -> str:
        """Run until every trial has ended or the driver is to stop; return `done` or `stopped`."""
        attempt = time.strftime("%Y%m%d-%H%M%S")
        objective = self.trials.sweep.objective.key
        self._write(
            SweepBeginEvent(step=0, sweep_id=self.plan.id, attempt=attempt, lag=self.plan.parallel, objective=objective)
        )
        study = study_of(self.plan, self.trials.sweep, self.folder)
        self._take_over()
        while True:
            self.stopping = self.stopping or (self.folder / STOP_FILE).exists()
            moved = self._reap()
            if self.stopping:
                for running in self._going.values():
                    running.started.stop()
                if not self._going:
                    return self._end("stopped")
            else:
                try:
                    moved |= self._decide() | self._ask() | self._start()
                except EnvironmentFault:
                    if not self._going:  # no trial trains, although some were about to
                        self._end("stopped")
                    raise
                trials = self.state.trials.values()
                if not self._going and len(trials) == self.plan.count and all(trial.ended for trial in trials):
                    study.update(self.state)
                    return self._end("done")
            if moved:
                study.update(self.state)
            else:
                time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Let running trials save and end, then end; from a signal handler."""
        self.stopping = True

    def _end(self, status: str) -> str:
        best = self.state.best()
        self._write(SweepEndEvent(step=0, status=status, best=best.number if best else None))
        self._lines.close()
        return status

    def _write(self, event: Event) -> None:
        """Write an event; it counts only once it is written."""
        self._lines.write(event)
        self.state.take(event)
        self.show(event)

    # Points -----------------------------------------------------------------------------------------------------------

    def _ask(self) -> bool:
        """Write the points of further trials while slots are free; return True if there are any."""
        number, moved = len(self.state.trials), False
        while number < self.plan.count and self._free_slots() > len(self._startable()):
            point = self._point(number)
            if point is None:
                break
            self._write(self._asked(number, point))
            number, moved = number + 1, True
        return moved

    def _point(self, number: int) -> Point | None:
        """Return the point of a trial; None until the trials that it depends on have ended."""
        if number < len(self.plan.trials):
            return self.plan.trials[number].point
        basis = [self.state.trials[other] for other in range(max(number - self.state.lag + 1, 0))]
        if not all(self.state.of(trial).ended for trial in basis):
            return None
        return suggested(self.trials.sweep, self.state, basis, number)

    def _asked(self, number: int, point: Point) -> TrialAskedEvent:
        plan, reason = self._compiled(number, point)
        name = point_name(number, point)
        if plan is None:
            return TrialAskedEvent(
                step=0, trial=number, name=name, point=dict(point), sameness="", config_id="", reason=reason
            )
        same = sameness(plan)
        first = next((trial.number for trial in self.state.trials.values() if trial.sameness == same), None)
        return TrialAskedEvent(
            step=0, trial=number, name=name, point=dict(point), sameness=same, config_id=plan.config_id,
            same_as=first,
        )  # fmt: skip

    def _compiled(self, number: int, point: Point) -> tuple[Plan | None, str]:
        """Return the whole plan of a trial, or the reason why it has none."""
        if number < len(self.plan.trials):
            return self.plan.trials[number].plan, ""
        compiled = self.trials.compiled(number, point)
        errors = list(compiled.diagnostics.errors)
        return compiled.plan, f"{errors[0].code}: {errors[0].message}" if errors else ""

    # Decisions --------------------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        halving = self.plan.method.halving
        decided = [] if halving is None else decisions(self.state.trials, halving.factor)
        for decision in decided:
            self._write(
                TrialDecidedEvent(
                    step=0,
                    trial=decision.trial,
                    rung=decision.rung,
                    goes_on=decision.goes_on,
                    place=decision.place,
                    of=decision.of,
                )
            )
        return bool(decided)

    # Runs -------------------------------------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        return max(0, self.plan.parallel - len(self._going))

    def _waiting(self) -> list[TrialState]:
        """Return the trials to train further that this driver has not started, lowest number first."""
        trials = (self.state.trials[number] for number in sorted(self.state.trials))
        return [
            trial for trial in trials if not trial.ended and not trial.undecided and trial.number not in self._going
        ]

    def _startable(self) -> list[TrialState]:
        """Return the waiting trials that can be started now."""
        return [trial for trial in self._waiting() if not self._is_left(trial)]

    def _is_left(self, trial: TrialState) -> bool:
        """Return True if processes of a killed driver are still in the run directory, saving."""
        directory = self._directory(trial)
        return is_live(directory, LAUNCHER_LOCK) or is_live(directory)

    def _directory(self, trial: TrialState) -> Path:
        return self.folder / trial.name

    def _log(self, trial: TrialState) -> Path:
        return self.folder / "logs" / f"{trial.name}.log"

    def _take_over(self) -> None:
        """Take over trials that an earlier driver started and that have outlived it."""
        waiting = self._waiting()
        still_running = self.launcher.still_going([self._directory(trial) for trial in waiting])
        for trial, started in zip(waiting, still_running, strict=True):
            if started is not None:
                self._look_after(trial, self._plan_of(trial), started, self._next_slot())

    def _start(self) -> bool:
        startable = self._startable()[: self._free_slots()]
        planned = [(trial, self._plan_of(trial)) for trial in startable]
        # A trial that reached its rung or end without a driver is measured, not started again.
        there = [(trial, plan) for trial, plan in planned if self._measure_if_there(trial, self._target(trial, plan))]
        starts = []
        for trial, plan in (pair for pair in planned if pair not in there):
            file = self.folder / "plans" / f"{trial.name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(dumps(plan), encoding="utf-8")
            self._write(TrialStartedEvent(step=0, trial=trial.number, rung=self._rung(trial)))
            slot = self._next_slot({start.slot for _, start in starts})
            starts.append((trial, TrialStart(plan, file, self._log(trial), slot)))
        for (trial, start), started in zip(starts, self.launcher.start([start for _, start in starts]), strict=True):
            self._look_after(trial, start.plan, started, start.slot)
        return bool(startable)

    def _look_after(self, trial: TrialState, plan: Plan, started: StartedTrial, slot: int) -> None:
        before = trained_steps(self._directory(trial))
        self._going[trial.number] = _Going(started, self._target(trial, plan), before, slot)

    def _next_slot(self, taken: Set[int] = frozenset()) -> int:
        """Return the first free slot. A driver that takes over trials may have more of them than slots."""
        taken = taken | {running.slot for running in self._going.values()}
        return next(slot for slot in count() if slot not in taken)

    def _rung(self, trial: TrialState) -> int | None:
        """Return the rung that a trial is trained to; None: it is trained to its end."""
        return trial.rung if trial.rung < len(self.plan.rungs) else None

    def _target(self, trial: TrialState, plan: Plan) -> int | None:
        """Return the step of that rung."""
        return None if self._rung(trial) is None else plan.timeline.stop_at

    def _plan_of(self, trial: TrialState) -> Plan:
        rung = self._rung(trial)
        if rung is None:
            plan, _ = self._compiled(trial.number, trial.point)
        else:
            plan = self.trials.compiled(trial.number, trial.point, self.plan.rungs[rung]).plan
        assert plan is not None, "it had one when it was asked for"
        return plan

    def _reap(self) -> bool:
        """Check the running trials; return True if any has ended."""
        ended = [
            (number, code) for number, running in self._going.items() if (code := running.started.poll()) is not None
        ]
        for number, code in ended:
            self._take(self.state.trials[number], self._going.pop(number), code)
        return bool(ended)

    def _take(self, trial: TrialState, going: _Going, code: int) -> None:
        """Handle a trial whose processes are gone: measured, failed, or to be restarted."""
        trained = trained_steps(self._directory(trial))
        if self._measure_if_there(trial, going.target):
            return
        if code == 0 and not self._directory(trial).is_dir():
            where = f"its run directory {self._directory(trial)} is not visible here: machines must share this folder"
            self.fault = self.fault or f"trial {trial.number:03d} has ended, but {where}"
            self.stopping = True
        elif code in UNFIT and trained <= going.before:
            self.fault = self.fault or f"trial {trial.number:03d} cannot begin: {last_lines(self._log(trial))}"
            self.stopping = True
        elif not self.stopping:
            tries = self._tries.get(trial.number, 0) + 1 if trained <= going.before else 0
            self._tries[trial.number] = tries
            if tries > self.plan.retries or would_fail_again(self._directory(trial)):
                self._write(TrialFailedEvent(step=0, trial=trial.number, exit_code=code))

    def _measure_if_there(self, trial: TrialState, target: int | None) -> bool:
        """Measure a trial whose records show that it reached its end, or the rung's step."""
        end = last_end(self._directory(trial))
        if end is None:
            return False
        if end.status in (EndStatus.DONE, EndStatus.COMPLETE):
            self._measure(trial, None, end.step or 0)
            return True
        if target is not None and (end.step or 0) >= target:
            self._measure(trial, trial.rung, target)
            return True
        return False

    def _measure(self, trial: TrialState, rung: int | None, trained: int) -> None:
        value, tokens = measured(self._directory(trial), self.trials.sweep.objective.key, trained)
        self._write(
            TrialMeasuredEvent(step=0, trial=trial.number, rung=rung, trained=trained, tokens=tokens, value=value)
        )
