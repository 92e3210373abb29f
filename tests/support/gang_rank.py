"""One rank of a job: executes the plan in this process, and saves what it held at the end."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.planner.serialise import from_json
from xtrain.runtime.checkpoint.tensors import MOMENTS
from xtrain.runtime.executor import Executor


class Observed(Executor):
    """An executor whose model is looked at after the run and before the process group is gone."""

    def _shut_down(self, *, failed: bool) -> None:
        if not failed:
            save(self.resources["model"], self.resources["optimizer"], self.records.directory, self.records.rank)
        super()._shut_down(failed=failed)


def save(model: nn.Module, optimizer: Optimizer, directory: Path, rank: int) -> None:
    """Write `held/<rank>.npz` with buffers and every parameter this rank has a part of, whole; `.json` about the parts.

    That says by name the shape, and the bytes of parameter, gradient and moments. Putting shards together takes the
    other ranks: all ranks of a parameter's mesh must call.
    """
    folder = directory / "held"
    folder.mkdir(exist_ok=True)
    whole, parts = {}, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        array = (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
        assert np.array_equal(whole.setdefault(name, array), array), f"two stages of this rank disagree on {name}"
        state = [parameter.grad, *(optimizer.state[parameter][moment] for moment in MOMENTS)]
        tensors = [_local(tensor) for tensor in (value, *state) if tensor is not None]
        parts[name] = {"shape": list(tensors[0].shape), "bytes": sum(t.numel() * t.element_size() for t in tensors)}
    for name, buffer in model.named_buffers():
        whole[name] = buffer.numpy()
    np.savez(folder / f"{rank}.npz", **whole)
    (folder / f"{rank}.json").write_text(json.dumps(parts))


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def run(job: dict[str, Any], rank: int) -> int:
    """Execute the plan in the job's directory; the exit code is 0 if it ended as it should."""
    os.chdir(job["folder"])
    torch.set_num_threads(1)
    if job["mutation"]:
        from gang_mutations import MUTATIONS

        MUTATIONS[job["mutation"]](**job["mutation_arguments"])
    directory = Path(job["directory"])
    plan = from_json(json.loads((directory / "plan.json").read_text()))
    status = Observed(plan, directory, rank=rank).run()
    print(f"rank {rank}: {status}")
    return 0 if status == "done" else 1
