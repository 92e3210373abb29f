"""Models in an engine's memory, and their restoration from the last snapshot and later work.

A snapshot is what `Engine.save` writes right after a step, when there is no gradient.
"""

import logging
import uuid
from collections.abc import Callable, Sequence

from attrs import define, field
from msgspec.structs import replace

from xtrain.server.access import ServerLimits
from xtrain.server.engine_interface import Capabilities, Engine, Pass, UserError
from xtrain.server.json_wire import Refusal
from xtrain.server.messages import Malformed
from xtrain.server.state import Accepted, ModelEntry, QueuedWork
from xtrain.server.store import Store

LOG = logging.getLogger(__name__)


class ModelDamaged(Exception):
    """The state of a model cannot be restored. Its text is for the client."""


@define(eq=False)
class ModelsInMemory:
    """The models of an engine. Only the thread that calls the engine uses it.

    repeat: repeats work without a result. silence: seconds since the last request of a session's client. arrived:
    requests that may join the present ones. used: loaded models, in the order of last use. targets: number of targets
    with a loss in the passes of a model's present gradient.
    """

    engine: Engine
    capabilities: Capabilities
    store: Store
    limits: ServerLimits
    repeat: Callable[["ModelsInMemory", Accepted], None]
    silence: Callable[[str], float]
    arrived: Callable[[], Sequence[QueuedWork]]
    used: dict[str, None] = field(factory=dict)
    targets: dict[str, int] = field(factory=dict)

    def count(self, one: Pass) -> None:
        """Count a finished pass."""
        if not one.forward_only:
            self.targets[one.model] = self.targets.get(one.model, 0) + one.num_targets

    def model(self, id: str) -> ModelEntry:
        return self.store.state.models[id]

    def need(self, id: str, keep: Sequence[str] = ()) -> None:
        """Load a model into memory, without unloading those in `keep`. Raises ModelDamaged."""
        if (why := self.model(id).damaged) is not None:
            raise ModelDamaged(why)
        if id in self.used:
            self.used[id] = self.used.pop(id)
            return
        self.make_room(keep)
        self._restore(self.model(id))
        self.used[id] = None

    def make_room(self, keep: Sequence[str] = ()) -> None:
        """Make room for one more model. The least recently needed model is unloaded: first those of quiet clients, then
        those without a gradient, because a gradient must be recomputed when its model is loaded again."""
        while len(self.used) >= self.capabilities.models:
            others = [id for id in self.used if id not in keep]
            self.leave(min(others, key=lambda id: (not self._is_quiet(id), not self._stepped(id))))

    def live(self, session: str) -> bool:
        """Return True if the session's client is probably connected."""
        return self.silence(session) < self.limits.idle

    def claims(self) -> set[str]:
        """Return the sessions of models in memory that have a claim to their memory."""
        return {self.model(id).session for id in list(self.used) if not self._is_quiet(id)}

    def _is_quiet(self, id: str) -> bool:
        return self.silence(self.model(id).session) >= self.limits.quiet

    def leave(self, id: str) -> None:
        """Unload a model; it is restored when it is needed again."""
        if self.store.state.history.get(id) and self._stepped(id):
            self.snapshot(id)
        self.engine.remove_model(id)
        del self.used[id]

    def removed(self, id: str) -> None:
        """Free a removed model."""
        self.targets.pop(id, None)
        if id in self.used:
            self.engine.remove_model(id)
            del self.used[id]

    # snapshots

    def snapshot_if_due(self, id: str) -> None:
        """Take a snapshot after a step, if too much work would have to be repeated."""
        sizes = [size for _, size in self.store.state.history.get(id, {}).values()]
        if len(sizes) >= self.limits.snapshot_steps or sum(sizes) >= self.limits.snapshot_bytes:
            self.snapshot(id)

    def snapshot(self, id: str) -> None:
        """Save the state of a model without a gradient; restoring starts from it."""
        seq, folder = self.model(id).next - 1, new_name()
        try:
            self.engine.save(id, self.store.weights(folder))
            self.store.seal(folder)
        except UserError as error:  # more is repeated then, and nothing is lost
            LOG.warning("no snapshot of %s: %s", id, error)
            return
        self.store.change(replace(self.model(id), snapshot=folder, snapshot_seq=seq))

    def snapshot_all(self) -> None:
        """Snapshot all models without a gradient before the server stops; the next start loads these snapshots."""
        for id in list(self.used):
            if self.store.state.history.get(id) and self._stepped(id):
                self.snapshot(id)

    def _stepped(self, id: str) -> bool:
        """Return True if the last work that changed the model left no gradient."""
        history = self.store.state.history.get(id)
        return not history or self.store.done(id, max(history)).kind != "forward_backward"

    def remove_unused(self) -> None:
        """Remove folders of weights without a reference."""
        self.store.remove_unused(self.engine.forget)

    # restoring

    def _restore(self, model: ModelEntry) -> None:
        state = self.store.state
        self.targets.pop(model.id, None)
        LOG.info("restoring %s from %s and %d requests", model.id, model.snapshot, len(state.history.get(model.id, {})))
        try:
            self.engine.create_model(model.id, model.adapter)
        except UserError as error:
            raise ModelDamaged(f"there is no room for this model now: {error}") from error
        try:
            if model.snapshot is not None:
                self.engine.load(model.id, self.store.weights(model.snapshot), optimizer=True)
            for seq in sorted(state.history.get(model.id, {})):
                self.repeat(self, self.store.done(model.id, seq))
        except (UserError, Refusal, Malformed) as error:
            LOG.exception("%s cannot be restored", model.id)
            why = f"the state of this model could not be restored after a failure: {error}"
            self.store.change(replace(model, damaged=why))
            self.engine.remove_model(model.id)
            raise ModelDamaged(why) from error


def new_name() -> str:
    """Return a random name of a folder of weights; it contains nothing of a client."""
    return uuid.uuid4().hex
