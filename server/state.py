"""Everything that a server knows, as the entries of its journal leave it, and which of them are still needed."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from attrs import define, evolve, field, frozen

from .entries import (
    Accepted,
    Change,
    ChangedEntry,
    Done,
    Entry,
    ModelEntry,
    Removed,
    SamplerEntry,
    SavedEntry,
    Session,
)


def _fulfilled() -> "Future[None]":
    found: Future[None] = Future()
    found.set_result(None)
    return found


LASTS: Final = _fulfilled()


@frozen(kw_only=True)
class ResultPlace:
    """Where a result is: the position of its entry in the journal; bytes of its body; when it was made."""

    at: int
    size: int
    time: float


@frozen(kw_only=True)
class WorkDone:
    """What a request has done, for who watches: tokens that were trained on and drawn, optimizer steps, and the loss of
    a target, in nats."""

    trained: int = 0
    drawn: int = 0
    steps: int = 0
    loss: float | None = None
    loss_name: str = ""


@define(eq=False)
class QueuedWork:
    """A request that was accepted. at: position of its entry in the journal. request: what was read from its body, as
    long as it waits. size: of its body. lasting: fulfilled once the journal has it. result: None until it is done;
    promise: fulfilled once that lasts. Both are LASTS from then on: what is done takes little memory. fetched: when
    its result was given for the first time. started: it is executed now. attempts: how often an engine was lost during
    it. measured: what it has done, until it is done."""

    entry: Accepted
    at: int
    request: Any = None
    result: ResultPlace | None = None
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
    """What exists, by id; works also by their idempotency keys, and apart those that are to be done."""

    sessions: dict[str, Session] = field(factory=dict)
    models: dict[str, ModelEntry] = field(factory=dict)
    checkpoints: dict[str, SavedEntry] = field(factory=dict)
    samplers: dict[str, SamplerEntry] = field(factory=dict)
    works: dict[str, QueuedWork] = field(factory=dict)
    waiting: dict[str, QueuedWork] = field(factory=dict)
    keys: dict[tuple[str, int], QueuedWork] = field(factory=dict)
    results: int = 0  # bytes of all that are kept
    # Work of a model since its snapshot, which was done and has changed it: position and size of the entries.
    history: dict[str, dict[int, tuple[int, int]]] = field(factory=dict)

    def apply(self, entry: Entry, at: int) -> None:
        """Take an entry of the journal. at: its position."""
        if isinstance(entry, ChangedEntry):
            for change in entry.changes:
                self.change(change)
        elif isinstance(entry, Accepted):
            self.accept(QueuedWork(entry, at, size=len(entry.body)))
        elif (work := self.works.get(entry.id)) is not None:
            self.finish(work, entry, at)
            if not entry.kept:
                self.drop(work)

    def accept(self, work: QueuedWork) -> None:
        self.works[work.id] = self.keys[work.key] = self.waiting[work.id] = work

    def finish(self, work: QueuedWork, done: Done, at: int) -> None:
        """What came of a work; its promise is not fulfilled by that. at: position of the entry."""
        work.result, work.request = ResultPlace(at=at, size=len(done.body), time=done.time), None
        self.waiting.pop(work.id, None)
        self.results += len(done.body)
        for change in done.changes:
            self.change(change)
        model = self.models.get(work.entry.queue)
        if model is None:
            return
        model.next = max(model.next, work.entry.seq + 1)
        if done.repeated and work.entry.seq > model.snapshot_seq:
            self.history.setdefault(model.id, {})[work.entry.seq] = (work.at, work.size)

    def change(self, change: Change) -> None:
        if isinstance(change, Removed):
            self._table(change.kind).pop(change.id, None)
            if change.kind == "ModelEntry":
                self.history.pop(change.id, None)
            return
        self._table(type(change).__name__)[change.id] = change
        if isinstance(change, ModelEntry):
            old = self.history.get(change.id, {})
            self.history[change.id] = {seq: where for seq, where in old.items() if seq > change.snapshot_seq}

    def _table(self, kind: str) -> dict[str, Any]:
        return {
            "Session": self.sessions,
            "ModelEntry": self.models,
            "SavedEntry": self.checkpoints,
            "SamplerEntry": self.samplers,
        }[kind]

    def drop(self, work: QueuedWork) -> None:
        """Forget a work whose result is no longer kept. What its model has become stays in `history`."""
        del self.works[work.id]
        self.results -= work.result.size if work.result is not None else 0
        self.keys.pop(work.key, None)

    def moved(self, place: Callable[[int], int]) -> None:
        """The journal was rewritten. place: where an entry is that was at a position."""
        for work in self.works.values():
            work.at = place(work.at)
            if work.result is not None:
                work.result = evolve(work.result, at=place(work.result.at))
        for history in self.history.values():
            history.update({seq: (place(at), size) for seq, (at, size) in history.items()})

    def folders(self) -> set[str]:
        """Folders of weights that something refers to."""
        found = {checkpoint.folder for checkpoint in self.checkpoints.values()}
        found |= {sampler.folder for sampler in self.samplers.values() if sampler.folder}
        return found | {model.snapshot for model in self.models.values() if model.snapshot}

    def entities(self) -> ChangedEntry:
        """Everything that exists, as one entry."""
        tables = (self.sessions, self.models, self.checkpoints, self.samplers)
        return ChangedEntry([one for table in tables for one in table.values()])
