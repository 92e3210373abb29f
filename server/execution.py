"""The one thread that calls the engine: works in their order, model by model, and what follows from a lost engine."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from xtrain.server.database import StoreFailed
from xtrain.server.engine import Engine, EngineLost, UserError
from xtrain.server.entries import Accepted, Done
from xtrain.server.kinds import JSON, Kind, error_body, fail
from xtrain.server.limits import ServerLimits
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.protobuf import Malformed
from xtrain.server.refusal import Refusal
from xtrain.server.state import QueuedWork
from xtrain.server.store import Store

LOG = logging.getLogger(__name__)

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
            fail(self.memory, work, UserError(f"this request is no longer taken: {error}"))
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
            raise Refusal(400, f"{entry.kind[:80]!r} is no kind of request")
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
