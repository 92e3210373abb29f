"""Events about the run as a whole: what it is asked for, what is not as it should be, and its end."""

from typing import Annotated

from .event import Event
from .record import doc


class SignalEvent(Event, tag="signal"):
    """all ranks have agreed to act on a signal, or it came before there was anything to save"""

    name: Annotated[str, doc("`sigterm`, `sigint` or `sigusr1`")]
    reason: Annotated[str, doc("how many ranks got it, or which process")]


class StopEvent(Event, tag="stop"):
    """all ranks have agreed to stop"""

    name: Annotated[str, doc("`time_limit`, `stop_at`, `stop_file`, or the alert that it is because of")]
    reason: Annotated[str, doc("in words")]


class ControlEvent(Event, tag="control"):
    """a command from outside was read, carried out, or not"""

    id: Annotated[str, doc("name of the command's file")]
    command: Annotated[str, doc("as in the file")]
    state: Annotated[str, doc("`accepted`, `done` or `refused`")]
    detail: Annotated[str, doc("in words")]


class PausedEvent(Event, tag="paused"):
    """a run that waited goes on or stops"""

    seconds: Annotated[float | None, doc("that it has waited", "s")]


class RequeueEvent(Event, tag="requeue"):
    """Slurm was asked to start the job again"""

    job: Annotated[str, doc("its number")]


class AlertEvent(Event, tag="alert"):
    """something is not as it should be, or is so again ([alerts.md](alerts.md))"""

    kind: Annotated[str, doc("`loss_spike`, `nonfinite`, `slow`, `starvation`, `memory`, `disk` or `stalled`")]
    state: Annotated[str, doc("`raised` or `cleared`")]
    message: Annotated[str, doc("in words")]
    value: Annotated[float | None, doc("what was measured, null where it is no number")]
    limit: Annotated[float | None, doc("that it has passed, null where there is none")]
    ranks: Annotated[list[int], doc("those it is about, may be empty")]


class NotifyEvent(Event, tag="notify"):
    """a command of `notify` has ended"""

    kind: Annotated[str, doc("the event it was run for, or `tick`")]
    command: Annotated[str, doc("as in the spec")]
    exit_code: Annotated[int | None, doc("null if it was ended or could not be run")]
    seconds: Annotated[float | None, doc("it took", "s")]
    detail: Annotated[str, doc("in words")]


class WarningEvent(Event, tag="warning"):
    """something was left out or failed, such as an unreadable record or a save"""

    message: Annotated[str, doc("in words")]
    code: Annotated[str, doc("of a diagnostic, where there is one")] = ""


class StuckEvent(Event, tag="stuck"):
    """nothing gets on, because of these ranks; `step` is the one under way ([health.md](health.md#what-is-left))"""

    ranks: Annotated[list[int], doc("the first of them is what the other keys are about; empty where nobody knows")]
    state: Annotated[str, doc("`stopped`, `ended`, `frozen`, `stuck` or `unknown`")]
    node: Annotated[str, doc("where the run waits")]
    place: Annotated[str, doc("file, line and function that the rank is in, as far as it tells")]
    last_step: Annotated[int | None, doc("what the rank was in when it was last heard of", "steps")]
    last_node: Annotated[str | None, doc("the same")]
    host: Annotated[str, doc("its machine")]
    pid: Annotated[int | None, doc("its process")]
    seconds: Annotated[float | None, doc("without progress", "s")]
    folder: Annotated[str, doc("where stacks and collectives of all ranks lie")]

    @property
    def frozen(self) -> bool:
        """Whether the ranks run no Python any more, so that nobody else can end them."""
        return self.state in ("stopped", "ended", "frozen")


class FailureEvent(Event, tag="failure"):
    """a rank failed; each that does reports"""

    rank: Annotated[int | None, doc("that failed; null where it is none of them")]
    error: Annotated[str, doc("in words")]
    exit_code: Annotated[int | None, doc("that it leaves with")]
    traceback: Annotated[str, doc("empty where it tells nothing")]
    code: Annotated[str, doc("of a diagnostic, for faults of the environment")] = ""
    agreed: Annotated[bool, doc("all ranks found the same")] = False
    lost: Annotated[bool, doc("the rank has only lost contact with another")] = False
    stopping: Annotated[bool, doc("the run was to stop, and the rank did not in time")] = False


class RestartEvent(Event, tag="restart"):
    """ranks have failed and are started again; `step` is where the run goes on ([restarts.md](restarts.md))"""

    number: Annotated[int | None, doc("of this restart, from 1")]
    of: Annotated[int | None, doc("at most", "restarts")]
    reason: Annotated[str, doc("in words")]
    world: Annotated[int | None, doc("from now on", "ranks")]


class RunEndEvent(Event, tag="run_end"):
    """the attempt is over"""

    status: Annotated[str, doc("see below")]
    exit_code: Annotated[int | None, doc("see below")]
    seconds: Annotated[float | None, doc("since `run_start`", "s")]
    loss: Annotated[float | None, doc("of the last step", "nats a token")]
    reason: Annotated[str, doc("why a run that was stopped, interrupted or failed has ended")] = ""


RUN_EVENTS: tuple[type[Event], ...] = (
    AlertEvent,
    NotifyEvent,
    WarningEvent,
    ControlEvent,
    PausedEvent,
    SignalEvent,
    StopEvent,
    RequeueEvent,
    StuckEvent,
    FailureEvent,
    RestartEvent,
    RunEndEvent,
)
