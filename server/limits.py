"""How much of everything a server takes. Sizes are bytes, times seconds."""

from attrs import frozen


@frozen(kw_only=True)
class ServerLimits:
    """Limits of a server. body: bytes of a request, also unpacked. rows: rows of a request; clients are asked to split
    larger ones. tokens: tokens of the rows of a request. samples: samples of a request. queue, queue_bytes: waiting
    requests; beyond that clients are asked to retry later (429). results: bytes of results kept on disk. answered:
    fetched results that are kept, the newest. sessions: connected sessions. models: their models. connections: with
    or without a request. samplers: unnamed weights per session; beyond that the oldest are removed. checkpoints:
    named checkpoints per owner. free: bytes of the disk left free. together: tokens of one engine call.

    silence: maximum time of a connection without a request. poll: time that `retrieve_future` waits. gap: time that a
    request waits for its predecessors. quiet, idle: time without a request from a session's client after which the
    session loses its claim to memory that others need, and after which its models are unloaded. fetched, unfetched:
    time that results are kept. sample_wait: time that a sample waits for its turn. forgotten: time after which unnamed
    weights of an ended or idle session are removed. snapshot_steps, snapshot_bytes: maximum work repeated when a model
    is restored.
    """

    body: int = 64 * 2**20
    rows: int = 1024
    tokens: int = 2**20
    samples: int = 256
    queue: int = 1024
    queue_bytes: int = 512 * 2**20
    results: int = 2**30
    answered: int = 2**14
    sessions: int = 256
    models: int = 1000
    connections: int = 4096
    samplers: int = 64
    checkpoints: int = 1000
    free: int = 2**29
    together: int = 2**16

    silence: float = 15.0
    poll: float = 22.0
    gap: float = 120.0
    quiet: float = 60.0
    idle: float = 1800.0
    fetched: float = 600.0
    unfetched: float = 3600.0
    sample_wait: float = 1800.0
    forgotten: float = 7 * 86400.0
    snapshot_steps: int = 50
    snapshot_bytes: int = 64 * 2**20
