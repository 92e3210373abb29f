"""Settings of a run outside training: `experiment`, `workspace`, `checkpoint`, `log`, `alerts`, and user hooks."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, Literal, Self

import attrs

from xtrain.dsl.schema.component import Component, Registry, UserComponent
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Range,
    Role,
    UsualRange,
    at_least,
    between,
    file_name,
    file_path,
    label,
    positive,
    rank_count,
    seed_range,
    setting,
    share,
    values_of,
)
from xtrain.dsl.values import MeasuredNumber, Quantity
from xtrain.lazy_attrs import frozen


@frozen
class Experiment:
    """`experiment NAME { … }`: name, seed and length of the training."""

    name: str = label(check=file_name)
    seed: int = setting("random seed of initial weights, data order and sampling", default=0, check=seed_range)
    budget: Quantity = setting(
        "how long to train",
        units=("steps", "tokens", "epochs"),
        check=positive,
        role=Role.BUDGET,
        example="600 steps",
    )


@frozen
class Workspace:
    """`workspace { … }`: where runs are written."""

    root: str = setting(
        "folder of all runs, relative to the working folder", default="runs", check=file_path, role=Role.PATH
    )
    lineage: str | None = setting(
        "folder of related runs below the root; none: the experiment's name",
        default=None,
        check=file_name,
        role=Role.PATH,
    )
    run: str | None = setting(
        "name of the run's folder; none: a hash of the code and of the experiment",
        default=None,
        check=file_name,
        role=Role.PATH,
    )


@frozen
class Launch:
    """`launch { … }`: nodes, ranks and devices of a run, and when it stops."""

    nodes: int | Auto = setting(
        "number of nodes; auto: from `cluster` if given there, else 1",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    ranks_per_node: int | Auto = setting(
        "ranks per node; auto: the devices of `cluster` if given there, else what the axes of `parallel` "
        "need, spread evenly",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "device of a rank; auto: from `cluster`, else cuda if available, else cpu",
        default="auto",
        role=Role.EXECUTION,
    )
    threads: int | Auto = setting(
        "CPU threads of a rank; auto: the cores of the node divided by its ranks",
        default=AUTO,
        check=between(1, 4096),
        role=Role.EXECUTION,
    )
    stop_deadline: Quantity = setting(
        "time for a rank to save and exit after a stop request, before it is killed",
        default=Quantity(300, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
    )
    time_limit: Quantity | None = setting(
        "time after which the run saves and stops, counted from the start of the command",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        usual=UsualRange(1800, 7 * 86_400, "limits of queues: 30 min and 24 h (Daint of CSCS), 7 d (GPUs of UCR)"),
        example="4 h",
    )
    stop_at: Quantity | None = setting(
        "steps, tokens, epochs or share of the budget after which the run stops; it can be resumed later",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="1000 steps",
    )
    stop_after: Quantity | None = setting(
        "amount of training after which each start of the command stops",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="200 steps",
    )
    stop_file: str | None = setting(
        "the run stops as soon as this file exists, relative to the working folder",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"STOP"',
    )
    certificate: Literal["none", "required"] = setting(
        "required: `run` and `launch` start the plan only with a valid certificate of `xtrain prove`",
        default="none",
        role=Role.EXECUTION,
        added=True,
    )


@frozen
class Policy:
    """`policy { … }`: what `xtrain review` demands of a change, by the policy before it, and `xtrain launch` of a
    plan."""

    max_cost: float | None = setting(
        "most that the whole run may cost, in the unit of `cluster.price`",
        default=None,
        check=positive,
        role=Role.EXECUTION,
        example="40_000",
    )
    max_time: Quantity | None = setting(
        "longest time of the whole run",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="72 h",
    )
    max_step_time: Quantity | None = setting(
        "longest time of a step",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="9 s",
    )
    max_loss: float | None = setting(
        "highest loss that the law of `xtrain review --law` may predict",
        default=None,
        check=positive,
        role=Role.EXECUTION,
        example="2.1",
    )
    min_headroom: Quantity | None = setting(
        "memory of a device that the fullest rank leaves free at least",
        default=None,
        units=("%",),
        check=share,
        role=Role.EXECUTION,
        example="8%",
    )
    resume: Literal["any", "resharded", "safe", "same"] = setting(
        "worst verdict of `xtrain diff` on resuming a checkpoint from before the change; any: also incompatible",
        default="any",
        role=Role.EXECUTION,
    )
    certificate: Literal["none", "required"] = setting(
        "required: the changed plan has a valid certificate of `xtrain prove`", default="none", role=Role.EXECUTION
    )
    approval: Literal["none", "required"] = setting(
        "required: `xtrain launch` submits only plans that `xtrain approve` approved",
        default="none",
        role=Role.EXECUTION,
        added=True,
    )
    signers: str | None = setting(
        "file of allowed signers as for ssh-keygen(1), one of whom must have signed the approval; none: no signature "
        "is needed",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"allowed_signers"',
        added=True,
    )


@frozen
class Checkpoint:
    """`checkpoint { … }`: what a run starts from, how checkpoints are saved, and how many are kept."""

    from_: str | None = setting(
        "start from the full state of this checkpoint, or of the latest checkpoint of this other run",
        default=None, check=file_path, example='"runs/a/b"',
    )  # fmt: skip
    resume: bool = setting("resume from the latest checkpoint of this run", default=True, role=Role.EXECUTION)
    pretrained: str | None = setting(
        "start from only the weights of this checkpoint or run", default=None, check=file_path,
        example='"runs/a/b"',
    )  # fmt: skip
    verify: Literal["content", "sizes"] = setting(
        "check before a checkpoint is loaded: checksums of all files, or their sizes",
        default="content",
        role=Role.EXECUTION,
    )
    enabled: bool = setting("false: no checkpoints are saved; loading still works", default=True, role=Role.CADENCE)
    backend: Literal["dcp", "file"] = setting(
        "dcp: every rank writes its shard; file: one process writes one file, which torch.load reads",
        default="dcp",
        role=Role.EXECUTION,
    )
    mode: Literal["sync", "async", "async_pinned"] = setting(
        "sync: training waits; async: a copy in host memory is written in the background, pinned with async_pinned",
        default="sync",
        role=Role.EXECUTION,
    )
    overlap: Literal["wait", "latest"] = setting(
        "a save that is due during another: wait for the other, or postpone the save until the other is done",
        default="wait",
        role=Role.CADENCE,
    )
    keep: int | None = setting(
        "number of newest checkpoints to keep, in addition to the best; none: all",
        default=3,
        check=at_least(1),
        role=Role.CADENCE,
    )
    best: MeasuredNumber | None = setting(
        "metric of an evaluation or a hook whose best value determines the best checkpoint", default=None,
        role=Role.CADENCE, example="eval.web.loss",
    )  # fmt: skip
    best_is: Literal["auto", "lowest", "highest"] = setting(
        "better value of `best`; auto: lowest for losses, highest for accuracies and rewards, unknown for others",
        default="auto",
        role=Role.CADENCE,
        added=True,
    )
    model: bool = setting(
        "also save only the weights when the run has ended, for publishing", default=True, role=Role.CADENCE
    )
    failures: int | None = setting(
        ("consecutive failed saves after which the run stops; none: never"),
        default=3,
        check=at_least(1),
        role=Role.EXECUTION,
    )

    @property
    def best_is_highest(self) -> bool:
        """True if a higher value of `best` is better."""
        return "highest" in (self.best_is, self.best.better if self.best and self.best_is == "auto" else None)


TRACKERS: Final = Registry["Tracker"]("tracker", "trackers", contract="xtrain.contracts.actions.PlannedTracker")
# Prefix of the op and node of a tracker.
OP: Final = "setup.log."


@TRACKERS.base
class Tracker(Component):
    """`log { NAME { … } }`: a tracker that receives the records of a run, on rank 0 and concurrently with training.

    Trackers subclass `PlannedTracker` (`contracts/actions.py`). No tracker changes what is
    trained: a run may be resumed with other trackers and other settings.
    """

    kind: ClassVar[str]  # type: ignore[misc]
    hands_on = True
    title: ClassVar[str] = ""
    """Display name."""
    package: ClassVar[str] = ""
    """Package that it requires."""
    install: ClassVar[str] = ""
    """Argument of `pip install` for that package; empty: its name."""

    @classmethod
    def in_log(cls) -> tuple[type, Any]:
        """Return the type and field of its setting in `log`. A plan without the tracker does not mention it."""
        return cls, setting(f"records for {cls.title}", default=None, role=Role.EXECUTION, added=True)

    @classmethod
    def chosen(cls, value: Any) -> Self | None:
        """Return the tracker that a value of this setting chooses; None: none."""
        return value

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node: all of its settings."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values_of(self).items()}

    def does(self) -> str:
        """Return the description of its node: the first rank …, during training."""
        raise NotImplementedError

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """Return its name on a plan page. args: arguments of its node."""
        return cls.title

    def idle(self) -> dict[str, tuple[str, str]]:
        """Return the settings without effect: (reason, what to do instead)."""
        return {}


@frozen
class Log:
    """`log { … }`: trackers, which get the records of a run in addition to its own files."""

    members: ClassVar = TRACKERS

    @classmethod
    def complete(cls) -> "type[Log]":
        """Return the class with a setting for each tracker."""
        return cls.of(dict(TRACKERS))

    @staticmethod
    def of(trackers: dict[str, type[Tracker]]) -> "type[Log]":
        """Return the class with a setting for each of these trackers."""
        return _log_class(tuple(trackers.items()))

    def written(self) -> Iterator[Tracker]:
        """Yield the trackers with a block, including disabled ones."""
        values = (getattr(self, attribute.name) for attribute in attrs.fields(type(self)))
        yield from (value for value in values if isinstance(value, Tracker))

    def trackers(self) -> Iterator[Tracker]:
        """Yield the enabled trackers."""
        for attribute in attrs.fields(type(self)):
            tracker = TRACKERS.get(attribute.name, attribute.type)
            chosen = tracker.chosen(getattr(self, attribute.name))
            if chosen is not None:
                yield chosen


@cache
def _log_class(trackers: tuple[tuple[str, type[Tracker]], ...]) -> type[Log]:
    declared = {name: tracker.in_log() for name, tracker in trackers}
    body = {
        "__doc__": Log.__doc__,
        "__module__": __name__,
        "__annotations__": {name: kind for name, (kind, _) in declared.items()},
        **{name: field for name, (_, field) in declared.items()},
    }
    return frozen(type("Log", (Log,), body))


def tracker_of(op: str) -> type[Tracker] | None:
    """Return the tracker of a plan op; None for other ops and for trackers that are not installed."""
    return TRACKERS.of_kind(op.removeprefix(OP)) if op.startswith(OP) else None


@frozen
class Alerts:
    """`alerts { … }`: thresholds of alerts; `on … notify("command")` forwards an alert.

    Each alert is raised once and cleared when the condition ends. A loss or gradient norm that is not finite always
    raises one.
    """

    loss_spike: float | None = setting(
        "raised if the loss of a step is this many robust standard deviations above the median of 100 steps",
        default=6.0,
        check=positive,
        role=Role.CADENCE,
    )
    loss_above: float | None = setting(
        "raised if the loss of `loss_patience` consecutive steps is above this",
        default=None,
        role=Role.CADENCE,
        added=True,
        example="12.0",
    )
    loss_patience: int = setting(
        "with `loss_above`, number of steps", default=3, check=at_least(1), role=Role.CADENCE, added=True
    )
    slow: float | None = setting(
        "raised if five consecutive steps take this many times the median of the last 100 steps",
        default=2.0,
        check=Range(above=1),
        role=Role.CADENCE,
    )
    starvation: Quantity | None = setting(
        "raised if this share of the step time is spent waiting for data",
        default=Quantity(30, "%"),
        units=("%",),
        check=Range(low=1, high=100, percent=True),
        role=Role.CADENCE,
    )
    memory: Quantity | None = setting(
        "raised if a rank uses this share of its planned memory; on GPUs only",
        default=Quantity(105, "%"),
        units=("%",),
        check=positive,
        role=Role.CADENCE,
    )
    disk: Quantity | None = setting(
        "raised if less of the run's file system is free, or if a checkpoint would not fit; a share is at most the "
        "size of 10 checkpoints, or 100 GiB if that is more",
        default=Quantity(5, "%"),
        units=("%", "bytes"),
        check=share,
        role=Role.CADENCE,
        example="50 GiB",
    )
    stalled: Quantity | Auto | None = setting(
        "raised after this time without progress; auto: 60 s, or half of `fault_tolerance.stuck` if shorter",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.CADENCE,
        example="60 s",
    )


@frozen
class Hook(UserComponent):
    """`hook NAME { … }`: a function of your own with `@hook`, called at its place in a run; hooks of one place run in
    the order of the spec. Its settings are the parameters of the function."""

    name: str = label(check=file_name)

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node."""
        return {"user": self.call(), **self.declared}


@frozen
class StepBody(UserComponent):
    """`step NAME { … }`: a function of your own with `@step` instead of the forward and backward of a step. Its
    settings are the parameters of the function."""

    name: str = label(check=file_name)


@frozen
class EvaluationBody(UserComponent):
    """`evaluation_step NAME { … }`: a function of your own with `@evaluation_step` instead of the forward of
    evaluations. Its settings are the parameters of the function."""

    name: str = label(check=file_name)


@frozen
class OwnTraining(UserComponent):
    """`train NAME { … }`: a function of your own with `@train` that runs the epochs or steps of a run. Its settings are
    the parameters of the function."""

    name: str = label(check=file_name)


@frozen
class OwnEpoch(UserComponent):
    """`epoch NAME { … }`: a function of your own with `@epoch` that runs the steps of each epoch. Its settings are the
    parameters of the function."""

    name: str = label(check=file_name)
