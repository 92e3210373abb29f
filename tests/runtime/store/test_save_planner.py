"""Saves of a run are planned once, and again when tensors have changed or a save has failed."""

import pickle

import torch
from ranks import on_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.store import writing as writer
from xtrain.runtime.store.reading import read_tensors
from xtrain.runtime.store.writing import CachedSavePlanner, write_tensors


def saves(rank, world, folder):
    """For each save how often the first rank has planned it, and whether what was read back is what was saved."""
    mesh = init_device_mesh("cpu", (world,))
    collective = CollectiveErrors(rank, world, torch.distributed.new_group(backend="gloo"))
    planner, found, planned = CachedSavePlanner(), [], []
    plan_globally, write_data = DefaultSavePlanner.create_global_plan, writer._Writer.write_data
    DefaultSavePlanner.create_global_plan = lambda *args: planned.append(1) or plan_globally(*args)

    def state(value, own=2):
        return {
            "cut": distribute_tensor(torch.arange(6.0).view(3, 2) + value, mesh, [Shard(0)]),
            "alike": torch.full((2,), float(value)),
            f"of rank {rank}": torch.full((own,), float(10 * rank + value)),
        }

    def save(name, tensors, planner=planner):
        planned.clear()
        (folder / name).mkdir(exist_ok=True)
        try:
            write_tensors("dcp", tensors, folder / name, collective, planner)
        except StorageFailed:
            found.append((len(planned), "failed"))
            return
        empty = {key: torch.full_like(tensor, -1) for key, tensor in tensors.items()}
        read_tensors(empty, folder / name, collective)
        whole = all(torch.equal(_local(empty[key]), _local(tensors[key])) for key in tensors)
        found.append((len(planned), whole))

    def fail(*_):
        raise OSError("no space left")

    save("first", state(1))
    save("again", state(2))
    writer._Writer.write_data = fail if rank == 1 else write_data
    save("broken", state(3))
    writer._Writer.write_data = write_data
    save("after a failure", state(4))
    save("again after that", state(5))
    save("one rank has changed", state(6, own=2 + rank))
    save("once more", state(7, own=2 + rank))
    save("other names", {"cut": state(8)["cut"]})
    save("anew", state(2), CachedSavePlanner())
    DefaultSavePlanner.create_global_plan = plan_globally
    return found


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_a_save_is_planned_again_if_it_is_another_one(tmp_path):
    first, second = on_ranks(2, saves, tmp_path, tmp_path)
    assert first == [
        (1, True),
        (0, True),
        (0, "failed"),
        (1, True),
        (0, True),
        (1, True),
        (0, True),
        (1, True),
        (1, True),
    ]
    assert second == [(0, outcome) for _, outcome in first]  # the first rank alone plans for all
    again, anew = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("again", "anew"))
    assert again.state_dict_metadata == anew.state_dict_metadata and again.planner_data == anew.planner_data
    assert again.storage_data.keys() == anew.storage_data.keys()
