"""Threads of a server: execution of requests in order, expiry of what is too old, and `server/status.json`.

One thread alone calls the engine.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from attrs import define, field

from xtrain.records.status import SERVER_FILE, ServedModel, ServerStatus
from xtrain.server.access import ServerLimits
from xtrain.server.database import StoreFailed
from xtrain.server.engine_interface import Engine, EngineLost, UserError
from xtrain.server.json_wire import Refusal
from xtrain.server.kinds import JSON, Kind, error_body, fail
from xtrain.server.messages import Malformed
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.state import Accepted, Change, Done, ModelEntry, QueuedWork, Removed, SamplerEntry
from xtrain.server.store import Store


def keep_house(memory: ModelsInMemory, kinds: Mapping[str, Kind], started: float) -> None:
    """Remove expired things between requests, in the thread that executes them. started: start time of the server."""
    store = memory.store
    with store.changed:
        _fail_late(memory, kinds, started)
        _drop_results(memory)
        _remove_expired(memory, started)
        waiting = {work.entry.queue for work in store.state.waiting.values()}
    for id in list(memory.used):
        if id not in store.state.models:
            memory.removed(id)
        elif not memory.live(memory.model(id).session) and id not in waiting:
            memory.leave(id)
    memory.remove_unused()


def _fail_late(memory: ModelsInMemory, kinds: Mapping[str, Kind], started: float) -> None:
    """Fail requests whose predecessors are missing, and requests that waited too long for their turn."""
    store, now = memory.store, memory.store.clock()
    queues: defaultdict[str, list[QueuedWork]] = defaultdict(list)
    for work in store.state.waiting.values():
        queues[work.entry.queue].append(work)
    for queue, works in queues.items():
        if not kinds[works[0].entry.kind].ordered:
            late = [work for work in works if now - max(work.entry.time, started) > memory.limits.sample_wait]
            _fail(store, [work for work in late if not work.started], "no sample was drawn in time")
            continue
        works.sort(key=lambda work: work.entry.seq)
        model, first = store.state.models.get(queue), works[0]
        if model is None and first.entry.seq > 0:
            _fail(store, works, "its model was not created", "user")
        elif model is not None and first.entry.seq > model.next:
            # Waiting requests may have come before the missing one was sent: measure from the latest.
            last = max(max(work.entry.time, started) for work in works)
            if now - last > memory.limits.gap:
                missing = f"request {model.next} of this model did not come within {memory.limits.gap:.0f} s"
                _fail(store, works, f"{missing}; later requests are not executed", "user")


def _fail(store: Store, works: list[QueuedWork], why: str, category: str = "server") -> None:
    for work in works:
        store.finish(work, Done(work.id, store.clock(), True, JSON, error_body(why, category)))


def _drop_results(memory: ModelsInMemory) -> None:
    """Drop expired results; if there are too many, drop fetched results, the oldest first."""
    state, now, limits = memory.store.state, memory.store.clock(), memory.limits
    fetched = sorted(
        (work for work in state.works.values() if work.fetched is not None), key=lambda work: work.fetched or 0.0
    )
    gone = [
        work
        for work in state.works.values()
        if work.fetched is None and work.result is not None and now - work.result.time > limits.unfetched
    ]
    size = state.results - sum(work.result.size for work in gone if work.result is not None)
    for place, work in enumerate(fetched):
        many = len(fetched) - place > limits.answered or size > limits.results
        if work.result is not None and (many or now - (work.fetched or 0.0) > limits.fetched):
            gone.append(work)
            size -= work.result.size
    memory.store.drop(gone)


def _remove_expired(memory: ModelsInMemory, started: float) -> None:
    state, now = memory.store.state, memory.store.clock()
    gone: list[Change] = [
        Removed("SavedEntry", one.id)
        for one in state.checkpoints.values()
        if one.expires is not None and one.expires < now
    ]
    unnamed: defaultdict[str, list[SamplerEntry]] = defaultdict(list)
    for sampler in state.samplers.values():
        session = state.sessions.get(sampler.session)
        if session is None or session.ended:
            gone.append(Removed("SamplerEntry", sampler.id))
        elif sampler.path is None and sampler.folder is not None:
            unnamed[sampler.session].append(sampler)
    for samplers in unnamed.values():
        samplers.sort(key=lambda one: one.created)
        used = {work.entry.queue for work in state.waiting.values()}
        old = samplers[: max(0, len(samplers) - memory.limits.samplers)]
        gone += [Removed("SamplerEntry", one.id) for one in old if one.id not in used]
    if now - started > memory.limits.idle:  # clients had time to reconnect after the server was away
        gone += _forgotten(memory, now)
    if gone:
        memory.store.change(*gone)


def _forgotten(memory: ModelsInMemory, now: float) -> list[Change]:
    """Return the removals of unused sessions and their models; those with checkpoints stay."""
    state, gone = memory.store.state, list[Change]()
    named = {checkpoint.model for checkpoint in state.checkpoints.values()}
    models: defaultdict[str, list[ModelEntry]] = defaultdict(list)
    for model in state.models.values():
        models[model.session].append(model)
    for session in state.sessions.values():
        old = now - max(session.created, session.heard) > memory.limits.forgotten and not memory.live(session.id)
        if old and not any(model.id in named for model in models[session.id]):
            gone += [Removed("ModelEntry", model.id) for model in models[session.id]]
            gone.append(Removed("Session", session.id))
    return gone


LOG = logging.getLogger(__name__)

EVERY: Final = 1.0  # seconds between two writes
WINDOW: Final = 10.0  # time window of rates, in seconds
NEWEST: Final = 1000  # number of latencies kept
MOST_MODELS: Final = 1000  # newest bytes of the file


@define
class _Counted:
    """Counts of one model since the server started."""

    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    loss_name: str = ""
    last: float | None = None


@define(eq=False)
class ServerMonitor:
    """Counts and status of a server. folder: of the server, which holds the status file. clock: seconds since 1970. All
    calls but `write` are made under the lock of the store."""

    folder: Path
    clock: Callable[[], float]
    began: float
    url: str = ""
    requests: int = 0
    errors: int = 0
    kinds: Counter[str] = field(factory=Counter)
    _models: dict[str, _Counted] = field(factory=dict)
    _latencies: deque[float] = field(factory=lambda: deque(maxlen=NEWEST))
    _newest: deque[tuple[float, int, int]] = field(factory=deque)  # time; trained tokens; drawn tokens

    def finished(self, work: QueuedWork, done: Done) -> None:
        """Count a finished or failed request."""
        now, found = self.clock(), work.measured
        self.requests += 1
        self.errors += done.failed
        self.kinds[work.entry.kind] += 1
        self._latencies.append(max(0.0, now - work.entry.time))
        self._newest.append((now, found.trained if found else 0, found.drawn if found else 0))
        model = self._models.setdefault(work.entry.queue, _Counted())
        model.last = now
        if found is not None:
            model.tokens += found.trained
            model.steps += found.steps
            if found.loss is not None:
                model.loss, model.loss_name = found.loss, found.loss_name

    def status(self, memory: ModelsInMemory, state: str, reason: str, clients: int) -> ServerStatus:
        """Return the server's present status."""
        now, known = self.clock(), memory.store.state
        while self._newest and self._newest[0][0] < now - WINDOW:
            self._newest.popleft()
        seconds = max(1.0, min(WINDOW, now - self.began))
        ordered = sorted(self._latencies)
        waiting: dict[str, list[QueuedWork]] = {}
        for work in known.waiting.values():
            waiting.setdefault(work.entry.queue, []).append(work)
        for gone in [id for id in self._models if id not in known.models and id not in waiting]:
            del self._models[gone]
        newest = sorted(known.models.values(), key=lambda one: one.created)[-MOST_MODELS:]
        return ServerStatus(
            time=now,
            state=state,
            reason=reason,
            began=self.began,
            url=self.url,
            clients=clients,
            slots=memory.capabilities.models,
            requests=self.requests,
            errors=self.errors,
            waiting=len(known.waiting),
            queue=memory.limits.queue,
            requests_per_second=len(self._newest) / seconds,
            trained_per_second=sum(trained for _, trained, _ in self._newest) / seconds,
            sampled_per_second=sum(drawn for _, _, drawn in self._newest) / seconds,
            latency={f"p{share}": _percentile(ordered, share) for share in (50, 95, 99)} if ordered else {},
            kinds=dict(self.kinds),
            models=[self._model(one, memory, waiting.get(one.id, ()), now) for one in newest],
        )

    def _model(self, model: ModelEntry, memory: ModelsInMemory, works: Iterable[QueuedWork], now: float) -> ServedModel:
        counted = self._models.get(model.id, _Counted())
        session = memory.store.state.sessions.get(model.session)
        queue = sorted(works, key=lambda work: work.entry.seq)
        return ServedModel(
            id=model.id,
            client=(session.name or "") if session else "",
            connected=memory.live(model.session),
            in_memory=model.id in memory.used,
            damaged=model.damaged or "",
            rank=model.adapter.rank if model.adapter else None,
            next_seq=model.next,
            steps=counted.steps,
            tokens=counted.tokens,
            loss=counted.loss,
            loss_name=counted.loss_name,
            waiting=len(queue),
            waits_for=_waits_for(model, queue[0]) if queue else "",
            waited_seconds=max(0.0, now - queue[0].entry.time) if queue else 0.0,
            last_time=counted.last,
        )

    def write(self, status: ServerStatus) -> None:
        """Replace the file. A full disk does not stop the server."""
        path = self.folder / Path(SERVER_FILE).name
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(status))
            partial.replace(path)
        except OSError as error:
            LOG.warning("%s cannot be written: %s", path, error.strerror)


@define(eq=False)
class StatusWriter:
    """A thread that writes the status of `look` until it is closed."""

    monitor: ServerMonitor
    look: Callable[[], ServerStatus]
    _over: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write once more, and stop."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.monitor.write(self.look())

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self.monitor.write(self.look())


def _waits_for(model: ModelEntry, first: QueuedWork) -> str:
    if first.started:
        return f"{first.entry.kind} is executed"
    if first.entry.seq > model.next:
        return f"request {model.next}, which has not arrived"
    return f"its turn: {first.entry.kind}"


def _percentile(ordered: list[float], share: int) -> float:
    """Return the smallest value that at least this percentage of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


ATTEMPTS: Final = 3  # for a request during which the engine was lost
LOSSES: Final = 6  # engine losses without finished work in between, before the server stops
PAUSE: Final = 5.0  # seconds between two checks for expired things


class Execution:
    """Executes accepted requests in rounds: in each round every model's next request is executed, and samples are
    drawn.

    idle: called between rounds, at least every `PAUSE` seconds. ended: called when the thread ends, with the reason
    after a failure.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        limits: ServerLimits,
        kinds: Mapping[str, Kind],
        silence: Callable[[str], float],
        idle: Callable[[ModelsInMemory], None],
        ended: Callable[[str | None], None],
    ) -> None:
        self._store, self._engine, self._kinds = store, engine, kinds
        self._idle, self._ended = idle, ended
        self._stopping = False
        self._losses, self._last_idle = 0, 0.0
        self.restoring = False
        self.memory = ModelsInMemory(engine, engine.start(), store, limits, self._repeat, silence, self._arrived)
        for work in list(store.state.waiting.values()):  # from before a restart
            self._read(work)
        self._thread = threading.Thread(target=self._run, name="execution", daemon=True)

    def _read(self, work: QueuedWork) -> None:
        """Read the body of an accepted request. A request that is no longer supported, for example by a later version,
        ends with an error."""
        try:
            work.request = self._kind(work.entry).read(work.entry.body)
        except (Refusal, Malformed) as error:
            fail(self.memory, work, UserError(f"this request is no longer supported: {error}"))
        work.entry.body = b""

    def begin(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the work in progress and wait for it; waiting work is done after the next start."""
        with self._store.changed:
            self._stopping = True
            self._store.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # the thread

    def _run(self) -> None:
        reason: str | None = None
        try:
            while not self._stopping:
                with self._store.changed:
                    self._store.changed.wait_for(lambda: self._stopping or self._due() or self._runnable(), PAUSE)
                self._round()
                if self._due():
                    self._last_idle = time.monotonic()
                    self._guarded(lambda: self._idle(self.memory))
            self._guarded(self.memory.snapshot_all)
            self._store.settle()
        except Exception as error:
            LOG.exception("the server ends")
            reason = f"{type(error).__name__}: {error}"
        self._ended(reason)

    def _due(self) -> bool:
        return time.monotonic() - self._last_idle >= PAUSE

    def _round(self) -> None:
        with self._store.changed:
            works = [] if self._stopping else self._runnable()
        for kind in self._kinds.values():
            own = [work for work in works if work.entry.kind == kind.name]
            again = [[work] for work in own if work.attempts]  # a request during which an engine was lost runs alone
            first = [work for work in own if not work.attempts]
            groups = [first[at : at + kind.together] for at in range(0, len(first), kind.together)]
            for group in again + groups:
                if self._stopping:
                    return
                self._execute(kind, group)

    def _execute(self, kind: Kind, group: Sequence[QueuedWork]) -> None:
        for work in group:
            work.started = True
        self._guarded(lambda: kind.run(group, self.memory))

    def _runnable(self) -> list[QueuedWork]:
        """Return requests that are next for their model, and all unordered ones."""
        state, found = self._store.state, []
        for work in state.waiting.values():
            model = state.models.get(work.entry.queue)
            if not self._kinds[work.entry.kind].ordered or work.entry.seq == (0 if model is None else model.next):
                found.append(work)
        return found

    def _arrived(self) -> Sequence[QueuedWork]:
        """Return unordered requests that arrived since the round began; none if a model's request waits or housekeeping
        is due."""
        with self._store.changed:
            works = [work for work in self._runnable() if not work.started]
            if self._stopping or self._due() or any(self._kinds[work.entry.kind].ordered for work in works):
                return ()
            for work in works:
                work.started = True
            return works

    def _repeat(self, memory: ModelsInMemory, entry: Accepted) -> None:
        self._kind(entry).repeat(entry, memory)

    def _kind(self, entry: Accepted) -> Kind:
        """Return the kind of a request. Raises Refusal if this version does not have it."""
        if entry.kind not in self._kinds:
            raise Refusal(400, f"{entry.kind[:80]!r} is not a kind of request")
        return self._kinds[entry.kind]

    # a lost engine

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call the engine; if it is lost, restart it and restore models as they are needed."""
        try:
            call()
            self._losses = 0
        except StoreFailed:
            raise
        except Exception as error:  # EngineLost or an engine bug: the engine's state is unreliable
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        LOG.error("the engine is lost", exc_info=error)
        with self._store.changed:
            works = [work for work in self._store.state.waiting.values() if work.started]
        if isinstance(error, EngineLost) or not works:  # a bug in a request kind does not stop the server
            self._losses += 1
        if self._losses >= LOSSES:
            raise error
        self._blame(works, error)
        self.restoring = True
        self.memory.used.clear()
        try:
            self._engine.start()
        except EngineLost as again:  # a rank ended during the start
            self._lost(again)
        self.restoring = False

    def _blame(self, works: Iterable[QueuedWork], error: Exception) -> None:
        for work in works:
            work.started = False
            work.attempts += 1
            if work.attempts == ATTEMPTS:
                what = f"the engine was lost {ATTEMPTS} times at this request ({type(error).__name__})"
                body = error_body(f"{what}; it has changed nothing", "server")
                self._store.finish(work, Done(work.id, self._store.clock(), True, JSON, body))
