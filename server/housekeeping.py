"""What has got too old: requests whose predecessors do not come, results, checkpoints, sessions without a client."""

from collections import defaultdict
from collections.abc import Mapping

from xtrain.server.entries import Change, Done, ModelEntry, Removed, SamplerEntry
from xtrain.server.kinds import JSON, Kind, error_body
from xtrain.server.models_in_memory import ModelsInMemory
from xtrain.server.state import QueuedWork
from xtrain.server.store import Store


def keep_house(memory: ModelsInMemory, kinds: Mapping[str, Kind], started: float) -> None:
    """Remove expired things between requests, in the thread that executes them. started: start time of the server."""
    store = memory.store
    with store.changed:
        _fail_late(memory, kinds, started)
        _drop_results(memory)
        _remove_expired(memory, started)
    for id in list(memory.used):
        if id not in store.state.models:
            memory.removed(id)
        elif not memory.live(memory.model(id).session) and not _waits(store, id):
            memory.leave(id)
    memory.remove_unused()


def _waits(store: Store, queue: str) -> bool:
    return any(work.entry.queue == queue for work in store.state.waiting.values())


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
                _fail(store, works, f"{missing}, and what was sent after it is not executed", "user")


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
