"""Lines of `sweep.jsonl` and the state of a sweep that follows from them.

This file alone says how far a sweep is: everything else follows from it and from the run directories of its trials.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from attrs import field

from xtrain.lazy_attrs import define
from xtrain.records.lines import Event, doc, event_types, objects_since, read

SWEEP_FILE: Final = "sweep.jsonl"
SWEEP_PLAN_FILE: Final = "sweep.json"
STOP_FILE: Final = "stop"


class SweepBeginEvent(Event, tag="sweep_begin"):
    """`xtrain run` drives the sweep"""

    sweep_id: Annotated[str, doc("id of the sweep")]
    attempt: Annotated[str, doc("name of this start")]
    lag: Annotated[int, doc("a suggestion uses the trials up to this many before it")]
    objective: Annotated[str, doc("key in `metrics.jsonl` of the minimized value")] = ""


class TrialAskedEvent(Event, tag="trial_asked"):
    """a trial has its point"""

    trial: Annotated[int, doc("number of the trial, from 0")]
    name: Annotated[str, doc("run directory of the trial, in the folder of the sweep")]
    point: Annotated[dict[str, str], doc("setting → value, as `--set` takes it")]
    sameness: Annotated[str, doc("hash of its plan without paths of the run")]
    config_id: Annotated[str, doc("id of its experiment")]
    same_as: Annotated[int | None, doc("earlier trial with an equal plan, whose result is reused")] = None
    reason: Annotated[str, doc("reason why the point has no plan and the trial has failed")] = ""


class TrialStartedEvent(Event, tag="trial_started"):
    """a trial is started or resumed"""

    trial: Annotated[int, doc("number of the trial")]
    rung: Annotated[int | None, doc("rung up to which it is trained, from 0; null: to its end")]


class TrialMeasuredEvent(Event, tag="trial_measured"):
    """a trial has come to a rung, or to its end"""

    trial: Annotated[int, doc("number of the trial")]
    rung: Annotated[int | None, doc("number of the rung, from 0; null: its end")]
    trained: Annotated[int, doc("trained steps", "steps")]
    tokens: Annotated[int | None, doc("trained positions", "tokens")]
    value: Annotated[float | None, doc("last measured objective; null: never measured, or not finite")]


class TrialDecidedEvent(Event, tag="trial_decided"):
    """whether a trial continues after a rung"""

    trial: Annotated[int, doc("number of the trial")]
    rung: Annotated[int, doc("number of the rung, from 0")]
    goes_on: Annotated[bool, doc("true if it is among the best trials that have reached the rung so far")]
    place: Annotated[int, doc("its place among them, from 1")]
    of: Annotated[int, doc("number of these trials")]


class TrialFailedEvent(Event, tag="trial_failed"):
    """a trial has failed too often"""

    trial: Annotated[int, doc("number of the trial")]
    exit_code: Annotated[int | None, doc("exit code of its last try; negative: the signal that ended it")]


class SweepEndEvent(Event, tag="sweep_end"):
    """the sweep has ended, or its driver was stopped"""

    status: Annotated[str, doc("`done` or `stopped`")]
    best: Annotated[int | None, doc("trial with the lowest objective among the completed ones")] = None


_KINDS: Final = event_types(__name__)
Status = Literal["waiting", "training", "paused", "done", "stopped early", "failed", "same"]


@define
class TrialState:
    """The state of a trial. values: at each rung. value, trained, tokens: at the last measurement. paused: it reached a
    rung and is not decided yet. going: it was started since its last measurement."""

    number: int
    name: str
    point: dict[str, str]
    sameness: str
    config_id: str = ""
    same_as: int | None = None
    values: list[float | None] = field(factory=list)
    decisions: list[bool] = field(factory=list)
    value: float | None = None
    trained: int = 0
    tokens: int | None = None
    finished: bool = False
    failed: bool = False
    reason: str = ""
    going: bool = False

    @property
    def rung(self) -> int:
        """The next rung that it is trained up to: the number of rungs passed."""
        return len(self.decisions)

    @property
    def undecided(self) -> bool:
        """Return True if the trial reached a rung without a decision on whether it continues."""
        return len(self.values) > len(self.decisions)

    @property
    def stopped_early(self) -> bool:
        return bool(self.decisions) and not self.decisions[-1]

    @property
    def ended(self) -> bool:
        """Return True if the trial is over. A duplicate trial ends with its original."""
        return self.finished or self.failed or self.stopped_early or self.same_as is not None

    @property
    def status(self) -> Status:
        if self.same_as is not None:
            return "same"
        if self.failed:
            return "failed"
        if self.finished:
            return "done"
        if self.stopped_early:
            return "stopped early"
        if self.undecided:
            return "paused"
        return "training" if self.going else "waiting"


@define
class SweepState:
    """The state of a sweep. objective: its key in `metrics.jsonl`. trials: by number."""

    sweep_id: str = ""
    lag: int = 1
    objective: str = ""
    trials: dict[int, TrialState] = field(factory=dict)
    ended: str = ""

    @classmethod
    def read(cls, folder: Path) -> "SweepState":
        """Read the state of a folder's sweep; empty without a file. Raises OSError."""
        state = cls()
        for event in sweep_events(objects_since(folder / SWEEP_FILE)):
            state.take(event)
        return state

    def take(self, event: Event) -> None:
        """Apply an event. Invalid events (of a trial that was never asked for, or is in another folder) change
        nothing."""
        match event:
            case SweepBeginEvent():
                if not self.sweep_id:
                    self.lag = max(event.lag, 1)
                self.sweep_id, self.objective, self.ended = event.sweep_id, event.objective, ""
                for each in self.trials.values():
                    each.going = False
            case TrialAskedEvent(name="" | "." | ".."):
                return
            case TrialAskedEvent(name=name) if "/" in name or "\0" in name:
                return  # a run of another folder is no trial of this sweep
            case TrialAskedEvent(trial=number):
                same_as = event.same_as if event.same_as in self.trials else None
                self.trials[number] = TrialState(
                    number=number, name=event.name, point=event.point, sameness=event.sameness,
                    config_id=event.config_id, same_as=same_as, failed=bool(event.reason), reason=event.reason,
                )  # fmt: skip
            case SweepEndEvent():
                self.ended = event.status
                for each in self.trials.values():
                    each.going = False
            case _:
                trial = self.trials.get(getattr(event, "trial", -1))
                if trial is not None:
                    _advance(trial, event)

    def best(self) -> TrialState | None:
        """Return the fully trained trial with the least value; among equals the first."""
        done = [each for each in self.trials.values() if each.finished and each.value is not None]
        return min(done, key=lambda each: (each.value, each.number), default=None)

    def of(self, trial: TrialState) -> TrialState:
        """Return the trial that was run for this trial: itself, or the original of a duplicate."""
        return trial if trial.same_as is None else self.trials[trial.same_as]

    def table(self) -> list[dict[str, Any]]:
        """Return a row of plain values per trial, for files and other programs."""
        rows = []
        for trial in sorted(self.trials.values(), key=lambda each: each.number):
            run = self.of(trial)
            rows.append(
                {
                    "trial": trial.number,
                    "status": trial.status,
                    "run": run.name,
                    **{name: plain(text) for name, text in trial.point.items()},
                    "value": run.value,
                    "steps": run.trained,
                    "tokens": run.tokens,
                    "rungs": len(run.values),
                    "config_id": trial.config_id,
                    "same_as": trial.same_as,
                }
            )
        return rows


def _advance(trial: TrialState, event: Event) -> None:
    match event:
        case TrialStartedEvent():
            trial.going = True
        case TrialMeasuredEvent(rung=rung):
            trial.going = False
            value = event.value if event.value is not None and math.isfinite(event.value) else None
            trial.value, trial.trained, trial.tokens = value, event.trained, event.tokens
            if rung is None:
                trial.finished = True
            elif rung == len(trial.values):
                trial.values.append(value)
        case TrialDecidedEvent(rung=rung) if rung == len(trial.decisions):
            trial.decisions.append(event.goes_on)
        case TrialFailedEvent():
            trial.going, trial.failed, trial.value = False, True, None
            trial.reason = f"exit code {event.exit_code}"


def sweep_events(objects: Iterable[dict[str, Any]]) -> list[Event]:
    """Return the events in lines of `sweep.jsonl`, skipping unknown lines."""
    return [read(_KINDS[kind], each) for each in objects if (kind := str(each.get("event"))) in _KINDS]


def plain(text: str) -> int | float | str:
    """Return the number in a `--set` text if it is a single one, otherwise the text without its quotes."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text.strip('"')
