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

    rank: Annotated[int, doc("the rank")]
    host: Annotated[str, doc("its machine")]
    pid: Annotated[int, doc("its process")]
    born: Annotated[int, doc("start time of the process; 0 if unknown", "clock ticks")]
    attempt: Annotated[int, doc("the attempt (start of the run) that the process belongs to, as in `run_start`")]
    alive: Annotated[int, doc("number of heartbeats written; increases as long as Python runs in the process")]
    time: Annotated[float, doc("since 1970, by the machine's own clock; for people only", "s")]
    step: Annotated[int, doc("the current step, from 1; 0 in set-up", "steps")]
    node: Annotated[str, doc("the current node of the plan")]
    marks: Annotated[int, doc("marks of this attempt; increases as long as the rank makes progress", "marks")]
    within: Annotated[int, doc("marks since the step began; the same on all ranks that are equally far", "marks")]
    lasting: Annotated[bool, doc("whether the current work may take long without a mark")]
    idle: Annotated[float, doc("since the last mark", "s")]
    place: Annotated[
        str,
        doc(
            "what the main thread is executing, once it has been there for two seconds, as "
            "`torch/distributed/x.py:120 wait`"
        ),
    ]
    debugger: Annotated[bool, doc("whether a Python debugger has stopped the process")]

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
    time: Annotated[float | None, doc("when it was asked for, since 1970 (UTC)", "s")] = None
    arg: Annotated[Any, doc("dataset of `eval`, number of steps of `profile`")] = None


SERVER_FILE: Final = "server/status.json"


class ServedModel(Struct, kw_only=True):
    """A client's model. Numbers are since this start of the server."""

    id: Annotated[str, doc("as the protocol names it")]
    client: Annotated[str, doc("name of its session, as the client has given it")] = ""
    connected: Annotated[bool, doc("whether its client is there")] = False
    in_memory: Annotated[bool, doc("whether the ranks have it; else it is restored when it is needed")] = False
    damaged: Annotated[str, doc("why its state can no longer be relied on; empty: it can")] = ""
    rank: Annotated[int | None, doc("of its adapter")] = None
    next_seq: Annotated[int, doc("seq_id of the request that is its next")] = 1
    steps: Annotated[int, doc("optimizer steps")] = 0
    tokens: Annotated[int, doc("that it was trained on, counted in every pass", "tokens")] = 0
    loss: Annotated[float | None, doc("sum of its newest forward_backward, divided by the targets there", "nats")] = (
        None
    )
    loss_name: Annotated[str, doc("which loss that is")] = ""
    waiting: Annotated[int, doc("requests of it that wait or are executed")] = 0
    waits_for: Annotated[str, doc("what the first of them waits for; empty: none waits")] = ""
    waited_seconds: Annotated[float, doc("how long that has waited", "s")] = 0.0
    last_time: Annotated[float | None, doc("when its newest request was done, since 1970 (UTC)", "s")] = None


class ServerStatus(Struct, kw_only=True):
    """Status of a server. Rates are of the last ten seconds, latencies of the newest 1,000 requests, from accepted to
    done."""

    time: Annotated[float, doc("when this was written, since 1970 (UTC)", "s")]
    state: Annotated[str, doc("`serving`, `restoring` (ranks are started again), `draining`, `stopped` or `failed`")]
    began: Annotated[float, doc("when the server was started, since 1970 (UTC)", "s")]
    url: Annotated[str, doc("where it listens")] = ""
    reason: Annotated[str, doc("why it has failed")] = ""
    clients: Annotated[int, doc("connected sessions")] = 0
    slots: Annotated[int, doc("models that the ranks can have at a time")] = 0
    requests: Annotated[int, doc("done since it was started")] = 0
    errors: Annotated[int, doc("of them ended in an error")] = 0
    waiting: Annotated[int, doc("requests that wait or are executed")] = 0
    queue: Annotated[int, doc("how many may wait")] = 0
    requests_per_second: Annotated[float, doc("requests that were done", "requests/s")] = 0.0
    trained_per_second: Annotated[float, doc("tokens of forward and forward_backward", "tokens/s")] = 0.0
    sampled_per_second: Annotated[float, doc("tokens that were drawn", "tokens/s")] = 0.0
    latency: Annotated[dict[str, float], doc("`p50`, `p95`, `p99`", "s")] = {}
    kinds: Annotated[dict[str, int], doc("kind of request → how many were done")] = {}
    models: Annotated[list[ServedModel], doc("all there are")] = []
