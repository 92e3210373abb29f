"""Checkpoints of a few bytes, published as a run publishes them."""

from pathlib import Path

from xtrain.runtime.base import files as durable
from xtrain.runtime.store.checkpoints import TENSORS, CheckpointFolder, Publisher, file_checksums
from xtrain.runtime.store.writing import Backend


def save(
    folder: CheckpointFolder, step: int, *pointers, content: bytes = b"tensors", backend: Backend = "dcp", **state
) -> Path:
    """A full checkpoint that `latest` names, and other pointers with it."""
    return _publish(folder, folder.path(step), {"step": step, **state}, content, ("latest", *pointers), backend)


def save_model(folder: CheckpointFolder, step: int, backend: Backend = "dcp", **state) -> Path:
    """Weights alone, that `model` names."""
    return _publish(folder, folder.model_path(step), {"step": step, **state}, b"weights", ("model",), backend)


def _publish(
    folder: CheckpointFolder, final: Path, state: dict, content: bytes, pointers: tuple, backend: Backend
) -> Path:
    publisher = Publisher(folder)
    partial = publisher.begin(final)
    if backend == "file":
        # Through `durable`, as the real writer does, so that each change of it can be made to fail.
        fd = durable.create(partial / TENSORS)
        durable.append(fd, content)
        durable.os.close(fd)
        durable.sync(partial / TENSORS)
    else:
        (partial / "__0_0.distcp").write_bytes(content)
        (partial / ".metadata").write_bytes(b"where they are")
        for path in partial.iterdir():
            durable.sync(path)
    publisher.publish(final, state, file_checksums(partial.iterdir()), pointers)
    return final
