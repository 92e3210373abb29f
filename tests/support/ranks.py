"""A few gloo ranks for a test of one function, forked so that torch is not imported again."""

import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes  # pyright: ignore[reportAttributeAccessIssue]

# Seconds after which ranks that wait for each other say where, and end.
PATIENCE = 120.0


def on_ranks(world: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What `function(rank, world, *args)` returns on each of `world` ranks. An exception in one of them is raised."""
    start_processes(_work, (world, function, folder, args), nprocs=world, start_method="fork")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank: int, world: int, function: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(function(rank, world, *args), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
