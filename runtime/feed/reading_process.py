"""Process that reads rows for a rank: `python -m xtrain.runtime.feed.reading_process FD`."""

import ctypes
import os
import pickle
import signal
import sys
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op_of
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.collate import CollateChain
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.reading_ahead import send_answer, send_failure


class _ByNameUnpickler(pickle.Unpickler):
    """Unpickler that maps arrays from their files; the chain, whose functions cannot be pickled, is built again
    later."""

    _chain: CollateChain | None = None

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "mapped":
            _, file, dtype, offset, shape = pid
            return np.asarray(np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=shape))
        assert pid == ("chain",)
        return None  # set once everything is loaded


def read_recipe(recipe: bytes) -> RowLoader:
    """Return the loader that a rank has described."""
    plan, rank, loader = _ByNameUnpickler(BytesIO(recipe)).load()
    chain = chain_of(plan, rank)
    loader.collate = chain.of_labels if plan.node("setup.loader").args.get("prompts") else chain
    return loader


def chain_of(plan: Plan, rank: Rank) -> CollateChain:
    """Build the collate chain of a plan as its rank does."""
    # It has the end of a chain, and links bring their own; the other ops of a rank are not needed.
    from xtrain.runtime.feed import setup as feed  # noqa: F401

    nodes = plan.of_kind("collate")
    resources: dict[str, Any] = {"plan": plan, "rank": rank, "stages": []}
    for node in nodes:
        op = op_of(node)
        resources[op.gives or ""] = op.bind(node, {**resources, "node_id": node.id})()
    return resources["collate"]


def serve(socket: Connection) -> None:
    """Answer requests until the socket closes."""
    loader: RowLoader | None = None
    recipe = socket.recv_bytes()
    while True:
        step = int.from_bytes(socket.recv_bytes(), "little")
        try:
            loader = loader or read_recipe(recipe)
            microbatches = loader.microbatches(step)
        except Exception as error:
            send_failure(socket, error)
        else:
            send_answer(socket, microbatches)


def main() -> None:
    # The rank decides when this process ends; signals to a whole job are for the ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the rank is gone
        serve(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # tearing torch down takes long, and there is nothing to clean up


if __name__ == "__main__":
    main()
