"""All that is known of a rank's memory at a moment, as JSON: what it holds, its allocator, its process, its plan."""

import time
from typing import Any

import torch
from attrs import asdict
from torch import Tensor
from torch.optim import Optimizer

from xtrain.planner.plan import Memory, Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.memory import MemoryNow, peak_bytes
from xtrain.runtime.profiling.memory_categories import memory_by_category
from xtrain.runtime.state import Rank
from xtrain.runtime.training.ema import WeightAverages


def found(
    rank: Rank,
    step: int,
    model: ModelParts | None,
    optimizer: Optimizer | None,
    ema: WeightAverages | None,
    planned: Memory,
) -> dict[str, Any]:
    """planned: of this rank's pipeline coordinate. What set-up has not made yet holds nothing."""
    device = rank.device
    averages = _averages(model, ema)
    seen = memory_by_category(model, optimizer, averages, device)
    on_gpu = device.type == "cuda"
    return {
        "rank": rank.rank,
        "step": step,
        "time": time.time(),
        "device": device.type,
        "coordinates": rank.coordinates,
        "held": seen.device,
        "held_in_host": seen.host if on_gpu else None,
        "largest_others": [{"bytes": size, "type": type, "shape": shape} for size, type, shape in seen.largest],
        "allocator": _allocator(device, sum(seen.device.values())) if on_gpu else None,
        "process": {**MemoryNow(torch.device("cpu")).take(), "peak_bytes": peak_bytes(torch.device("cpu"))},
        "planned": {**asdict(planned), "allocated": planned.allocated_bytes, "total": planned.total_bytes},
    }


def planned_of(plan: Plan, rank: Rank) -> Memory:
    """The plan's figures for the rank with the most of this rank's pipeline coordinate."""
    return next(each.memory for each in plan.estimates.classes if each.pp == rank.coordinates["pp"])


def _allocator(device: torch.device, known: int) -> dict[str, int]:
    """Of a GPU's allocator. unknown_bytes: allocated and held by no tensor that Python knows of."""
    stats = torch.cuda.memory_stats(device)
    allocated = stats["allocated_bytes.all.current"]
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "unknown_bytes": allocated - known,
    }


def _averages(model: ModelParts | None, ema: WeightAverages | None) -> list[Tensor]:
    """Those of parameters, as the plan counts them."""
    if model is None or ema is None:
        return []
    return [ema.averages[name] for name, _ in model.named_parameters()]
