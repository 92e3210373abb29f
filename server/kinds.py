"""Requests that are executed in order: their base class, and those that create, load and save models."""

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from xtrain.server.engine_interface import AdapterSettings, UserError
from xtrain.server.json_wire import (
    MOST_SEQ,
    NAME,
    CreateModel,
    LoadWeights,
    LoraConfig,
    OptimizerKind,
    Refusal,
    SaveForSampler,
    SaveWeights,
    plain_text,
    read_json,
)
from xtrain.server.models_in_memory import ModelDamaged, ModelsInMemory, new_name
from xtrain.server.state import Accepted, Change, Done, ModelEntry, QueuedWork, SamplerEntry, SavedEntry

JSON = "application/json"


class Kind(ABC):
    """A kind of request. name: its path under /api/v1 and its name in rows. media: media types of its body.

    body: of its JSON. ordered: requests of a model are executed one at a time in the order of their seq_ids. together:
    number of requests of different models executed at a time; 1: one by one.
    """

    name: ClassVar[str]
    body: ClassVar[type[Struct]]
    media: ClassVar[tuple[str, ...]] = (JSON,)
    ordered: ClassVar[bool] = True
    together: ClassVar[int] = 1

    def read(self, raw: bytes) -> Any:
        """Parse a body. Raises Refusal or Malformed."""
        return read_json(raw, self.body)

    def address(self, request: Any) -> tuple[str, int]:
        """Return the idempotency key: the model or sampler, and the seq_id; 0 creates a model. Raises Refusal."""
        return request.model_id, numbered(request.seq_id)

    @abstractmethod
    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        """Execute requests of different models, and finish each of them. Raises EngineLost."""

    def repeat(self, entry: Accepted, memory: ModelsInMemory) -> None:
        """Repeat the request's change of the model. Raises UserError and EngineLost."""
        raise NotImplementedError(f"{self.name} is never repeated")

    def promised(self, work: QueuedWork, request: Any) -> dict[str, Any]:
        """Return the fields of the POST's answer in addition to `request_id`."""
        return {"model_id": work.entry.queue}


class SingleKind(Kind):
    """A kind whose requests are executed one by one. repeated: see `Done`; also for client errors."""

    repeated: ClassVar[bool] = False

    @abstractmethod
    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        """Execute a request: return the JSON of its result, and new entries. Raises UserError, ModelDamaged and
        EngineLost."""

    def run(self, works: Sequence[QueuedWork], memory: ModelsInMemory) -> None:
        (work,) = works
        try:
            answer, changes = self.outcome(work, memory)
        except (UserError, ModelDamaged) as error:
            fail(memory, work, error, repeated=self.repeated and isinstance(error, UserError))
        else:
            body = msgspec.json.encode({"type": self.name} | answer)
            finish(memory, work, body, changes=changes, repeated=self.repeated)
            self.after(work, memory)

    def after(self, work: QueuedWork, memory: ModelsInMemory) -> None:
        """Follow up after the work is finished."""


def finish(
    memory: ModelsInMemory,
    work: QueuedWork,
    body: bytes,
    *,
    media: str = JSON,
    changes: list[Change] | None = None,
    repeated: bool = False,
) -> None:
    store = memory.store
    store.finish(work, Done(work.id, store.clock(), False, media, body, changes or [], repeated))


def fail(memory: ModelsInMemory, work: QueuedWork, error: Exception, *, repeated: bool = False) -> None:
    """Store an error as the result of a request: the client reads it once, with whether the client or the server is at
    fault."""
    category = "user" if isinstance(error, UserError) else "server"
    store = memory.store
    store.finish(work, Done(work.id, store.clock(), True, JSON, error_body(str(error), category), [], repeated))


def error_body(message: str, category: str) -> bytes:
    return msgspec.json.encode({"error": message, "category": category})


def finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics for JSON, which cannot express values that are not finite: they are left out, counted, named."""
    odd = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    found: dict[str, Any] = {"metrics": {name: float(value) for name, value in metrics.items() if name not in odd}}
    if odd:
        found["metrics"]["nonfinite"] = float(len(odd))
        found["nonfinite"] = odd
    return found


def numbered(seq_id: int) -> int:
    """Return the seq_id of a request for an existing model. Raises Refusal."""
    if seq_id < 1:
        raise Refusal(400, "seq_id is missing; the first seq_id of a model is 1")
    if seq_id > MOST_SEQ:
        raise Refusal(400, f"seq_id is above {MOST_SEQ}")
    return seq_id


def required(value: Any, name: str) -> Any:
    if value is None:
        raise Refusal(422, f"{name} is missing")
    return value


def check_name(name: str) -> str:
    """Check the name of a checkpoint, which becomes a part of its path. Raises UserError."""
    if NAME.fullmatch(name) is None:
        raise UserError(
            f"{name[:80]!r} is not a name for a checkpoint: use letters, digits, '_', '-' and '.', at most 128, "
            "and start with a letter or digit"
        )
    return name


def model_id(session: str, number: int) -> str:
    """Return the id of a model, which clients compute too."""
    return f"{session}:train:{number}"


class CreateModelKind(SingleKind):
    """Create a model with a new adapter, whose initial values follow from the seed."""

    name = "create_model"
    body = CreateModel

    def address(self, request: CreateModel) -> tuple[str, int]:
        return model_id(request.session_id, request.model_seq_id), 0

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        request: CreateModel = work.request
        _check_base(request.base_model, memory)
        _check_optimizer(request.optimizer_config)
        adapter = _adapter(request.lora_config, work.entry.seed, memory)
        model = _new_model(work, request.base_model, adapter, memory)
        _create(model, memory)
        return {"model_id": model.id}, [model]


class LoadWeightsKind(SingleKind):
    """Load a checkpoint as a new model, or into a model without any work yet. A snapshot is taken at once, so that the
    checkpoint is no longer needed."""

    name = "load_weights"
    body = LoadWeights

    def address(self, request: LoadWeights) -> tuple[str, int]:
        if request.session_id is not None:
            return model_id(request.session_id, required(request.model_seq_id, "model_seq_id")), 0
        return required(request.model_id, "model_id"), numbered(required(request.seq_id, "seq_id"))

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        request: LoadWeights = work.request
        if request.weights_access_token is not None:
            raise UserError("weights_access_token is not offered here; its owner can publish a checkpoint")
        checkpoint = _checkpoint_to_load(request, work.entry.owner, memory)
        _check_optimizer(request.optimizer_config or OptimizerKind())
        if request.session_id is not None:
            base = request.base_model or checkpoint.base
            _check_base(base, memory)
            model = _new_model(work, base, checkpoint.adapter, memory)
            _create(model, memory)
        else:
            model = copy(memory.model(work.entry.queue))
            if work.entry.seq != 1:
                raise UserError("weights are loaded into a new model only, as its first request")
            if _shape(model.adapter) != _shape(checkpoint.adapter):
                raise UserError(f"{checkpoint.path} has another adapter than {model.id}")
            memory.need(model.id)
        try:
            memory.engine.load(model.id, memory.store.weights(checkpoint.folder), optimizer=request.optimizer)
            model.snapshot, model.snapshot_seq = new_name(), work.entry.seq
            memory.engine.save(model.id, memory.store.weights(model.snapshot))
            memory.store.seal(model.snapshot)
        except UserError:
            if work.entry.seq == 0:
                memory.removed(model.id)
            raise
        return {"path": checkpoint.path, "model_id": model.id}, [model]


def _checkpoint_to_load(request: LoadWeights, owner: str, memory: ModelsInMemory) -> SavedEntry:
    found = memory.store.state.checkpoints.get(request.path)
    if found is None or not (found.public or found.owner == owner):
        raise UserError(f"there is no checkpoint {request.path[:400]}")
    if found.kind != "weights":
        raise UserError(f"{request.path} is for sampling only; save_state saves the state that training needs")
    return found


def _check_base(name: str, memory: ModelsInMemory) -> None:
    if name not in memory.capabilities.names:
        raise UserError(f"base_model {name[:200]!r} is not served; served: {', '.join(memory.capabilities.names)}")


def _check_optimizer(config: OptimizerKind) -> None:
    if config.type != "adamw":
        raise UserError(f"optimizer_config.type {config.type[:80]!r} is not offered; offered: adamw")


def _adapter(config: LoraConfig | None, drawn: int, memory: ModelsInMemory) -> AdapterSettings | None:
    most = memory.capabilities.rank
    if memory.capabilities.whole:
        if config is not None:
            raise UserError("this server trains the whole model: leave out lora_config")
        return None
    if config is None:
        raise UserError(f"lora_config is missing: this server trains adapters of rank 1..{most}")
    if not 1 <= config.rank <= most:
        raise UserError(f"lora_config.rank {config.rank} is outside 1..{most}")
    # Clients request all kinds by default; `get_info` reports the kinds of the model.
    asked = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    offered = memory.capabilities.matrices
    chosen = {kind: wanted and kind in offered for kind, wanted in asked.items()}
    if not any(chosen.values()):
        have = ", ".join(f"train_{kind}" for kind in asked if kind in offered)
        raise UserError(f"lora_config leaves nothing to train; available here: {have}")
    return AdapterSettings(rank=config.rank, seed=drawn if config.seed is None else config.seed, **chosen)


def _shape(adapter: AdapterSettings | None) -> object:
    return None if adapter is None else (adapter.rank, adapter.attn, adapter.mlp, adapter.unembed)


def _new_model(work: QueuedWork, base: str, adapter: AdapterSettings | None, memory: ModelsInMemory) -> ModelEntry:
    request: CreateModel | LoadWeights = work.request
    entry = work.entry
    if memory.capabilities.whole and memory.claims():
        raise UserError("this server trains one model at a time, and one is trained; end its session first")
    metadata = plain_text(request.user_metadata)
    return ModelEntry(entry.queue, request.session_id or "", entry.owner, base, adapter, entry.time, metadata)


def _create(model: ModelEntry, memory: ModelsInMemory) -> None:
    memory.make_room()
    memory.engine.create_model(model.id, model.adapter)
    memory.used[model.id] = None


class SaveWeightsKind(SingleKind):
    """Save the training state by name: weights, moments and step, without an accumulated gradient."""

    name = "save_weights"
    body = SaveWeights

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        path = _free_path(work, "weights", memory)
        memory.need(work.entry.queue)
        folder = new_name()
        memory.engine.save(work.entry.queue, memory.store.weights(folder))
        memory.store.seal(folder)
        return {"path": path}, [_saved_checkpoint(work, path, "weights", folder, memory)]


class SaveForSamplerKind(SingleKind):
    """Save weights for sampling; without a name for one sampling session."""

    name = "save_weights_for_sampler"
    body = SaveForSampler

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        request: SaveForSampler = work.request
        if request.kind != "snapshot":
            raise UserError(f"kind {request.kind[:80]!r} is not offered here; offered: snapshot")
        if request.path is not None:
            path = _free_path(work, "sampler_weights", memory)
            folder = self._export(work, memory)
            return {"path": path}, [_saved_checkpoint(work, path, "sampler_weights", folder, memory)]
        model = memory.model(work.entry.queue)
        number = request.sampling_session_seq_id
        id = f"{model.id}:sample:{work.entry.seq}" if number is None else sampler_id(model.session, number)
        if id in memory.store.state.samplers:
            raise UserError(f"sampling_session_seq_id {number} is used already")
        folder = self._export(work, memory)
        sampler = SamplerEntry(id, model.session, model.owner, model.base, folder, None, memory.store.clock())
        return {"sampling_session_id": id}, [sampler]

    def _export(self, work: QueuedWork, memory: ModelsInMemory) -> str:
        _check_disk(memory)
        memory.need(work.entry.queue)
        folder = new_name()
        memory.engine.export(work.entry.queue, memory.store.weights(folder))
        memory.store.seal(folder)
        return folder


def sampler_id(session: str, number: int) -> str:
    """Return the id of a numbered sampling session."""
    return f"{session}:sample:{number}"


def _free_path(work: QueuedWork, kind: Literal["weights", "sampler_weights"], memory: ModelsInMemory) -> str:
    """Return the path of a checkpoint that may be written. Raises UserError."""
    request: SaveWeights = work.request
    name = check_name(f"auto-{work.entry.seq}" if request.path is None else request.path)
    path = f"tinker://{work.entry.queue}/{kind}/{name}"
    checkpoints = memory.store.state.checkpoints
    if path in checkpoints and not request.overwrite:
        raise UserError(f"{path} exists already; overwrite = True replaces it")
    _check_disk(memory)
    if sum(one.owner == work.entry.owner for one in checkpoints.values()) >= memory.limits.checkpoints:
        raise UserError(f"there are {memory.limits.checkpoints} checkpoints already; delete some")
    return path


def _check_disk(memory: ModelsInMemory) -> None:
    if shutil.disk_usage(memory.store.folder).free < memory.limits.free:
        raise UserError("the disk of the server is full; delete checkpoints")


def _saved_checkpoint(
    work: QueuedWork, path: str, kind: Literal["weights", "sampler_weights"], folder: str, memory: ModelsInMemory
) -> SavedEntry:
    request: SaveWeights = work.request
    model, now = memory.model(work.entry.queue), memory.store.clock()
    return SavedEntry(
        path=path,
        folder=folder,
        model=model.id,
        owner=model.owner,
        kind=kind,
        created=now,
        base=model.base,
        adapter=model.adapter,
        size=memory.store.state.folders[folder].size,
        metadata=plain_text(request.user_metadata),
        expires=None if request.ttl_seconds is None else now + request.ttl_seconds,
    )
