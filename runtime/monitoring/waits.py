"""How long this rank stands still for messages of others: `comm_seconds`.

Over gloo the host waits itself, at three places that all of torch goes through: `Work.wait`, which collectives without
`async_op`, FSDP and pipelines call; `wait_tensor`, which DTensors and the collectives of this runtime call; and the end
of a backward under DDP. There the clock is read before and after, which costs less than a microsecond a message.
Messages that travel while the rank computes cost it nothing, and are not counted; nor is what DDP waits once, in the
forward of its second step, to order its buckets anew.

Over NCCL the host does not wait, streams of the device do; and what compiled blocks exchange inside is waited for in
code that nobody looks into. How long that takes is not known here, and nothing is said of it.
"""

import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional

from xtrain.planner.plan import Plan
from xtrain.runtime.state import Rank

# Axes whose ranks exchange something in the middle of a block.
INSIDE: Final = ("tp", "ring", "ulysses", "ep")


class Waits:
    """seconds: that this process has waited so far, in the thread that trains. measured: False where nobody knows."""

    def __init__(self) -> None:
        self.measured = False
        self._thread = 0
        self._installed = False
        self._waited = 0.0
        self._lock = threading.Lock()
        self._last_bucket: float | None = None
        self._for_buckets = 0.0

    @property
    def seconds(self) -> float:
        return self._waited + self._for_buckets

    def begin(self, plan: Plan, rank: Rank) -> None:
        """Measure from here on, if that can be done on this rank; a rank that is alone waits for nobody."""
        self._thread = get_ident()
        compiled = any(node.op == "setup.compile" for node in plan.nodes)
        axes = (*plan.mesh.axes, *plan.mesh.expert_axes)
        hidden = compiled and any(axis.size > 1 for axis in axes if axis.name in INSIDE)
        self.measured = rank.world_size == 1 or (rank.device.type == "cpu" and not hidden)
        if rank.world_size > 1 and self.measured and not self._installed:
            self._installed = True
            self._time_works()
            self._time_tensors()

    def bucket_sent(self, *, last: bool) -> Callable[[], None]:
        """DDP sends a bucket of gradients; what is given back is called when it has come, by whichever thread.

        Behind the last bucket nothing is left to compute: from then on the rank waits.
        """
        self._last_bucket = perf_counter() if last else None

        def came() -> None:
            with self._lock:
                if self._last_bucket is not None:
                    now = perf_counter()
                    self._for_buckets += now - self._last_bucket
                    self._last_bucket = now

        return came

    def _time_works(self) -> None:
        original = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread:
                return original(work, *args, **kwargs)
            began = perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._waited += perf_counter() - began

        Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]

    def _time_tensors(self) -> None:
        original = functional.wait_tensor

        def wait_tensor(tensor: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or get_ident() != self._thread:
                return original(tensor)
            began = perf_counter()
            try:
                return original(tensor)
            finally:
                self._waited += perf_counter() - began

        functional.wait_tensor = wait_tensor


WAITS = Waits()
"""There is one of a process, as the places where torch waits are those of a process."""
