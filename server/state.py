"""Everything that a server knows, and which requests are still needed."""

from concurrent.futures import Future
from typing import Any, Final

from attrs import define, field, frozen
from msgspec.structs import replace

from xtrain.server.entries import (
    Accepted,
    Change,
    Done,
    FolderEntry,
    ModelEntry,
    Removed,
    SamplerEntry,
    SavedEntry,
    Session,
    Thing,
    encoded,
)


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
