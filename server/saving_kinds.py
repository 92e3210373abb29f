"""`save_weights` and `save_weights_for_sampler`: weights in folders of their own, which never change."""

import shutil
from typing import Any, Literal

from xtrain.server.engine import UserError
from xtrain.server.entries import Change, SamplerEntry, SavedEntry
from xtrain.server.kinds import SingleKind, check_name, numbered
from xtrain.server.models_in_memory import ModelsInMemory, new_name
from xtrain.server.requests import SaveForSampler, SaveWeights, plain_text, read_json
from xtrain.server.state import QueuedWork


class SaveWeightsKind(SingleKind):
    """Save the training state by name: weights, moments and step, without an accumulated gradient."""

    name = "save_weights"

    def read(self, raw: bytes) -> SaveWeights:
        return read_json(raw, SaveWeights)

    def address(self, request: SaveWeights) -> tuple[str, int]:
        return request.model_id, numbered(request.seq_id)

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        path = _free_path(work, "weights", memory)
        memory.need(work.entry.queue)
        folder = new_name()
        memory.engine.save(work.entry.queue, memory.store.weights(folder))
        memory.store.seal(folder)
        return {"path": path}, [_checkpoint(work, path, "weights", folder, memory)]


class SaveForSamplerKind(SingleKind):
    """Save weights for sampling; without a name for one sampling session."""

    name = "save_weights_for_sampler"

    def read(self, raw: bytes) -> SaveForSampler:
        return read_json(raw, SaveForSampler)

    def address(self, request: SaveForSampler) -> tuple[str, int]:
        return request.model_id, numbered(request.seq_id)

    def outcome(self, work: QueuedWork, memory: ModelsInMemory) -> tuple[dict[str, Any], list[Change]]:
        request: SaveForSampler = work.request
        if request.kind != "snapshot":
            raise UserError(f"kind {request.kind[:80]!r} is not offered here; offered: snapshot")
        if request.path is not None:
            path = _free_path(work, "sampler_weights", memory)
            folder = self._export(work, memory)
            return {"path": path}, [_checkpoint(work, path, "sampler_weights", folder, memory)]
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


def _checkpoint(
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
