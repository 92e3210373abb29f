"""A training server without its HTTP: connected clients, accepted requests, and results."""

import asyncio
import hashlib
import logging
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from xtrain.records.status import ServerStatus
from xtrain.server.access import ServerLimits
from xtrain.server.computing_kinds import ForwardBackwardKind, OptimStepKind, SampleKind
from xtrain.server.database import StoreFailed
from xtrain.server.engine_interface import Capabilities, Engine
from xtrain.server.execution import Execution, ServerMonitor, StatusWriter, keep_house
from xtrain.server.json_wire import CreateSamplingSession, CreateSession, Refusal, plain_text
from xtrain.server.kinds import CreateModelKind, Kind, LoadWeightsKind, SaveForSamplerKind, SaveWeightsKind, sampler_id
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.state import Accepted, Done, ModelEntry, QueuedWork, SamplerEntry, SavedEntry, Session
from xtrain.server.store import Store, fulfils

LOG = logging.getLogger(__name__)

KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        CreateModelKind(),
        LoadWeightsKind(),
        ForwardBackwardKind(),
        OptimStepKind(),
        SaveWeightsKind(),
        SaveForSamplerKind(),
        SampleKind(),
    )
}
LATER: Final = 2.0  # seconds until a client may retry

T = TypeVar("T", Session, ModelEntry, SavedEntry, SamplerEntry)


class TrainingServer:
    """Takes client requests in any thread; one thread of its own executes them.

    folder: of the store. ended: called once when the server ends, with the reason of a failure; None: it was stopped.
    clock: seconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.time,
        ended: Callable[[str | None], None] = lambda reason: None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.failure: str | None = None
        self.draining = False
        self._clock, self._ended, self._engine = clock, ended, engine
        self._pollers: set[Future[None]] = set()
        self._released = self._stopped = False
        self._started = clock()
        self.monitor = ServerMonitor(folder, clock, self._started)
        self.store = Store(folder, clock, self._over, self.monitor.finished)
        sessions = self.store.state.sessions.items()
        self._beats = {id: max(one.created, one.heard) for id, one in sessions if not one.ended}
        try:
            self._execution = Execution(
                self.store, engine, self.limits, KINDS, self.silence, self._keep_house, self._over
            )
            self._status = StatusWriter(self.monitor, self._look)
        except BaseException:
            self.store.close()
            raise
        self._execution.begin()
        self._status.begin()

    def _look(self) -> ServerStatus:
        """Return the server's present status."""
        restoring = "restoring" if self._execution.restoring else "serving"
        ending = "stopped" if self._stopped else "draining" if self.draining else restoring
        with self.store.changed:
            clients = sum(map(self.live, list(self._beats)))
            memory, state = self._execution.memory, "failed" if self.failure is not None else ending
            return self.monitor.status(memory, state, self.failure or "", clients)

    @property
    def capabilities(self) -> Capabilities:
        return self._execution.memory.capabilities

    def _keep_house(self, memory: ModelsInMemory) -> None:
        self._keep_beats(self.limits.quiet / 2)
        keep_house(memory, KINDS, self._started)

    def _keep_beats(self, seconds: float) -> None:
        """Store the times of clients' last requests, so that a restarted server knows which clients are connected.
        seconds: maximum age of a stored time."""
        with self.store.changed:
            sessions = self.store.state.sessions
            heard = {id: at for id, at in list(self._beats.items()) if id in sessions}
            late = [replace(sessions[id], heard=at) for id, at in heard.items() if at - sessions[id].heard > seconds]
            if late:
                self.store.change(*late)

    def _over(self, reason: str | None) -> None:
        if reason is not None and self.failure is None:
            self.failure = reason
            LOG.error("%s", reason)
        self._ended(reason)

    # ending

    def drain(self) -> None:
        """Refuse new requests. Accepted ones continue, and results can be fetched."""
        self.draining = True

    def release(self) -> None:
        """Answer waiting clients at once; they ask again."""
        self._released = True
        for woken in list(self._pollers):
            _wake(woken)

    def stop(self) -> None:
        """Stop: work in progress is finished; waiting work is done after the next start."""
        self.drain()
        self.release()
        self._execution.stop()
        with suppress(StoreFailed):
            self._keep_beats(0.0)
        self._stopped = True
        self._status.close()
        self._engine.close()
        with suppress(StoreFailed):
            self.store.remove_unused(lambda folder: None)
        self.store.close()

    # sessions

    def silence(self, session: str) -> float:
        """Return the seconds since the last request of the session's client."""
        return self._clock() - self._beats.get(session, 0.0)

    def live(self, session: str) -> bool:
        """Return True if the session's client is probably connected."""
        return self.silence(session) < self.limits.idle

    def open_session(self, owner: str, request: CreateSession) -> "tuple[Session, Future[None]]":
        if sum(map(self.live, list(self._beats))) >= self.limits.sessions:
            raise Refusal(429, f"{self.limits.sessions} sessions are connected already", LATER)
        now = self._clock()
        session = Session(
            id=uuid.uuid4().hex,
            owner=owner,
            created=now,
            heard=now,
            sdk=request.sdk_version,
            name=request.display_name,
            metadata=plain_text(request.user_metadata),
            project=request.project_id,
        )
        self._beats[session.id] = now
        return session, self.change(session)

    def beat(self, owner: str, session: str) -> None:
        found = self.owned(self.store.state.sessions, session, owner, "session")
        if found.ended:
            raise Refusal(410, "this session has ended")
        self._beats[session] = self._clock()

    def end_session(self, owner: str, session: str) -> "Future[None]":
        found = self.owned(self.store.state.sessions, session, owner, "session")
        self._beats.pop(session, None)
        return self.change(replace(found, ended=True))

    def open_sampler(self, owner: str, request: CreateSamplingSession) -> "tuple[str, Future[None]]":
        """Open a sampling session of a checkpoint or of the base model. A repeated call returns the same session."""
        self.beat(owner, request.session_id)
        with self.store.changed:  # an existing checkpoint is not removed before the session refers to it
            return self._open_sampler(owner, request)

    def _open_sampler(self, owner: str, request: CreateSamplingSession) -> "tuple[str, Future[None]]":
        state, path = self.store.state, request.model_path
        id = sampler_id(request.session_id, request.sampling_session_seq_id)
        known = state.samplers.get(id)
        if known is not None and known.path != path:
            raise Refusal(400, f"sampling_session_seq_id {request.sampling_session_seq_id} is used already")
        checkpoint = None if path is None else self.checkpoint(owner, path)
        if checkpoint is not None and checkpoint.kind != "sampler_weights":
            raise Refusal(
                400, (f"{checkpoint.path} is not for sampling: save_weights_for_sampler saves such checkpoints")
            )
        base = checkpoint.base if checkpoint is not None else request.base_model or ""
        if base not in self.capabilities.names:
            raise Refusal(400, f"base_model {base[:200]!r} is not served; served: {', '.join(self.capabilities.names)}")
        folder = None if checkpoint is None else checkpoint.folder
        return id, self.change(known or SamplerEntry(id, request.session_id, owner, base, folder, path, self._clock()))

    def taken(self, owner: str, session: str, number: int, digest: str) -> "tuple[str, Future[None]] | None":
        """Return the sampling session of weights that a client has sent before; None if it has not. Raises Refusal."""
        self.beat(owner, session)
        id = sampler_id(session, number)
        known = self.store.state.samplers.get(id)
        if known is None:
            return None
        if known.digest != digest:
            raise Refusal(400, f"sampling session {number} has other weights: use another number")
        return id, self.change(known)

    def take(self, owner: str, session: str, number: int, digest: str, folder: str) -> "tuple[str, Future[None]]":
        """Open a sampling session of weights that a client has sent into a folder. Raises Refusal."""
        with self.store.changed:
            if (known := self.taken(owner, session, number, digest)) is not None:
                return known
            self.store.seal(folder)
            id, base = sampler_id(session, number), self.capabilities.names[0]
            entry = SamplerEntry(id, session, owner, base, folder, None, self._clock(), digest)
            return id, self.change(entry)

    # what exists

    def owned(self, table: Mapping[str, T], id: str, owner: str, what: str) -> T:
        """Return an entry of the table. Raises Refusal if it is missing or has another owner."""
        found = table.get(id)
        if found is None or found.owner != owner:
            raise Refusal(404, f"there is no such {what}")
        return found

    def checkpoint(self, owner: str, path: str) -> SavedEntry:
        """Return a checkpoint that an owner may read: the owner's or a public one."""
        found = self.store.state.checkpoints.get(path)
        if found is None or not (found.public or found.owner == owner):
            raise Refusal(404, f"there is no checkpoint {path[:400]}")
        return found

    def change(self, *changes: Any) -> "Future[None]":
        """Change entries; the result is fulfilled once the change is durable."""
        lasting: Future[None] = Future()
        self.store.change(*changes, then=fulfils(lasting))
        return lasting

    # requests that are executed

    def accept(self, owner: str, kind: Kind, raw: bytes, request: Any) -> tuple[QueuedWork, dict[str, Any]]:
        """Accept a request, or find the one that it repeats. Return the work and the answer, which is valid once the
        work's `lasting` is fulfilled. request: as read by `kind`. Raises Refusal and StoreFailed."""
        queue, seq = kind.address(request)
        digest = hashlib.sha256(kind.name.encode() + b"\0" + raw).digest()
        state = self.store.state
        with self.store.changed:
            if (work := state.keys.get((queue, seq))) is not None and work.entry.owner == owner:
                if work.entry.digest != digest:
                    raise Refusal(400, f"seq_id {seq} of {queue[:200]} was used for another request")
                return work, kind.promised(work, request)
            if self.draining or self.failure is not None:
                raise Refusal(503, "the server is ending; come again", LATER)
            self._beats[self._session_of(owner, kind, queue, seq)] = self._clock()
            self._admit(kind, queue, seq, len(raw))
            entry = Accepted(
                uuid.uuid4().hex, kind.name, queue, seq, digest, owner, self._clock(), secrets.randbits(32), raw
            )
            work = self.store.accept(entry, request)
            return work, kind.promised(work, request)

    def _session_of(self, owner: str, kind: Kind, queue: str, seq: int) -> str:
        """Return the session of a request. Raises Refusal if the model or sampler does not exist."""
        state = self.store.state
        if not kind.ordered:
            id = self.owned(state.samplers, queue, owner, "sampling session").session
        elif seq == 0:
            id = queue.rpartition(":train:")[0]
        elif (creation := state.keys.get((queue, 0))) is not None and creation.result is None:
            if creation.entry.owner != owner:
                raise Refusal(404, "there is no such model")
            id = queue.rpartition(":train:")[0]
        else:
            id = self.owned(state.models, queue, owner, "model").session
        if self.owned(state.sessions, id, owner, "session").ended:
            raise Refusal(410, "this session has ended")
        return id

    def _admit(self, kind: Kind, queue: str, seq: int, size: int) -> None:
        """Raise Refusal if there is no room. A request that others wait for is always accepted."""
        state, limits = self.store.state, self.limits
        waiting = list(state.waiting.values())
        if kind.ordered:
            model = state.models.get(queue)
            if model is not None and seq < max(model.next, 1):
                raise Refusal(400, f"seq_id {seq} of this model is past: next is {model.next}; its result is not kept")
            if any(work.entry.queue == queue and work.entry.seq > seq for work in waiting):
                return
            if seq == 0:
                self._admit_model(queue.rpartition(":train:")[0])
        if len(waiting) >= limits.queue or sum(work.size for work in waiting) + size > limits.queue_bytes:
            raise Refusal(429, f"{len(waiting)} requests wait already", LATER)
        if state.results > limits.results:
            raise Refusal(429, "too many results have not been fetched", LATER)
        if shutil.disk_usage(self.store.folder).free < limits.free:
            raise Refusal(429, "the disk of the server is full", LATER)

    def _admit_model(self, session: str) -> None:
        """Raise Refusal if there is no room for a new model. Adapters take turns in memory; a model trained without an
        adapter belongs to one client until it leaves."""
        memory, limits = self._execution.memory, self.limits
        if memory.capabilities.whole and memory.claims() - {session}:
            free = f"free when its session ends, or {limits.quiet:.0f} s after its last word"
            raise Refusal(429, f"another client trains the model; it is {free}", LATER)
        if sum(map(self.live, [one.session for one in self.store.state.models.values()])) >= limits.models:
            raise Refusal(429, f"connected clients have {limits.models} models already", LATER)

    async def result(self, owner: str, id: str) -> Done | None:
        """Return the result of a request; None if it is not done after `poll` seconds. It can be read from the store
        any number of times."""
        work = self.store.state.works.get(id)
        unknown = Refusal(404, "there is no such request, or its result is no longer kept")
        if work is None or work.entry.owner != owner:
            raise unknown
        woken: Future[None] = Future()
        self._pollers.add(woken)
        work.promise.add_done_callback(lambda _: _wake(woken))
        if self._released:
            _wake(woken)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(woken), self.limits.poll)
        self._pollers.discard(woken)
        if not work.promise.done():
            return None
        work.promise.result()  # raises StoreFailed if it cannot become durable
        if (found := await asyncio.to_thread(self.store.result, work)) is None:
            raise unknown
        work.fetched = work.fetched or self._clock()
        return found

    @property
    def queue_state(self) -> str:
        """Return the queue state that a client sees for an unfinished request."""
        return "paused_capacity" if self._execution.restoring else "active"


def _wake(woken: "Future[None]") -> None:
    with suppress(InvalidStateError):  # woken already, or its client disconnected
        woken.set_result(None)
