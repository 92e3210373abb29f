"""What a server is doing, for who watches it: counted as requests are done, and written about once a second."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from attrs import define, field

from xtrain.records.server_status import SERVER_FILE, ServedModel, ServerStatus
from xtrain.server.entries import Done, ModelEntry
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.state import QueuedWork

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
        return f"request {model.next}, which has not come"
    return f"its turn: {first.entry.kind}"


def _percentile(ordered: list[float], share: int) -> float:
    """Return the smallest value that at least this percentage of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]
