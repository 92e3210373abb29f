"""Norms, rotations and the middle of SwiGLU on a CPU: one pass each beside torch's operations, forward and backward, in
turns, with cold caches. Prints microseconds of processor time, the median of all turns.

    OMP_NUM_THREADS=1 python benchmarks/pointwise_kernels.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.dsl.schema.rope import Rope
from xtrain.plan.architecture import RotaryAngles
from xtrain.runtime.nn.fused import normed_and_turned, rms_norm, silu_times
from xtrain.runtime.nn.layers import Rotation

ROWS, LENGTH, DIM, HEADS, WIDTH, FFN = 8, 256, 128, 2, 64, 384  # of the quickstart, as peers.py takes it
OTHERS = torch.zeros(1 << 22)  # empties the caches, as the rest of a step does


def kernels() -> dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor], Callable[..., Tensor]]]:
    """Name → shapes of what is given, by torch's operations, fused."""
    positions_BS = torch.arange(LENGTH).expand(ROWS, -1)
    rotate = Rotation.of(positions_BS, RotaryAngles(width=WIDTH, theta=10_000.0, rope=Rope()), torch.float32)

    def turned(x_BSHA: Tensor, weight_A: Tensor) -> Tensor:
        return rotate(rms_norm(x_BSHA, weight_A, 1e-6).transpose(1, 2))

    def fused_norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6, fused=True)

    return {
        "norm": (((ROWS, LENGTH, DIM), (DIM,)), lambda x, weight: rms_norm(x, weight, 1e-6), fused_norm),
        "norm and rotation of queries": (
            ((ROWS, LENGTH, HEADS, WIDTH), (WIDTH,)),
            turned,
            lambda x, weight: normed_and_turned(x, weight, 1e-6, rotate),
        ),
        "silu(gate) · up": (((ROWS, LENGTH, FFN),) * 2, lambda gate, up: F.silu(gate) * up, silu_times),
    }


def microseconds(function: Callable[..., Tensor], given: list[Tensor]) -> float:
    OTHERS.add_(1)
    begin = time.process_time()
    out = function(*given)
    torch.autograd.grad(out, given, out.detach())
    return 1e6 * (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    print(f"{'':30} {'torch':>7} {'fused':>7} {'ratio':>6}")
    for name, (shapes, *both) in kernels().items():
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        found: dict[Callable[..., Tensor], list[float]] = {each: [] for each in both}
        for function in both * (turns + 1):
            found[function].append(microseconds(function, given))
        plain, fused = (statistics.median(each[1:]) for each in found.values())
        print(f"{name:30} {plain:7.0f} {fused:7.0f} {fused / plain:6.2f}")


if __name__ == "__main__":
    main()
