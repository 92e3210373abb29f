"""Events about a run as a whole, the table of all events by name, and their reader."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

from xtrain.records import training_events
from xtrain.records.lines import Event, UnknownEvent, doc, event_types, in_words, objects_since, one_of, read
from xtrain.records.names import ControlState

ALERTS_OF_DATA: Final = ("loss_spike", "loss_above", "nonfinite")
"""Kinds of alerts that documents can cause."""


class AlertEvent(Event, tag="alert"):
    """an alert was raised or cleared ([alerts.md](alerts.md))"""

    kind: Annotated[
        str, doc("`loss_spike`, `loss_above`, `nonfinite`, `slow`, `starvation`, `memory`, `disk` or `stalled`")
    ]
    state: Annotated[str, doc("`raised` or `cleared`")]
    message: Annotated[str, in_words()]
    value: Annotated[float | None, doc("measured value, null if there is none")]
    limit: Annotated[float | None, doc("limit that the value has passed, null if there is none")]
    ranks: Annotated[list[int], doc("ranks concerned, may be empty")]


class NotifyEvent(Event, tag="notify"):
    """a command of `notify` has ended"""

    kind: Annotated[str, doc("event that ran the command, or `tick`")]
    command: Annotated[str, doc("command as in the spec")]
    exit_code: Annotated[int | None, doc("exit code, null if it was killed or could not be run")]
    seconds: Annotated[float | None, doc("duration", "s")]
    detail: Annotated[str, in_words()]


class WarningEvent(Event, tag="warning"):
    """something was skipped or failed, such as an unreadable record or a save"""

    message: Annotated[str, in_words()]
    code: Annotated[str, doc("code of a diagnostic, if there is one")] = ""


class ControlEvent(Event, tag="control"):
    """a command to the run was accepted, executed, or refused"""

    id: Annotated[str, doc("name of the command's file")]
    command: Annotated[str, doc("command as in the file")]
    state: Annotated[str, doc(one_of(ControlState))]
    detail: Annotated[str, in_words()]


class PausedEvent(Event, tag="paused"):
    """a paused run continues or stops"""

    seconds: Annotated[float | None, doc("duration of the pause", "s")]


class SignalEvent(Event, tag="signal"):
    """all ranks have agreed to act on a signal, or it came before there was anything to save"""

    name: Annotated[str, doc("`sigterm`, `sigint` or `sigusr1`")]
    reason: Annotated[str, in_words("number of ranks that received it, or the process")]


class StopEvent(Event, tag="stop"):
    """all ranks have agreed to stop"""

    name: Annotated[str, doc("`time_limit`, `stop_at`, `stop_file`, `tick`, or the alert that caused it")]
    reason: Annotated[str, in_words()]


class RequeueEvent(Event, tag="requeue"):
    """Slurm was asked to start the job again"""

    job: Annotated[str, doc("job number")]


class StuckEvent(Event, tag="stuck"):
    """the run makes no progress because of these ranks; `step` is the current one
    ([health.md](health.md#what-is-recorded))"""

    ranks: Annotated[list[int], doc("ranks at fault; the other keys describe the first of them; empty if unknown")]
    state: Annotated[str, doc("`stopped`, `ended`, `frozen`, `stuck` or `unknown`")]
    node: Annotated[str, doc("node of the ranks; for a frozen rank, the node where the others wait for it")]
    place: Annotated[str, doc("file, line and function, empty if unknown")]
    last_step: Annotated[int | None, doc("step of the last heartbeat", "steps")]
    last_node: Annotated[str | None, doc("node of the last heartbeat")]
    host: Annotated[str, doc("machine of the rank")]
    pid: Annotated[int | None, doc("process of the rank")]
    seconds: Annotated[float | None, doc("time without progress", "s")]
    folder: Annotated[str, doc("folder with stacks and collectives of all ranks")]

    @property
    def frozen(self) -> bool:
        """Return True if the ranks run no Python anymore, so that they must be ended from outside."""
        return self.state in ("stopped", "ended", "frozen")


class FailureEvent(Event, tag="failure"):
    """a rank failed; every failed rank writes one"""

    rank: Annotated[int | None, doc("failed rank, null if no rank failed")]
    error: Annotated[str, in_words()]
    exit_code: Annotated[int | None, doc("exit code of the rank")]
    traceback: Annotated[str, in_words("may be empty")]
    code: Annotated[str, doc("code of a diagnostic, for errors of the environment")] = ""
    agreed: Annotated[bool, doc("true if all ranks found the same error")] = False
    lost: Annotated[bool, doc("true if the rank has only lost contact with another rank")] = False
    stopping: Annotated[bool, doc("true if the rank did not stop in time after a stop request")] = False


class RestartEvent(Event, tag="restart"):
    """ranks have failed and are restarted; `step` is where the run continues ([restarts.md](restarts.md))"""

    number: Annotated[int | None, doc("number of this restart, from 1")]
    of: Annotated[int | None, doc("maximum number of restarts", "restarts")]
    reason: Annotated[str, in_words()]
    world: Annotated[int | None, doc("number of ranks from now on", "ranks")]


class ReplicasEvent(Event, tag="replicas"):
    """from the step after `step` on these replica groups take part ([stacks.md](stacks.md#what-is-learned))"""

    taking_part: Annotated[list[int], doc("groups that take part")]
    joined: Annotated[list[int], doc("groups that joined")]
    left: Annotated[list[int], doc("groups that left")]
    of: Annotated[int | None, doc("number of all groups", "groups")]
    rows: Annotated[int | None, doc("rows of a step of the groups that take part", "rows")]


class ReplicaGroupEvent(Event, tag="replica_group"):
    """a replica group ended before the run, or is restarted"""

    group: Annotated[int | None, doc("number of the group")]
    state: Annotated[str, doc("`ended`, `started` or `given_up`")]
    reason: Annotated[str, in_words("reason for its end")]
    ranks: Annotated[list[int], doc("ranks of the group")]
    number: Annotated[int | None, doc("number of this start of the group, from 1")]


class RunEndEvent(Event, tag="run_end"):
    """the run has ended"""

    status: Annotated[str, doc("see below")]
    exit_code: Annotated[int | None, doc("see below")]
    seconds: Annotated[float | None, doc("since `run_start`", "s")]
    loss: Annotated[float | None, doc("loss of the last step", "nats a token")]
    reason: Annotated[str, in_words("reason of a stop, an interruption or a failure")] = ""


EVENT_TYPES: Final = {**event_types(training_events.__name__), **event_types(__name__)}


def event_of(found: dict[str, Any]) -> Event:
    """Convert a JSON object to the event named by its key `event`; an `UnknownEvent` for unknown names."""
    name = found.get("event")
    if isinstance(name, str) and name in EVENT_TYPES:
        return read(EVENT_TYPES[name], found)
    unknown = read(UnknownEvent, {key: value for key, value in found.items() if key != "event"})
    unknown.rest = {"event": name, **unknown.rest}
    return unknown


def events_since(path: Path, offset: int = 0) -> list[Event]:
    """Return the events in a file from a byte offset on; empty without a file. Raises OSError."""
    return events_of(objects_since(path, offset))


def events_of(found: Iterable[dict[str, Any]]) -> list[Event]:
    return [event_of(each) for each in found]
