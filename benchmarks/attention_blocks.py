"""Attention of rows of one document each on a CPU: 64 queries at a time beside torch's kernel, one layer forward and
backward, in turns, with cold caches. Prints milliseconds of processor time, the median of all turns, with fp32 products
as a run chooses them and at their highest precision.

    OMP_NUM_THREADS=1 python benchmarks/attention_blocks.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.runtime.loop.bootstrap import set_matmul
from xtrain.runtime.nn.attention_blocks import causal_blocks

# rows, heads of queries, of keys, positions, width of a head
SHAPES = (
    (4, 4, 4, 64, 8),
    (4, 2, 1, 128, 64),
    (4, 2, 1, 256, 64),
    (8, 2, 1, 256, 64),
    (4, 4, 2, 512, 64),
    (4, 4, 2, 1024, 64),
    (1, 4, 2, 2048, 64),
)


OTHERS = torch.zeros(1 << 24)  # empties the caches, as the rest of a step does


def torchs(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, is_causal=True, enable_gqa=True)


def milliseconds(attend: Callable[..., Tensor], given: list[Tensor], seed: Tensor) -> float:
    OTHERS.add_(1)
    begin = time.process_time()
    torch.autograd.grad(attend(*given), given, seed)
    return 1e3 * (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    for matmul in ("auto", "highest"):
        chosen = set_matmul(matmul, torch.device("cpu"))
        print(f"matmul = {matmul}: {chosen}")
        print(f"{'rows · heads (keys) · positions · head':40} {'torch':>7} {'blocks':>7} {'ratio':>6}")
        for shape in SHAPES:
            measure(*shape, turns)


def measure(rows: int, heads: int, keys: int, length: int, width: int, turns: int) -> None:
    drawn = [torch.randn(rows, length, number, width).transpose(1, 2) for number in (heads, keys, keys)]
    given, seed = [each.detach().requires_grad_() for each in drawn], torch.randn(rows, heads, length, width)
    found: dict[Callable[..., Tensor], list[float]] = {torchs: [], causal_blocks: []}
    for attend in (torchs, causal_blocks) * (turns + 1):
        found[attend].append(milliseconds(attend, given, seed))
    median = [statistics.median(each[1:]) for each in found.values()]
    name = f"{rows} · {heads} ({keys}) · {length:,} · {width}"
    print(f"{name:40} {median[0]:7.2f} {median[1]:7.2f} {median[1] / median[0]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
