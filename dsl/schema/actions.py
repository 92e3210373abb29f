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
        "batches to evaluate, each of the rows of a step; auto: steps // 20, at least 1; none: the whole hold-out",
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
    temperature: float = setting(
        "sampling temperature; 0 takes the most likely token", default=0.8, check=not_negative, role=Role.CADENCE
    )
    top_p: float = setting(
        "nucleus sampling: share of the probability to sample from",
        default=0.95,
        check=between(0.01, 1),
        role=Role.CADENCE,
    )


@frozen
class HealthAction:
    """`health { limit = 60 s }`: a timed all-reduce that reports which rank came last, and which did not respond."""

    limit: Quantity = setting(
        "time after which ranks that have not responded are reported and the run is ended",
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
    """`requeue`: ask Slurm to requeue the job; the run then resumes from its last checkpoint."""


@frozen
class SkipAction:
    """`skip`: skip steps with a non-finite loss or gradient norm, and fail at the n-th in a row."""


@frozen
class RollbackAction:
    """`rollback { times = 3 }`: go back to the last good checkpoint, and continue with the data after the failure."""

    times: int = setting(
        "rollbacks in a run, after which the run fails",
        default=3,
        check=at_least(1),
        role=Role.EXECUTION,
    )


@frozen
class ProfileAction:
    """`profile { active = 3 }`: time every operation of some steps, into a trace and a summary of each rank."""

    wait: int = setting(
        "steps to wait first, so that other actions of the same tick are over",
        default=1,
        check=not_negative,
        role=Role.CADENCE,
    )
    warmup: int = setting(
        "steps that are profiled and discarded after that, as a profiler is slow at first",
        default=1,
        check=not_negative,
        role=Role.CADENCE,
    )
    active: int = setting("steps to record", default=3, check=between(1, 100), role=Role.CADENCE)
    ranks: int | Literal["first", "all"] | Auto = setting(
        "how many ranks are recorded, evenly spread; auto: 8, or one per pipeline rank if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )
    shapes: bool = setting("also record the shapes of the inputs of operations", default=False, role=Role.CADENCE)
    stacks: bool = setting(
        "also record Python stack traces; traces become several times as large", default=False, role=Role.CADENCE
    )
    memory: bool = setting("also record allocations and frees", default=False, role=Role.CADENCE)


@frozen
class MemorySnapshotAction:
    """`memory_snapshot`: memory of a rank by category, compared with the plan."""

    ranks: int | Literal["first", "all"] | Auto = setting(
        "how many ranks write a snapshot, evenly spread; auto: 8, or one per pipeline rank if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )
    history: int | Auto = setting(
        "steps for which allocations on a GPU are recorded before the snapshot; auto: 1 on a GPU",
        default=AUTO,
        check=between(0, 100),
        role=Role.CADENCE,
        example="2",
    )


@frozen
class NotifyAction:
    """`notify("COMMAND")`: a shell command that rank 0 runs in the background; training does not wait for it.

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
        "how often; a percentage is a share of the budget",
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
        "the n of `nan(n)`: the action happens at the n-th such step in a row, those before are skipped; default "
        "10 for `skip`, else 1",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        only=("nan",),
        example="3",
    )
