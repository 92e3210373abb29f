"""What a rank holds: of a GPU's memory what torch has allocated and taken, on a CPU what is resident."""

import os
import resource
import sys
import weakref
from contextlib import suppress
from typing import Final

import torch

STATM: Final = "/proc/self/statm"
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int:
    """The most this rank has held: allocated on a GPU since `forget_peak`, resident on a CPU since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(device: torch.device) -> int:
    """Count the peak of a GPU from here on; that of a process cannot be put back. Returns what it was before."""
    before = peak_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return before


class MemoryNow:
    """What a rank holds when it is asked, for its own records."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0
        self._statm: int | None = None
        if device.type != "cuda":
            with suppress(OSError):  # kept open: a step that is logged reads it in two microseconds
                self._statm = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._statm)

    def take(self) -> dict[str, int]:
        """`allocated_bytes` and `reserved_bytes` of a GPU, with the `retries` of its allocator since this was last
        asked; `resident_bytes` on a CPU, where the system tells."""
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            before, self._retries = self._retries, stats["num_alloc_retries"]
            return {
                "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
                "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
                "retries": self._retries - before,
            }
        if self._statm is None:
            return {}
        return {"resident_bytes": int(os.pread(self._statm, 64, 0).split()[1]) * PAGE}
