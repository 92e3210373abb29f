"""Memory and speed of this machine's devices, for `cluster here`: run as a child process that planning starts.

Products of square matrices, copies of 256 MiB, an exchange between two devices, and on a CPU the share of the products'
speed that a block of a model reaches. GPUs with a data sheet have its peak rates instead of the measured ones, as for
presets. Every figure is the best of several repetitions.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.nn import functional as F

from xtrain.plan.hardware import PEAKS
from xtrain.runtime.base.device import kind_of
from xtrain.runtime.inspect.machine import memory_limit

SIDES: Final = (256, 512, 1024, 2048, 4096, 8192)
LONG_ENOUGH: Final = 0.02  # seconds of a product, above which larger matrices are not tried
CPU: Final = torch.device("cpu")
COPIED: Final = 256 * 2**20
SENT: Final = 16 * 2**20
REPEATED: Final = 30
BUSY: Final = 0.5  # load for each core, above which figures are too low
LONGEST: Final = 0.5  # seconds after which a figure is not repeated again
FORMATS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WIDTH, FFN, HEADS, ROWS, LENGTH = 512, 1536, 8, 4, 256  # of the block whose speed is measured


def main(facts: dict[str, Any]) -> dict[str, Any]:
    """Measure this machine; return a `MeasuredMachine` as JSON, and `busy`: other work made it slower. facts: of
    `components/clusters/here.py`."""
    busy = os.getloadavg()[0] > BUSY * len(os.sched_getaffinity(0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if not cuda:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    flops = {name: _product_flops(device, dtype) for name, dtype in FORMATS.items()}
    name, capability, block = facts["cpu"], 0, 0.0
    if cuda:
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)[0]
        torch.backends.cuda.matmul.allow_tf32 = True
        flops["tf32"] = _product_flops(device, torch.float32)
        flops = PEAKS.get(kind_of(name) or "", flops)
    else:
        block = _block_flops()
        flops["fp32"] = max(flops["fp32"], block)
        name = f"{name}, {len(os.sched_getaffinity(0))} cores"
    return {
        "device": device.type,
        "name": name,
        "devices": torch.cuda.device_count() if cuda else 1,
        "reached": None if cuda else block / flops["fp32"],
        "busy": busy,
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sheet": {
            "memory": _memory(device),
            "flops": flops,
            "link": _between_devices() if cuda else _between_processes(),
            "network": None,
            "capability": capability,
            "bandwidth": _copied(device),
            "shared": not cuda,
        },
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest repetition; the first, which loads kernels, counts only if it is alone."""
    taken: list[float] = []
    while not taken or (len(taken) <= REPEATED and sum(taken) < LONGEST):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:], default=taken[0])


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for side in SIDES:
        left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
        seconds = _seconds(lambda left=left, right=right: left @ right, device)
        best = max(best, 2 * side**3 / seconds)
        if seconds > LONG_ENOUGH:
            break
    return best


def _copied(device: torch.device) -> float:
    """Return the bytes per second that are read from memory while as many are written."""
    source = torch.ones(COPIED, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _seconds(lambda: target.copy_(source), device)


def _memory(device: torch.device) -> int:
    """Return the bytes of a GPU, or of the machine within the limits of its control groups."""
    if device.type == "cuda":
        return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit() or sys.maxsize)


def _between_devices() -> float | None:
    """Return the bytes per second from the first GPU to the second; None without a second one."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.ones(COPIED, device="cuda:0", dtype=torch.uint8)
    target = torch.empty(COPIED, device="cuda:1", dtype=torch.uint8)
    return COPIED / _seconds(lambda: target.copy_(source), torch.device("cuda:1"))


def _between_processes() -> float:
    """Return the bytes per second that each of two ranks sends with gloo, here two threads with a connection."""
    store, seconds = HashStore(), [0.0, 0.0]

    def rank(own: int) -> None:
        group = ProcessGroupGloo(store, own, 2, timedelta(seconds=60))
        numbers = torch.ones(SENT // 4)
        seconds[own] = _seconds(lambda: group.allreduce([numbers]).wait(), CPU)  # pyright: ignore[reportAttributeAccessIssue]

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join()
    return SENT / max(seconds)  # of an all-reduce of two, each sends half of the numbers twice


def _block_flops() -> float:
    """Return the FLOP/s of a decoder block in fp32, forward and backward, counted as in a plan."""
    weights = [
        torch.full(shape, 0.01, requires_grad=True)
        for shape in ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * FFN, WIDTH), (WIDTH, FFN))
    ]
    given = torch.ones(ROWS, LENGTH, WIDTH, requires_grad=True)
    scale = torch.ones(WIDTH)

    def step() -> None:
        qkv, out, gates, down = weights
        heads = F.linear(F.rms_norm(given, (WIDTH,), scale), qkv)
        q, k, v = (part.view(ROWS, LENGTH, HEADS, -1).transpose(1, 2) for part in heads.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)
        hidden = given + F.linear(mixed, out)
        gate, up = F.linear(F.rms_norm(hidden, (WIDTH,), scale), gates).chunk(2, dim=-1)
        (hidden + F.linear(F.silu(gate) * up, down)).sum().backward()

    tokens = ROWS * LENGTH
    products = 6 * tokens * sum(weight.numel() for weight in weights)
    return (products + 12 * tokens * LENGTH * WIDTH) / _seconds(step, CPU)


if __name__ == "__main__":
    given, result = (Path(argument) for argument in sys.argv[1:3])
    result.write_text(json.dumps(main(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
