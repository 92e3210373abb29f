"""What a checkpoint holds, read by one process."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from xtrain.runtime.nn.weights import quiet_alone
from xtrain.runtime.store.checkpoints import TENSORS, CheckpointFolder, read_sidecar


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor whole, by its name in the checkpoint."""
    if (path / TENSORS).is_file():
        return torch.load(path / TENSORS, weights_only=True)
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
    with quiet_alone():
        load(state, checkpoint_id=path, no_dist=True)
    return state


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit for bit."""
    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def folder(directory: Path) -> CheckpointFolder:
    return CheckpointFolder(directory / "checkpoints")


def steps(directory: Path) -> list[int]:
    return [entry.step for entry in folder(directory).entries()]


def state_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says besides its tensors, whenever it was written and however fast the run was."""
    state = read_sidecar(path)
    return {name: value for name, value in state.items() if name not in ("time", "files", "seal", "record")}
