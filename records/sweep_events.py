"""The lines of `sweep.jsonl`, the one file that says how far a sweep is: everything else about it follows from it and
from the run directories of its trials."""

from typing import Annotated, Final

from xtrain.records.event import Event
from xtrain.records.record import doc

SWEEP_FILE: Final = "sweep.jsonl"
SWEEP_PLAN_FILE: Final = "sweep.json"
STOP_FILE: Final = "stop"


class SweepBeginEvent(Event, tag="sweep_begin"):
    """`xtrain run` drives the sweep"""

    sweep_id: Annotated[str, doc("which sweep this is")]
    attempt: Annotated[str, doc("which start")]
    lag: Annotated[int, doc("a suggestion rests on the trials up to so many before it")]
    objective: Annotated[str, doc("key in `metrics.jsonl` of what it looks for the least of")] = ""


class TrialAskedEvent(Event, tag="trial_asked"):
    """a trial has its point"""

    trial: Annotated[int, doc("its number, from 0")]
    name: Annotated[str, doc("its run directory, in the folder of the sweep")]
    point: Annotated[dict[str, str], doc("setting → value, as `--set` takes it")]
    sameness: Annotated[str, doc("hash of its plan without where it is written")]
    config_id: Annotated[str, doc("which experiment it is")]
    same_as: Annotated[int | None, doc("the earlier trial with an equal plan, whose result it has")] = None
    reason: Annotated[str, doc("why the point has no plan, so that the trial has failed")] = ""


class TrialStartedEvent(Event, tag="trial_started"):
    """a trial is started or resumed"""

    trial: Annotated[int, doc("its number")]
    rung: Annotated[int | None, doc("the rung that it is trained up to, from 0; null: to its end")]


class TrialMeasuredEvent(Event, tag="trial_measured"):
    """a trial has come to a rung, or to its end"""

    trial: Annotated[int, doc("its number")]
    rung: Annotated[int | None, doc("which rung, from 0; null: its end")]
    trained: Annotated[int, doc("steps that it has trained", "steps")]
    tokens: Annotated[int | None, doc("positions that it has seen", "tokens")]
    value: Annotated[float | None, doc("the objective as it has measured it last; null: never, or not finite")]


class TrialDecidedEvent(Event, tag="trial_decided"):
    """whether a trial continues after a rung"""

    trial: Annotated[int, doc("its number")]
    rung: Annotated[int, doc("which rung, from 0")]
    goes_on: Annotated[bool, doc("whether it is among the best of those that came there up to it")]
    place: Annotated[int, doc("its place among them, from 1")]
    of: Annotated[int, doc("how many they are")]


class TrialFailedEvent(Event, tag="trial_failed"):
    """a trial has failed too often"""

    trial: Annotated[int, doc("its number")]
    exit_code: Annotated[int | None, doc("of its last try; negative: the signal that ended it")]


class SweepEndEvent(Event, tag="sweep_end"):
    """the sweep has ended, or its driver was stopped"""

    status: Annotated[str, doc("`done` or `stopped`")]
    best: Annotated[int | None, doc("the trial with the least objective of those trained to their end")] = None


SWEEP_EVENTS: Final[tuple[type[Event], ...]] = (
    SweepBeginEvent,
    TrialAskedEvent,
    TrialStartedEvent,
    TrialMeasuredEvent,
    TrialDecidedEvent,
    TrialFailedEvent,
    SweepEndEvent,
)
