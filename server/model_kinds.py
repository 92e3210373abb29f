"""`create_model` and `load_weights`: how a model comes to be."""

from copy import copy
from typing import Any

from xtrain.server.engine import UserError
from xtrain.server.entries import AdapterEntry, Change, ModelEntry, SavedEntry
from xtrain.server.kinds import SingleKind, numbered, required
from xtrain.server.models_in_memory import ModelsInMemory, new_name
from xtrain.server.requests import CreateModel, LoadWeights, LoraConfig, OptimizerKind, plain_text, read_json
from xtrain.server.state import QueuedWork


def model_id(session: str, number: int) -> str:
    """Return the id of a model, which clients compute too."""
    return f"{session}:train:{number}"


class CreateModelKind(SingleKind):
    """Create a model with a new adapter, whose initial values follow from the seed."""

    name = "create_model"

    def read(self, raw: bytes) -> CreateModel:
        return read_json(raw, CreateModel)

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

    def read(self, raw: bytes) -> LoadWeights:
        return read_json(raw, LoadWeights)

    def address(self, request: LoadWeights) -> tuple[str, int]:
        if request.session_id is not None:
            return model_id(request.session_id, required(request.model_seq_id, "model_seq_id")), 0
        return required(request.model_id, "model_id"), numbered(required(request.seq_id, "seq_id"))

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        request: LoadWeights = work.request
        if request.weights_access_token is not None:
            raise UserError("weights_access_token is not offered here; its owner can publish a checkpoint")
        checkpoint = _checkpoint(request, work.entry.owner, memory)
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


def _checkpoint(request: LoadWeights, owner: str, memory: ModelsInMemory) -> SavedEntry:
    found = memory.store.state.checkpoints.get(request.path)
    if found is None or not (found.public or found.owner == owner):
        raise UserError(f"there is no checkpoint {request.path[:400]}")
    if found.kind != "weights":
        raise UserError(f"{request.path} can be sampled from alone; save_state saves what training goes on from")
    return found


def _check_base(name: str, memory: ModelsInMemory) -> None:
    if name not in memory.capabilities.names:
        raise UserError(f"base_model {name[:200]!r} is not served; served: {', '.join(memory.capabilities.names)}")


def _check_optimizer(config: OptimizerKind) -> None:
    if config.type != "adamw":
        raise UserError(f"optimizer_config.type {config.type[:80]!r} is not offered; offered: adamw")


def _adapter(config: LoraConfig | None, drawn: int, memory: ModelsInMemory) -> AdapterEntry | None:
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
        raise UserError(f"lora_config leaves nothing to train; what may be trained here: {have}")
    return AdapterEntry(rank=config.rank, seed=drawn if config.seed is None else config.seed, **chosen)


def _shape(adapter: AdapterEntry | None) -> object:
    return None if adapter is None else (adapter.rank, adapter.attn, adapter.mlp, adapter.unembed)


def _new_model(work: QueuedWork, base: str, adapter: AdapterEntry | None, memory: ModelsInMemory) -> ModelEntry:
    request: CreateModel | LoadWeights = work.request
    entry = work.entry
    if memory.capabilities.whole and memory.claims():
        raise UserError("this server trains one model at a time, and one is trained; end its session first")
    metadata = plain_text(request.user_metadata)
    return ModelEntry(entry.queue, request.session_id or "", entry.owner, base, adapter, entry.time, metadata)


def _create(model: ModelEntry, memory: ModelsInMemory) -> None:
    memory.make_room()
    memory.engine.create_model(model.id, model.adapter.settings() if model.adapter else None)
    memory.used[model.id] = None
