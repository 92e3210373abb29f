"""What the store has: everything that exists on a server, what was asked of it, and what came of that.

Times are seconds since 1970 (UTC). Ids, paths and names of folders are checked when they are read.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from xtrain.server.engine import AdapterSettings

Id = Annotated[str, Meta(pattern=r"\A[\w:./-]{1,400}\Z")]
FolderName = Annotated[str, Meta(pattern=r"\A[\w-]{1,64}\Z")]
SavedPath = Annotated[str, Meta(pattern=r"\Atinker://[\w:.-]+/(?:sampler_)?weights/[A-Za-z0-9][\w.-]{0,127}\Z")]


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
    """A connected program. ended: the client ended it; its models are unloaded. heard: time of the client's last
    request, or up to half a minute earlier."""

    id: Id
    owner: str
    created: float
    sdk: str = ""
    name: str | None = None
    metadata: dict[str, str] | None = None
    project: str | None = None
    ended: bool = False
    heard: float = 0.0


class ModelEntry(Struct, tag=True):
    """A model in training. next: seq_id of the next work; 0 creates the model.

    snapshot: folder with the state after `snapshot_seq`; later work is repeated when the model is restored. damaged:
    reason why its state is unreliable. repeated: seq_ids of that work as stored in rows; a running server has them in
    its `State`.
    """

    id: Id
    session: Id
    owner: str
    base: str
    adapter: AdapterEntry | None
    created: float
    metadata: dict[str, str] | None = None
    next: int = 1
    snapshot: FolderName | None = None
    snapshot_seq: int = 0
    damaged: str | None = None
    repeated: list[int] = []


class SavedEntry(Struct, tag=True):
    """Weights saved by name. path: `tinker://MODEL/KIND/NAME`. folder: in the server's folder."""

    path: SavedPath
    folder: FolderName
    model: Id
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
    """Immutable weights for sampling. folder: None is the base model. path: of the checkpoint."""

    id: Id
    session: Id
    owner: str
    base: str
    folder: FolderName | None
    path: SavedPath | None
    created: float


class FolderEntry(Struct, tag=True):
    """A folder of weights: bytes and CRC-32 of its files by relative path."""

    id: FolderName
    files: dict[str, tuple[int, int]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


class Removed(Struct, tag=True):
    """Removal of an entry."""

    kind: Literal["Session", "ModelEntry", "SavedEntry", "SamplerEntry", "FolderEntry"]
    id: str


Thing = Session | ModelEntry | SavedEntry | SamplerEntry | FolderEntry
Change = Thing | Removed


class Accepted(Struct, tag=True):
    """A request that is executed once. queue and seq: its idempotency key. body: as received; b"" once it is not
    needed. seed: drawn for a request without one."""

    id: Id
    kind: str
    queue: str
    seq: int
    digest: bytes
    owner: str
    time: float
    seed: int
    body: bytes


class Done(Struct, tag=True):
    """Result of a request. failed: nothing was changed, or a gradient was dropped. media: media type of the body.
    changes: created things, which have rows of their own. repeated: it changed its model, and is repeated when the
    model is restored from an earlier snapshot."""

    id: Id
    time: float
    failed: bool
    media: str
    body: bytes
    changes: list[Change] = []
    repeated: bool = False


Entry = Thing | Accepted | Done

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Entry)


def encoded(entry: Entry) -> bytes:
    return _ENCODER.encode(entry)


def decoded(content: bytes) -> Entry:
    """Decode an entry. Raises msgspec.DecodeError for an invalid entry, id or folder."""
    return _DECODER.decode(content)


def key_of(entry: Entry | Removed) -> str:
    """Return the key of an entry's row."""
    kind = entry.kind if isinstance(entry, Removed) else type(entry).__name__
    return f"{kind}/{entry.id}"
