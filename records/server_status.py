"""`server/status.json`: what a training server is doing, written anew about once a second while it listens."""

from typing import Annotated, Final

from msgspec import Struct

from xtrain.records.record import doc

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
