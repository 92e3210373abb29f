"""A rank for tests of what one process does."""

from typing import Any

import torch

from xtrain.runtime.base.state import Rank

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")


def one_rank(number: int = 0, **changes: Any) -> Rank:
    """Return a rank on the CPU that has all rows and layers, but for `changes`."""
    places: dict[str, Any] = {"local_rank": number, "world_size": 1, "data_rank": 0, "data_ranks": 1}
    alone = {**places, "device": torch.device("cpu"), "pipeline_ranks": 1, "coordinates": dict.fromkeys(AXES, 0)}
    return Rank(rank=number, **{**alone, **changes})
