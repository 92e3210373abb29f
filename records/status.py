"""Files with a present state instead of a history: heartbeats, control requests, the status of a server."""

import json
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Struct, ValidationError, convert, structs

from xtrain.records.lines import doc, object_of, one_of
from xtrain.records.names import ControlWord
from xtrain.regular_files import open_regular

# Bytes of the line. The size is fixed: the line is overwritten in place, and a reader never finds the rest of a longer
# one.
WIDTH: Final = 640


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Heartbeat of a rank. Every key is required: a line without one is incomplete."""

    rank: Annotated[int, doc("number of the rank")]
    host: Annotated[str, doc("machine of the rank")]
    pid: Annotated[int, doc("process of the rank")]
    born: Annotated[int, doc("start time of the process; 0 if unknown", "clock ticks")]
    attempt: Annotated[int, doc("attempt (start of the run) of the process, as in `run_start`")]
    alive: Annotated[int, doc("number of heartbeats written; increases as long as Python runs in the process")]
    time: Annotated[float, doc("time since 1970, by the machine's own clock; for people only", "s")]
    step: Annotated[int, doc("current step, from 1; 0 in set-up", "steps")]
    node: Annotated[str, doc("current node of the plan")]
    marks: Annotated[int, doc("marks of this attempt; increases as long as the rank makes progress", "marks")]
    within: Annotated[int, doc("marks since the start of the step; equal on ranks that have come equally far", "marks")]
    lasting: Annotated[bool, doc("true if the current work may take long without a mark")]
    idle: Annotated[float, doc("time since the last mark", "s")]
    place: Annotated[
        str,
        doc("code that the main thread has executed for two seconds, as `torch/distributed/x.py:120 wait`"),
    ]
    debugger: Annotated[bool, doc("true if a Python debugger has stopped the process")]

    @property
    def progress(self) -> tuple[int, int]:
        """Return the rank's progress, comparable with other ranks."""
        return self.step, self.within

    def line(self) -> bytes:
        """Return the line: WIDTH bytes, if names are cut to the available length."""
        text = json.dumps(structs.asdict(self), separators=(",", ":"))  # ASCII, because file names may be invalid text
        return text.encode().ljust(WIDTH - 1) + b"\n"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a heartbeat; None if it is missing or incomplete."""
    try:
        with open_regular(path) as file:
            return convert(object_of(file.read(WIDTH)), Heartbeat)
    except (OSError, ValidationError):
        return None


class ControlRequest(Struct, frozen=True, omit_defaults=True):
    """A file of `control/`, named by the request's id."""

    command: Annotated[str, doc(one_of(ControlWord))]
    time: Annotated[float | None, doc("time of the request, since 1970 (UTC)", "s")] = None
    arg: Annotated[Any, doc("dataset of `eval`, number of steps of `profile`")] = None


SERVER_FILE: Final = "server/status.json"


class ServedModel(Struct, kw_only=True):
    """A client's model. Numbers are since this start of the server."""

    id: Annotated[str, doc("id in the protocol")]
    client: Annotated[str, doc("name of its session, as given by the client")] = ""
    connected: Annotated[bool, doc("true if its client is connected")] = False
    in_memory: Annotated[bool, doc("true if the ranks have it in memory; otherwise it is restored when needed")] = False
    damaged: Annotated[str, doc("reason why its state is no longer reliable; empty if it is")] = ""
    rank: Annotated[int | None, doc("rank of its adapter")] = None
    next_seq: Annotated[int, doc("seq_id of its next request")] = 1
    steps: Annotated[int, doc("optimizer steps")] = 0
    tokens: Annotated[int, doc("trained tokens, counted in every pass", "tokens")] = 0
    loss: Annotated[float | None, doc("sum of its newest forward_backward, per target", "nats")] = None
    loss_name: Annotated[str, doc("name of that loss")] = ""
    waiting: Annotated[int, doc("number of its requests that wait or are executed")] = 0
    waits_for: Annotated[str, doc("reason why its first request waits; empty if none waits")] = ""
    waited_seconds: Annotated[float, doc("waiting time of that request", "s")] = 0.0
    last_time: Annotated[float | None, doc("time at which its newest request was done, since 1970 (UTC)", "s")] = None


class ServerStatus(Struct, kw_only=True):
    """Status of a server. Rates are of the last ten seconds, latencies of the newest 1,000 requests, from accepted to
    done."""

    time: Annotated[float, doc("time of this record, since 1970 (UTC)", "s")]
    state: Annotated[str, doc("`serving`, `restoring` (ranks are restarted), `draining`, `stopped` or `failed`")]
    began: Annotated[float, doc("start time of the server, since 1970 (UTC)", "s")]
    url: Annotated[str, doc("address that the server listens on")] = ""
    reason: Annotated[str, doc("reason of a failure")] = ""
    clients: Annotated[int, doc("connected sessions")] = 0
    slots: Annotated[int, doc("maximum number of models in memory")] = 0
    requests: Annotated[int, doc("requests done since the start")] = 0
    errors: Annotated[int, doc("number of requests that ended in an error")] = 0
    waiting: Annotated[int, doc("requests that wait or are executed")] = 0
    queue: Annotated[int, doc("maximum number of waiting requests")] = 0
    requests_per_second: Annotated[float, doc("requests done", "requests/s")] = 0.0
    trained_per_second: Annotated[float, doc("tokens of forward and forward_backward", "tokens/s")] = 0.0
    sampled_per_second: Annotated[float, doc("sampled tokens", "tokens/s")] = 0.0
    latency: Annotated[dict[str, float], doc("`p50`, `p95`, `p99`", "s")] = {}
    kinds: Annotated[dict[str, int], doc("kind of request → number of requests done")] = {}
    models: Annotated[list[ServedModel], doc("all models")] = []
