"""A few gloo ranks for a test of one function, forked so that torch is not imported again.

They are forked from a process that was itself forked when all tests had been collected and none had run: what tests
leave in theirs (threads that wait, a profiler, patches) would be inherited, and a rank could hang in it.
"""

import faulthandler
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_forker import die_with, load_for_ranks
from torch.multiprocessing import start_processes  # pyright: ignore[reportAttributeAccessIssue]

from xtrain.runtime.base.errors import exit_process

# Seconds after which ranks that wait for each other say where, and end.
PATIENCE = 120.0

_forker: Connection | None = None


def begin() -> None:
    """Fork the process that ranks come from; called before the first test."""
    global _forker
    if _forker is not None:
        return
    here, there = Pipe()
    parent = os.getpid()
    if os.fork():
        there.close()
        _forker = here
        return
    try:
        die_with(parent)
        here.close()
        _serve(there)
    finally:
        os._exit(0)


def on_ranks(world: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What `function(rank, world, *args)` returns on each of `world` ranks; `function` stands in a test module.

    Raises AssertionError with what an exception in one of them says.
    """
    begin()
    assert _forker is not None
    # As bytes: sent as they are, tensors would travel as handles of shared memory.
    _forker.send_bytes(pickle.dumps((world, function, folder, args)))
    fault = _forker.recv()
    stuck = "".join(path.read_text() for path in sorted(folder.glob("rank*.stuck")))
    assert fault is None, f"{fault}\n{stuck}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def _serve(asked: Connection) -> None:
    loaded = False
    while True:
        try:
            world, function, folder, args = pickle.loads(asked.recv_bytes())
        except EOFError:
            return
        fault = None
        try:
            if not loaded:
                load_for_ranks()
                loaded = True
            start_processes(_work, (world, function, folder, args), nprocs=world, start_method="fork")
        except BaseException:
            fault = traceback.format_exc()
        asked.send(fault)


def _work(rank: int, world: int, function: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    with (folder / f"rank{rank}.stuck").open("w") as stuck:
        faulthandler.enable(file=stuck, all_threads=True)  # a signal that ends this rank leaves its threads' stacks
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=stuck)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        torch.save(function(rank, world, *args), folder / f"rank{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        exit_process(0)
