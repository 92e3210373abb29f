"""How long this rank stands still for messages of others: `comm_seconds`.

Over gloo the host waits itself, at a few places that all of torch goes through: `Work.wait`, which collectives without
`async_op`, FSDP and pipelines call; the operator `wait_tensor` of functional collectives, which DTensors, compiled code
and this runtime call; and the end of a backward under DDP. There the clock is read before and after, which costs less
than a microsecond a message. Messages that travel while the rank computes cost it nothing, and are not counted.

Over NCCL the host does not wait, streams of the device do: what they wait is not known here, and nothing is said of it.
"""

import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ..state import Rank


class Waits:
    """seconds: that this process has waited so far, in the thread that trains. measured: False where nobody knows."""

    def __init__(self) -> None:
        self.measured = False
        self._thread = 0
        self._library: torch.library.Library | None = None
        self._waited = 0.0
        self._lock = threading.Lock()
        self._last_bucket: float | None = None
        self._for_buckets = 0.0

    @property
    def seconds(self) -> float:
        return self._waited + self._for_buckets

    def begin(self, rank: Rank) -> None:
        """Measure from here on, if that can be done on this rank; a rank that is alone waits for nobody."""
        self._thread = get_ident()
        self.measured = rank.world_size == 1 or rank.device.type == "cpu"
        if rank.world_size > 1 and self.measured and self._library is None:
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

        Work.wait = wait

    def _time_tensors(self) -> None:
        original = torch.library.get_kernel("_c10d_functional::wait_tensor", "CPU")

        def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            if get_ident() != self._thread:
                return original.call_boxed(keys, tensor)
            began = perf_counter()
            try:
                return original.call_boxed(keys, tensor)
            finally:
                self._waited += perf_counter() - began

        self._library = torch.library.Library("_c10d_functional", "IMPL")
        self._library.impl("wait_tensor", wait_tensor, "CPU", with_keyset=True)


WAITS = Waits()
"""There is one of a process, as the places where torch waits are those of a process."""
