"""What bitsandbytes makes of 20 matrices, as digests: `python tests/support/quantised_vectors.py --write` with
bitsandbytes 0.50 installed. Its kernels for a CPU are meant."""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("quantised_vectors.json")
# Rows of one block, blocks that no row has whole, an odd number of numbers, groups of scales that are not full.
SHAPES = (
    (1, 64), (1, 1), (3, 320), (7, 9), (5, 3), (37, 13), (129, 192), (257, 64), (300, 77), (513, 100), (1, 16384),
    (2, 4096), (640, 640), (33, 31), (100, 1), (64, 8), (256, 64), (11, 1000), (192, 512), (1, 16448),
)  # fmt: skip
BLOCKS = (64, 32)


def numbers(shape: tuple[int, int]) -> np.ndarray:
    """Of a generator whose stream is the same in every version of numpy, in fp32; every fifth row is small."""
    count = shape[0] * shape[1]
    bits = np.random.PCG64(1000 * shape[0] + shape[1]).random_raw(4 * count).reshape(4, count)
    values = ((bits >> np.uint64(40)).astype(np.float64).sum(0) / 2**24 - 2).reshape(shape)  # nearly normal
    values[::5] *= 0.01
    return (0.05 * values).astype(np.float32)


def digest(values: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def key(shape: tuple[int, int], block: int, *, double: bool) -> str:
    return f"{shape[0]}x{shape[1]} of {block}, {'8-bit' if double else 'fp32'}"


def vectors() -> dict[str, dict[str, str]]:
    return json.loads(PATH.read_text())


def _made() -> dict[str, dict[str, str]]:
    import bitsandbytes.functional as bnb
    import torch

    found = {}
    for shape, block, double in ((s, b, d) for s in SHAPES for b in BLOCKS for d in (True, False)):
        weight = torch.from_numpy(numbers(shape))
        codes, state = bnb.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=double)
        parts: dict[str, Any] = {"input": weight, "codes": codes, "scales": state.absmax}
        if double:
            parts |= {"mean": state.offset, "largest": state.state2.absmax}
        # Flat: where no block ends with a row, its kernel for matrices takes the scales of others.
        state.shape = torch.Size((weight.numel(),))
        for name, type in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            state.dtype = type
            parts[name] = bnb.dequantize_4bit(codes, state).float()
        found[key(shape, block, double=double)] = {name: digest(each.numpy()) for name, each in parts.items()}
    return found


if __name__ == "__main__" and "--write" in sys.argv:
    entries = (f" {json.dumps(name)}: {json.dumps(digests)}" for name, digests in _made().items())
    PATH.write_text("{\n" + ",\n".join(entries) + "\n}\n")
