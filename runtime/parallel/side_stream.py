"""Exchanging numbers of the host without waiting for what a device computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is sent and read meanwhile is ordered among itself, and not behind what a CUDA device still computes: the
    host waits for the former alone. Only for tensors that are made inside; on other devices it does nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
