"""How much of everything a server takes. Sizes are bytes, times seconds."""

from attrs import frozen


@frozen(kw_only=True)
class ServerLimits:
    """body: of a request, also unpacked. rows: of a request, as clients are asked to cut what is larger. tokens: of the
    rows of a request. samples: of a request. queue, queue_bytes: requests that wait; beyond that clients are asked to
    come later (429). results: bytes of results that are kept, on the disk. answered: results that are kept after they
    were fetched; of more, the newest are. sessions: that are connected. models: of these. connections: with or without
    a request. samplers: of a session; beyond that the oldest unnamed weights are removed. checkpoints: with a name, of
    an owner. free: of the disk, which are left. together: tokens of one engine call.

    silence: how long a connection may be there without a request. poll: how long `retrieve_future` waits. gap: how long
    a request waits for those before it. quiet, idle: after which a session without a word of its client has no claim to
    memory that others ask for, and after which it frees the memory of its models.
    fetched, unfetched: how long results are kept. sample_wait: how long a sample waits for its turn. forgotten: after
    which what an ended or idle session leaves without a name is removed. snapshot_steps, snapshot_bytes: work that is
    repeated at most when a model is restored.
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
