"""Checkpoints of a few bytes, published as a run publishes them."""

from pathlib import Path

from xtrain.runtime.checkpoint.checksums import file_checksums
from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.checkpoint.publish import Publisher


def save(folder: CheckpointFolder, step: int, *pointers, content: bytes = b"tensors", **state) -> Path:
    """A full checkpoint that `latest` names, and other pointers with it."""
    return _publish(folder, folder.path(step), {"step": step, **state}, content, ("latest", *pointers))


def save_model(folder: CheckpointFolder, step: int) -> Path:
    """Weights alone, that `model` names."""
    return _publish(folder, folder.model_path(step), {"step": step}, b"weights", ("model",))


def _publish(folder: CheckpointFolder, final: Path, state: dict, content: bytes, pointers: tuple) -> Path:
    publisher = Publisher(folder)
    partial = publisher.begin(final)
    (partial / "__0_0.distcp").write_bytes(content)
    (partial / ".metadata").write_bytes(b"where they are")
    publisher.publish(final, state, file_checksums(partial.iterdir()), pointers)
    return final
