"""What happens besides training: actions, the ticks (`every`) and events (`on`) that call them."""

from typing import Literal

from attrs import frozen

from ..quantity import Quantity
from .setting import AUTO, Auto, Role, at_least, between, not_negative, positive, setting


@frozen
class LogAction:
    """`log`: write the metrics of the step."""


@frozen
class EvalAction:
    """`eval DATASET { … }`: loss on the held-out part of a dataset."""

    dataset: str
    batches: int | Auto | None = setting(
        "how much: so many times the rows of a step; auto: steps // 20, at least 1; none: the whole hold-out",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
    )


@frozen
class CheckpointAction:
    """`checkpoint`: save the full state."""


@frozen
class GenerateAction:
    """`generate { prompts = […] }`: continue prompts, to look at what the model has learned."""

    prompts: tuple[str, ...] = setting(
        "texts to continue; special tokens may be written by name", role=Role.CADENCE, example='["def "]'
    )
    tokens: int = setting("tokens to add to each prompt", default=64, check=at_least(1), role=Role.CADENCE)
    temperature: float = setting("0 takes the likeliest token", default=0.8, check=not_negative, role=Role.CADENCE)
    top_p: float = setting(
        "share of the probability that is sampled from", default=0.95, check=between(0.01, 1), role=Role.CADENCE
    )


@frozen
class HealthAction:
    """`health { limit = 60 s }`: a sum over all ranks, timed; who comes last is told, who does not come is named."""

    limit: Quantity = setting(
        "time after which a rank that has not come is named and the run is ended",
        default=Quantity(60, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
    )


@frozen
class StopAction:
    """`stop`: end the run after this step; it can be resumed."""


@frozen
class RequeueAction:
    """`requeue`: ask Slurm to start the job again, where it is one; what was saved before is what it goes on from."""


@frozen
class SkipAction:
    """`skip`: leave out steps whose loss or gradient norm is not a number, and fail at the n-th in a row."""


@frozen
class RollbackAction:
    """`rollback { times = 3 }`: go back to the last good checkpoint, and on with the data behind the failure."""

    times: int = setting(
        "how often in a run; then it fails and says what has been tried",
        default=3,
        check=at_least(1),
        role=Role.EXECUTION,
    )


@frozen
class ProfileAction:
    """`profile { active = 3 }`: time every operation of some steps, into a trace and a summary of each rank."""

    wait: int = setting(
        "steps that pass first, so that what else happened at the same time is over",
        default=1,
        check=not_negative,
        role=Role.CADENCE,
    )
    warmup: int = setting(
        "steps that are timed and thrown away behind those, as the first ones under a profiler are slower",
        default=1,
        check=not_negative,
        role=Role.CADENCE,
    )
    active: int = setting("steps that are recorded then", default=3, check=between(1, 100), role=Role.CADENCE)
    ranks: int | Literal["first", "all"] | Auto = setting(
        "how many ranks are recorded, evenly spread; auto: 8, or one of every pipeline coordinate if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )
    shapes: bool = setting("also the shapes that operations are given", default=False, role=Role.CADENCE)
    stacks: bool = setting(
        "also the lines of Python that call them, in traces some times as large", default=False, role=Role.CADENCE
    )
    memory: bool = setting("also what is allocated and let go of", default=False, role=Role.CADENCE)


@frozen
class MemorySnapshotAction:
    """`memory_snapshot`: what a rank holds by what it is for, beside what the plan says of it."""

    ranks: int | Literal["first", "all"] | Auto = setting(
        "how many ranks are looked at, evenly spread; auto: 8, or one of every pipeline coordinate if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )
    history: int | Auto = setting(
        "steps for which a GPU's allocator writes down what it gives and takes, before the snapshot; auto: 1 on a GPU",
        default=AUTO,
        check=between(0, 100),
        role=Role.CADENCE,
        example="2",
    )


@frozen
class NotifyAction:
    """`notify("COMMAND")`: a command for the shell, run by the first rank beside training; no step waits for it.

    What it is about is in its environment: `XTRAIN_ALERT`, `XTRAIN_MESSAGE`, `XTRAIN_RUN`, `XTRAIN_STEP` and more.
    """

    command: str


Action = (
    LogAction
    | EvalAction
    | CheckpointAction
    | GenerateAction
    | HealthAction
    | ProfileAction
    | MemorySnapshotAction
    | RequeueAction
    | NotifyAction
    | SkipAction
    | RollbackAction
    | StopAction
)


@frozen
class Tick:
    """`every QUANTITY action then action`: what happens periodically."""

    actions: tuple[Action, ...]
    every: Quantity = setting(
        "how often; a share is one of the budget",
        units=("steps", "tokens", "epochs", "seconds", "%"),
        check=positive,
        role=Role.CADENCE,
        example="10 steps",
    )


EventName = Literal[
    "sigterm",
    "sigint",
    "sigusr1",
    "time_limit",
    "stop_at",
    "stop_file",
    "nan",
    "loss_spike",
    "slow",
    "starvation",
    "memory",
    "disk",
    "stalled",
    "finish",
]


@frozen
class Event:
    """`on EVENT action then action`: what happens when something occurs."""

    event: EventName
    actions: tuple[Action, ...]
    count: int | None = setting(
        "the n of `nan(n)`: so many steps in a row, of which all but the last are left out; unless given 10 for "
        "`skip`, else 1",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        only=("nan",),
        example="3",
    )
