"""What clients read about sessions, models and checkpoints."""

from datetime import UTC, datetime
from typing import Any

from xtrain.server.engine import Capabilities
from xtrain.server.entries import AdapterEntry, ModelEntry, SavedEntry
from xtrain.server.state import State

KINDS = {"weights": "training", "sampler_weights": "sampler"}


def capabilities(found: Capabilities) -> dict[str, Any]:
    """Return the capabilities under every name of the model."""
    one = {"max_context_length": found.context, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name} | one for name in found.names]}


def info(model: ModelEntry, found: Capabilities) -> dict[str, Any]:
    data = {"arch": found.architecture, "model_name": model.base, "tokenizer_id": found.tokenizer}
    return {
        "type": "get_info",
        "model_data": data,
        "model_id": model.id,
        "model_name": model.base,
        "lora_rank": None,
        "optimizer_config": {"type": "adamw"},
    } | _adapter(model.adapter)


def weights_info(checkpoint: SavedEntry) -> dict[str, Any]:
    adapter = checkpoint.adapter
    return {"base_model": checkpoint.base, "optimizer_config": {"type": "adamw"}} | _adapter(adapter)


def _adapter(adapter: AdapterEntry | None) -> dict[str, Any]:
    if adapter is None:
        return {"is_lora": False}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        "train_attn": adapter.attn,
        "train_mlp": adapter.mlp,
        "train_unembed": adapter.unembed,
    }


def checkpoint(one: SavedEntry) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": KINDS[one.kind],
        "time": _time(one.created),
        "tinker_path": one.path,
        "size_bytes": one.size,
        "public": one.public,
        "user_metadata": one.metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def training_run(model: ModelEntry, state: State) -> dict[str, Any]:
    """Return a model with its newest checkpoints. Its creation or last save counts as its last request."""
    own = sorted((one for one in state.checkpoints.values() if one.model == model.id), key=lambda one: one.created)
    newest = {one.kind: checkpoint(one) for one in own}
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.owner,
        "is_lora": model.adapter is not None,
        "lora_rank": model.adapter.rank if model.adapter else None,
        "corrupted": model.damaged is not None,
        "last_request_time": _time(max([model.created, *(one.created for one in own)])),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.metadata,
    }


def page(key: str, found: list[dict[str, Any]], offset: int, limit: int) -> dict[str, Any]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {key: found[offset : offset + limit], "cursor": cursor}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
