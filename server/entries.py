"""What the journal has: everything that exists on a server, what was asked of it, and what came of that.

Times are seconds since 1970 (UTC).
"""

from typing import Literal

import msgspec
from msgspec import Struct

from .engine import AdapterSettings


class AdapterEntry(Struct, frozen=True):
    """The adapter of a model, as an engine makes it."""

    rank: int
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = True

    def settings(self) -> AdapterSettings:
        return AdapterSettings(rank=self.rank, seed=self.seed, attn=self.attn, mlp=self.mlp, unembed=self.unembed)


class Session(Struct, tag=True):
    """A program that is connected. ended: the client has said so; nothing of it is kept in memory any more. heard:
    when its client has said its last word, or up to half a minute before."""

    id: str
    owner: str
    created: float
    sdk: str = ""
    name: str | None = None
    metadata: dict[str, str] | None = None
    project: str | None = None
    ended: bool = False
    heard: float = 0.0


class ModelEntry(Struct, tag=True):
    """A model that is trained. next: the seq_id of the work that is to be done next; 0 is what creates the model.

    snapshot: folder with the state after `snapshot_seq`; work behind that is repeated when the model is restored.
    damaged: why its state can no longer be relied on.
    """

    id: str
    session: str
    owner: str
    base: str
    adapter: AdapterEntry | None
    created: float
    metadata: dict[str, str] | None = None
    next: int = 1
    snapshot: str | None = None
    snapshot_seq: int = 0
    damaged: str | None = None


class SavedEntry(Struct, tag=True):
    """Weights that were saved by name. path: `tinker://MODEL/KIND/NAME`. folder: in that of the server."""

    path: str
    folder: str
    model: str
    owner: str
    kind: Literal["weights", "sampler_weights"]
    created: float
    base: str
    adapter: AdapterEntry | None
    size: int
    metadata: dict[str, str] | None = None
    expires: float | None = None
    public: bool = False

    @property
    def id(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class SamplerEntry(Struct, tag=True):
    """Weights that are sampled from, which never change. folder: None is the base model. path: of the checkpoint."""

    id: str
    session: str
    owner: str
    base: str
    folder: str | None
    path: str | None
    created: float


class Removed(Struct, tag=True):
    """One of the above is no more."""

    kind: Literal["Session", "ModelEntry", "SavedEntry", "SamplerEntry"]
    id: str


Change = Session | ModelEntry | SavedEntry | SamplerEntry | Removed


class ChangedEntry(Struct, tag=True):
    """Changes that no work has made; first in a rewritten journal everything that exists."""

    changes: list[Change]


class Accepted(Struct, tag=True):
    """A request that will be executed once. queue and seq: its idempotency key. body: as it came; b"": not needed any
    more. seed: drawn for what the client gave none for."""

    id: str
    kind: str
    queue: str
    seq: int
    digest: bytes
    owner: str
    time: float
    seed: int
    body: bytes


class Done(Struct, tag=True):
    """What came of a request. failed: it has changed nothing, or has dropped a gradient. media: of the body. changes:
    what it has made. repeated: it has changed its model, and is done again when that is restored from a snapshot before
    it. kept: False: the result is no longer there."""

    id: str
    time: float
    failed: bool
    media: str
    body: bytes
    changes: list[Change] = []
    repeated: bool = False
    kept: bool = True


Entry = ChangedEntry | Accepted | Done

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Entry)


def encoded(entry: Entry) -> bytes:
    return _ENCODER.encode(entry)


def decoded(content: bytes) -> Entry:
    """Raises msgspec.DecodeError for the entries of another version."""
    return _DECODER.decode(content)
