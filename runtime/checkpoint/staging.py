"""A copy of the state in host memory, made beside the next step and complete before its optimizer writes."""

from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class HostCopy:
    """Copies into buffers that are kept from save to save.

    pinned: page-locked buffers, into which a GPU copies by itself on a stream of its own; without a GPU no difference.
    """

    def __init__(self, *, pinned: bool, device: torch.device) -> None:
        self._device = device
        own_stream = pinned and device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=own_stream,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=own_stream,
        )
        self._stager = DefaultStager(options)
        # torch 2.11 closes what copies behind every copy: the next one would fail, and have no buffers.
        copier = self._stager._state_dict_stager
        self._close, copier.close = copier.close, lambda: None
        self._under_way: Future[dict[str, Any]] | None = None

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Make the buffers, and touch all of their memory, before training waits for that in its first save."""
        self.begin(tensors)
        self.wait()

    def begin(self, tensors: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start to copy; the buffers may be written again when nobody needs the last copy any more."""
        if self._device.type == "cuda":
            # The copy goes beside the stream that the last update was computed on, and must not overtake it.
            torch.cuda.current_stream(self._device).synchronize()
        found = self._stager.stage(tensors)
        assert isinstance(found, Future)
        self._under_way = found
        return found

    def wait(self) -> None:
        """Return when what is being copied may be changed. Raises what the copying raised."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        self._stager.close()
        self._close()
