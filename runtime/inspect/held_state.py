"""One rank of a short job: executes the plan in this process, and saves what it held at the end."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.transformer import ModelParts


class ObservedExecutor(Executor):
    """Executor that saves the state of its model after the run and before the process group is gone."""

    def _shut_down(self, *, failed: bool) -> None:
        if not failed:
            found = self.resources
            save(
                found["model"],
                found["optimizer"],
                self.records.directory,
                self.records.rank,
                averages=found.get("ema"),
            )
        super()._shut_down(failed=failed)


def save(
    model: ModelParts,
    optimizer: Optimizer,
    directory: Path,
    rank: int,
    name: str = "held",
    averages: WeightAverages | None = None,
) -> None:
    """Write `<name>/<rank>.npz` with this rank's pieces of all tensors, and `.json` about them.

    Tensors are parameters, buffers, the optimizer's as `optimizer.<name>.<moment>`, and averages as `ema.<name>`.
    `places` has the offset of each piece in its tensor, and the ranks with the other pieces of the same copy. `parts`
    has the shape of each parameter's piece, and its bytes with gradient, moments and average.
    """
    folder = directory / name
    folder.mkdir(exist_ok=True)
    pieces: dict[str, np.ndarray] = {}
    places: dict[str, dict[str, Any]] = {}
    parts: dict[str, dict[str, Any]] = {}

    def keep(name: str, value: Tensor) -> None:
        piece = _local(value)
        array = (piece.float() if piece.dtype == torch.bfloat16 else piece).numpy()  # numpy has no bf16
        places[name] = _place(value, rank)
        assert np.array_equal(pieces.setdefault(name, array), array), f"two stages of this rank disagree on {name}"

    for name, parameter in model.named_parameters():
        keep(name, parameter.detach())
        tensors = [parameter.detach(), parameter.grad]
        for moment in sorted(optimizer.state[parameter].keys() - {"step"}):
            if optimizer.state[parameter][moment].dim():  # else a single number
                tensors.append(optimizer.state[parameter][moment])
            keep(f"optimizer.{name}.{moment}", optimizer.state[parameter][moment])
        if averages is not None and name in averages.averages:
            tensors.append(averages.averages[name])
        local = [_local(tensor) for tensor in tensors if tensor is not None]
        parts[name] = {"shape": list(local[0].shape), "bytes": sum(t.numel() * t.element_size() for t in local)}
    for name, buffer in model.named_buffers():
        keep(name, buffer)
    for name, value in averages.tensors().items() if averages is not None else ():
        keep(name, value)
    np.savez(folder / f"{rank}.npz", **pieces)  # pyright: ignore[reportArgumentType]
    (folder / f"{rank}.json").write_text(json.dumps({"parts": parts, "places": places}))


def _place(value: Tensor, rank: int) -> dict[str, Any]:
    """Of the copy that this rank has a piece of: its shape, where the piece begins, and the ranks with its pieces."""
    if not isinstance(value, DTensor):
        return {"shape": list(value.shape), "start": [0] * value.ndim, "ranks": [rank]}
    return _place_in(tuple(value.shape), value.device_mesh, value.placements)


@cache
def _place_in(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, Any]:
    assert not any(placement.is_partial() for placement in placements)
    own = mesh.get_coordinate()
    assert own is not None
    along = [at if each.is_replicate() else slice(None) for at, each in zip(own, placements, strict=True)]
    _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return {"shape": list(shape), "start": list(start), "ranks": mesh.mesh[tuple(along)].flatten().tolist()}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def run(job: dict[str, Any], plan: Plan, rank: int) -> int:
    """Execute the plan in the job's directory; return 0 if the run ended as it should."""
    os.chdir(job["folder"])
    torch.set_num_threads(1)
    status = ObservedExecutor(plan, Path(job["directory"]), rank=rank).run()
    print(f"rank {rank}: {status}")
    return 0 if status == "done" else 1
