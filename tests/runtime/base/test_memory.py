"""From when on a peak counts."""

import pytest
import torch

from xtrain.runtime.base.device import forget_peak, peak_bytes


class Allocator:
    """Of a GPU."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_what_set_up_took_for_a_moment_is_no_peak_of_a_step(monkeypatch):
    allocator, gpu = Allocator(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    for size in (100, 900, -900):
        allocator.take(size)
    assert forget_peak(gpu) == 1000 and peak_bytes(gpu) == 100
    allocator.take(50)
    assert peak_bytes(gpu) == 150


def test_that_of_a_process_stays():
    before = peak_bytes(torch.device("cpu"))
    assert 0 < before <= forget_peak(torch.device("cpu")) <= peak_bytes(torch.device("cpu"))


@pytest.mark.gpu
def test_an_allocator_forgets_its_peak():
    gpu = torch.device("cuda", 0)
    large = torch.empty(2**28, dtype=torch.uint8, device=gpu)
    del large
    assert forget_peak(gpu) >= 2**28 > peak_bytes(gpu)
