"""`SweepDriver`: asks for points, starts trials, measures them at rungs and at their end, and stops those that fall
behind.

All that it decides it writes to `sweep.jsonl` before it acts on it, and it rests on nothing else but that file and the
run directories: a driver that takes the place of one that was killed does what that one would have done. What is
suggested and what goes on depends on the numbers of trials, not on when they ended.
"""

import json
import time
from collections.abc import Callable, Set
from itertools import count
from pathlib import Path
from typing import Final

from attrs import define, field

from xtrain.dsl.schema.sweep import Point
from xtrain.planner.plan import Plan
from xtrain.planner.serialise import dumps
from xtrain.planner.sweep.compile_sweep import Trials, point_name, sameness
from xtrain.planner.sweep.sweep_plan import SweepPlan
from xtrain.records.end_status import EndStatus
from xtrain.records.event import Event
from xtrain.records.sweep_events import (
    STOP_FILE,
    SWEEP_FILE,
    SWEEP_PLAN_FILE,
    SweepBeginEvent,
    SweepEndEvent,
    TrialAskedEvent,
    TrialDecidedEvent,
    TrialFailedEvent,
    TrialMeasuredEvent,
    TrialStartedEvent,
)
from xtrain.records.sweep_state import SweepState, TrialState
from xtrain.runtime.control.asking import is_live
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files import durable
from xtrain.runtime.files.lines import JsonLinesFile
from xtrain.runtime.files.locks import LAUNCHER_LOCK, HeldLock, hold
from xtrain.runtime.outcome import EXIT_CODES
from xtrain.runtime.run_directory.ends import last_end, would_fail_again
from xtrain.runtime.sweep.halving import decisions
from xtrain.runtime.sweep.measuring import last_lines, measured, trained_steps
from xtrain.runtime.sweep.suggesting import study_of, suggested
from xtrain.runtime.sweep.trial_launcher import StartedTrial, TrialLauncher, TrialStart

LOOK_SECONDS: Final = 0.1
UNFIT: Final = (2, EXIT_CODES[EndStatus.ENVIRONMENT])
"""Exit codes of a run that was refused: no other trial would fare better."""


@define(eq=False)
class _Going:
    """A trial that is running. before: the step that it had ended at when it was started."""

    started: StartedTrial
    target: int | None
    before: int
    slot: int


@define(eq=False)
class SweepDriver:
    """Drives the sweep of a plan in its folder. show: is told every event once it is written.

    Raises EnvironmentFault where another driver is at work there.
    """

    plan: SweepPlan
    trials: Trials
    launcher: TrialLauncher
    show: Callable[[Event], None] = lambda event: None
    folder: Path = field(init=False)
    state: SweepState = field(init=False)
    stopping: bool = field(default=False, init=False)
    fault: str = field(default="", init=False)
    """What is wrong with the machine or the data, so that no trial can be trained; empty: nothing."""
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
        """Until every trial has ended, or the driver is to stop; `done` or `stopped`."""
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
                for each in self._going.values():
                    each.started.stop()
                if not self._going:
                    return self._end("stopped")
            else:
                try:
                    moved |= self._decide() | self._ask() | self._start()
                except EnvironmentFault:
                    if not self._going:  # no trial trains, although some were about to
                        self._end("stopped")
                    raise
                if not self._going and self._all_ended():
                    study.update(self.state)
                    return self._end("done")
            if moved:
                study.update(self.state)
            else:
                time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Let the trials that run save and end, and then end; from a signal handler."""
        self.stopping = True

    def _end(self, status: str) -> str:
        best = self.state.best()
        self._write(SweepEndEvent(step=0, status=status, best=best.number if best else None))
        self._lines.close()
        return status

    def _write(self, event: Event) -> None:
        """Write what has happened or is to happen; only then it counts."""
        self._lines.write(event)
        self.state.take(event)
        self.show(event)

    # Points -----------------------------------------------------------------------------------------------------------

    def _all_ended(self) -> bool:
        return len(self.state.trials) == self.plan.count and all(each.ended for each in self.state.trials.values())

    def _ask(self) -> bool:
        """The next point, if there is a trial without one that can begin."""
        number, moved = len(self.state.trials), False
        while number < self.plan.count and self._free_slots() > len(self._startable()):
            point = self._point(number)
            if point is None:
                break
            self._write(self._asked(number, point))
            number, moved = number + 1, True
        return moved

    def _point(self, number: int) -> Point | None:
        """That of a trial; None until the trials have ended that it rests on."""
        if number < len(self.plan.trials):
            return self.plan.trials[number].point
        basis = [self.state.trials[each] for each in range(max(number - self.state.lag + 1, 0))]
        if not all(self.state.of(each).ended for each in basis):
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
        first = next((each.number for each in self.state.trials.values() if each.sameness == same), None)
        return TrialAskedEvent(
            step=0, trial=number, name=name, point=dict(point), sameness=same, config_id=plan.config_id,
            same_as=first,
        )  # fmt: skip

    def _compiled(self, number: int, point: Point) -> tuple[Plan | None, str]:
        """The plan of a trial to its end, or why it has none."""
        if number < len(self.plan.trials):
            return self.plan.trials[number].plan, ""
        compiled = self.trials.compiled(number, point)
        errors = list(compiled.diagnostics.errors)
        return compiled.plan, f"{errors[0].code}: {errors[0].message}" if errors else ""

    # Decisions --------------------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        halving = self.plan.method.halving
        found = [] if halving is None else decisions(self.state.trials, halving.factor)
        for each in found:
            self._write(
                TrialDecidedEvent(
                    step=0, trial=each.trial, rung=each.rung, goes_on=each.goes_on, place=each.place, of=each.of
                )
            )
        return bool(found)

    # Runs -------------------------------------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        return max(0, self.plan.parallel - len(self._going))

    def _waiting(self) -> list[TrialState]:
        """Trials that are to be trained further and that this driver has not started, the lowest number first."""
        found = (self.state.trials[number] for number in sorted(self.state.trials))
        return [each for each in found if not each.ended and not each.undecided and each.number not in self._going]

    def _startable(self) -> list[TrialState]:
        """Those of them that can be started now."""
        return [each for each in self._waiting() if not self._is_left(each)]

    def _is_left(self, trial: TrialState) -> bool:
        """Whether processes of a driver that was killed are still in the run directory, saving."""
        directory = self._directory(trial)
        return is_live(directory, LAUNCHER_LOCK) or is_live(directory)

    def _directory(self, trial: TrialState) -> Path:
        return self.folder / trial.name

    def _log(self, trial: TrialState) -> Path:
        return self.folder / "logs" / f"{trial.name}.log"

    def _take_over(self) -> None:
        """Look after trials that an earlier driver has started and that have outlived it."""
        waiting = self._waiting()
        found = self.launcher.still_going([self._directory(each) for each in waiting])
        for trial, started in zip(waiting, found, strict=True):
            if started is not None:
                self._look_after(trial, self._plan_of(trial), started, self._next_slot())

    def _start(self) -> bool:
        startable = self._startable()[: self._free_slots()]
        found = [(trial, self._plan_of(trial)) for trial in startable]
        # One that came to its rung or its end while no driver saw it is measured, and not started once more.
        there = [(trial, plan) for trial, plan in found if self._measure_if_there(trial, self._target(trial, plan))]
        starts = []
        for trial, plan in (each for each in found if each not in there):
            file = self.folder / "plans" / f"{trial.name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(dumps(plan), encoding="utf-8")
            self._write(TrialStartedEvent(step=0, trial=trial.number, rung=self._rung(trial)))
            slot = self._next_slot({each.slot for _, each in starts})
            starts.append((trial, TrialStart(plan, file, self._log(trial), slot)))
        for (trial, start), started in zip(starts, self.launcher.start([each for _, each in starts]), strict=True):
            self._look_after(trial, start.plan, started, start.slot)
        return bool(startable)

    def _look_after(self, trial: TrialState, plan: Plan, started: StartedTrial, slot: int) -> None:
        before = trained_steps(self._directory(trial))
        self._going[trial.number] = _Going(started, self._target(trial, plan), before, slot)

    def _next_slot(self, taken: Set[int] = frozenset()) -> int:
        """The first that no trial has. A driver that takes trials over may have more of them than slots."""
        taken = taken | {each.slot for each in self._going.values()}
        return next(slot for slot in count() if slot not in taken)

    def _rung(self, trial: TrialState) -> int | None:
        """The rung that a trial is trained up to; None: it is trained to its end."""
        return trial.rung if trial.rung < len(self.plan.rungs) else None

    def _target(self, trial: TrialState, plan: Plan) -> int | None:
        """The step of that rung."""
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
        """Look after the trials that run; whether any has ended."""
        ended = [(number, code) for number, each in self._going.items() if (code := each.started.poll()) is not None]
        for number, code in ended:
            self._take(self.state.trials[number], self._going.pop(number), code)
        return bool(ended)

    def _take(self, trial: TrialState, going: _Going, code: int) -> None:
        """What has become of a trial whose processes are gone: measured, failed, or to be started again."""
        trained = trained_steps(self._directory(trial))
        if self._measure_if_there(trial, going.target):
            return
        if code == 0 and not self._directory(trial).is_dir():
            where = f"its run directory {self._directory(trial)} is not here: the folder of runs must be seen by all"
            self.fault = self.fault or f"trial {trial.number:03d} has ended, and {where}"
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
        """Measure a trial whose records say that it has come to its end, or to the rung at a step."""
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
