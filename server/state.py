"""State of a server: its entries, the requests that are still needed, and the views that clients read."""

from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from attrs import define, field, frozen
from msgspec import Meta, Struct
from msgspec.structs import replace

from xtrain.server.engine_interface import AdapterSettings, Capabilities

Id = Annotated[str, Meta(pattern=r"\A[\w:./-]{1,400}\Z")]
FolderName = Annotated[str, Meta(pattern=r"\A[\w-]{1,64}\Z")]
SavedPath = Annotated[str, Meta(pattern=r"\Atinker://[\w:.-]+/(?:sampler_)?weights/[A-Za-z0-9][\w.-]{0,127}\Z")]


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
    adapter: AdapterSettings | None
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
    adapter: AdapterSettings | None
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
    """Immutable weights for sampling. folder: None is the base model. path: of the checkpoint. digest: SHA-256 of the
    archive that a client has sent; None if the server has exported the weights."""

    id: Id
    session: Id
    owner: str
    base: str
    folder: FolderName | None
    path: SavedPath | None
    created: float
    digest: str | None = None


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


def _fulfilled() -> "Future[None]":
    found: Future[None] = Future()
    found.set_result(None)
    return found


LASTS: Final = _fulfilled()


@frozen(kw_only=True)
class KeptResult:
    """A stored result: size of its body, and its time."""

    size: int
    time: float


@frozen(kw_only=True)
class WorkDone:
    """Work of a request, for monitoring: trained and drawn tokens, optimizer steps, and the loss per target in nats."""

    trained: int = 0
    drawn: int = 0
    steps: int = 0
    loss: float | None = None
    loss_name: str = ""


@define(eq=False)
class QueuedWork:
    """An accepted request. request: its parsed body while it waits. size: bytes of the body. lasting: fulfilled once
    the request is stored. result: None until done. promise: fulfilled once the result is stored. Afterwards both are
    LASTS, because finished work should take little memory. fetched: time at which its result was first returned.
    started: it is being executed. attempts: number of engines lost during it. measured: its work so far, until it is
    done."""

    entry: Accepted
    request: Any = None
    result: KeptResult | None = None
    fetched: float | None = None
    started: bool = False
    attempts: int = 0
    size: int = 0
    measured: WorkDone | None = None
    lasting: "Future[None]" = field(factory=Future)
    promise: "Future[None]" = field(factory=Future)

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def key(self) -> tuple[str, int]:
        return self.entry.queue, self.entry.seq

    def is_lasting(self) -> None:
        self.lasting = LASTS

    def is_done(self) -> None:
        self.promise = LASTS


@define
class State:
    """All existing things by id; requests also by idempotency key, and waiting requests separately."""

    sessions: dict[str, Session] = field(factory=dict)
    models: dict[str, ModelEntry] = field(factory=dict)
    checkpoints: dict[str, SavedEntry] = field(factory=dict)
    samplers: dict[str, SamplerEntry] = field(factory=dict)
    folders: dict[str, FolderEntry] = field(factory=dict)
    works: dict[str, QueuedWork] = field(factory=dict)
    waiting: dict[str, QueuedWork] = field(factory=dict)
    keys: dict[tuple[str, int], QueuedWork] = field(factory=dict)
    results: int = 0  # bytes of all kept results
    # Finished work since a model's snapshot that changed the model, by seq_id: id, and bytes of the body.
    history: dict[str, dict[int, tuple[str, int]]] = field(factory=dict)

    def accept(self, work: QueuedWork) -> None:
        self.works[work.id] = self.keys[work.key] = self.waiting[work.id] = work

    def finish(self, work: QueuedWork, done: Done) -> None:
        """Apply the result of a request, except its changes; its promise is not yet fulfilled."""
        work.result, work.request = KeptResult(size=len(done.body), time=done.time), None
        self.waiting.pop(work.id, None)
        self.results += len(done.body)
        model = self.models.get(work.entry.queue)
        if model is None:
            return
        model.next = max(model.next, work.entry.seq + 1)
        if done.repeated and work.entry.seq > model.snapshot_seq:
            self.history.setdefault(model.id, {})[work.entry.seq] = (work.id, work.size)

    def change(self, change: Change) -> None:
        if isinstance(change, Removed):
            self.table(change).pop(change.id, None)
            if change.kind == "ModelEntry":
                self.history.pop(change.id, None)
            return
        self.table(change)[change.id] = change
        if isinstance(change, ModelEntry):
            old = self.history.get(change.id, {})
            self.history[change.id] = {seq: where for seq, where in old.items() if seq > change.snapshot_seq}

    def table(self, change: Change) -> dict[str, Any]:
        """Return the table of a kind of things, by id."""
        return {
            "Session": self.sessions,
            "ModelEntry": self.models,
            "SavedEntry": self.checkpoints,
            "SamplerEntry": self.samplers,
            "FolderEntry": self.folders,
        }[change.kind if isinstance(change, Removed) else type(change).__name__]

    def drop(self, work: QueuedWork) -> None:
        """Forget a request whose result is no longer kept. Its effect on the model stays in `history`."""
        del self.works[work.id]
        self.results -= work.result.size if work.result is not None else 0
        self.keys.pop(work.key, None)

    def repeats(self, entry: Accepted) -> bool:
        """Return True if a request is repeated when its model is restored."""
        return self.history.get(entry.queue, {}).get(entry.seq, ("", 0))[0] == entry.id

    def used_folders(self) -> set[str]:
        """Return the referenced folders of weights."""
        return {
            folder
            for table in (self.checkpoints, self.samplers, self.models)
            for one in table.values()
            if (folder := folder_of(one)) is not None
        }

    def row_of(self, thing: Thing) -> bytes:
        """Return the content of an entry's row."""
        if isinstance(thing, ModelEntry):
            return encoded(replace(thing, repeated=sorted(self.history.get(thing.id, {}))))
        return encoded(thing)


def folder_of(thing: Thing | None) -> str | None:
    """Return the folder of weights that a thing refers to."""
    if isinstance(thing, SavedEntry | SamplerEntry):
        return thing.folder
    return thing.snapshot if isinstance(thing, ModelEntry) else None


KINDS = {"weights": "training", "sampler_weights": "sampler"}


def capabilities(found: Capabilities) -> dict[str, Any]:
    """Return the capabilities under every name of the model."""
    one = {"max_context_length": found.context, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name} | one for name in found.names]}


def info(model: ModelEntry, found: Capabilities) -> dict[str, Any]:
    data = {"arch": found.architecture, "model_name": model.base, "tokenizer_id": found.tokenizer}
    return {
        "type": "get_info",
        "model_data": data,
        "model_id": model.id,
        "model_name": model.base,
        "lora_rank": None,
        "optimizer_config": {"type": "adamw"},
    } | _adapter(model.adapter)


def weights_info(checkpoint: SavedEntry) -> dict[str, Any]:
    adapter = checkpoint.adapter
    return {"base_model": checkpoint.base, "optimizer_config": {"type": "adamw"}} | _adapter(adapter)


def _adapter(adapter: AdapterSettings | None) -> dict[str, Any]:
    if adapter is None:
        return {"is_lora": False}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        "train_attn": adapter.attn,
        "train_mlp": adapter.mlp,
        "train_unembed": adapter.unembed,
    }


def checkpoint(one: SavedEntry) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": KINDS[one.kind],
        "time": _time(one.created),
        "tinker_path": one.path,
        "size_bytes": one.size,
        "public": one.public,
        "user_metadata": one.metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def training_run(model: ModelEntry, state: State) -> dict[str, Any]:
    """Return a model with its newest checkpoints. Its creation or last save counts as its last request."""
    own = sorted((one for one in state.checkpoints.values() if one.model == model.id), key=lambda one: one.created)
    newest = {one.kind: checkpoint(one) for one in own}
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.owner,
        "is_lora": model.adapter is not None,
        "lora_rank": model.adapter.rank if model.adapter else None,
        "corrupted": model.damaged is not None,
        "last_request_time": _time(max([model.created, *(one.created for one in own)])),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.metadata,
    }


def page(key: str, found: list[dict[str, Any]], offset: int, limit: int) -> dict[str, Any]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {key: found[offset : offset + limit], "cursor": cursor}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
