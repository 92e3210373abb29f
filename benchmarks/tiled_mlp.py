"""Memory and time of a feed-forward layer on a long row: whole, in pieces, and in pieces by torch's checkpoint.

    OMP_NUM_THREADS=1 python benchmarks/tiled_mlp.py
    python benchmarks/tiled_mlp.py --device cuda --positions 262144 --dim 4096 --ffn 14336 --format bfloat16

Each forward and backward of one layer alone; the median of the turns. Memory is what storages take beside weights,
input and the gradient of the output at the most. The error is that of the gradient of `down_proj` against fp64,
relative.
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from xtrain.runtime.inspect.ledger import Ledger
from xtrain.runtime.nn.layers import SwiGLU


class Watched(TorchDispatchMode):
    """Takes note of every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, out)):
            if isinstance(each, Tensor):
                self.ledger.see(each)
        return out


def by_checkpoint(layer: SwiGLU, x_BSD: Tensor, positions: int) -> Tensor:
    pieces = [checkpoint(layer.of_piece, piece, use_reentrant=False) for piece in x_BSD.split(positions, 1)]
    return torch.cat(pieces, 1)  # pyright: ignore[reportArgumentType]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("positions", 16384), ("dim", 512), ("ffn", 2048), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--format", default="bfloat16", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype, tile = getattr(torch, args.format), args.dim
    layer = SwiGLU(args.dim, args.ffn).to(args.device, dtype)
    x_BSD = torch.randn(1, args.positions, args.dim, device=args.device, dtype=dtype)
    grad_BSD = torch.randn_like(x_BSD)
    given = {x_BSD.data_ptr(), grad_BSD.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
    assert len(given) == 5

    def run(how: str) -> None:
        layer.positions = tile if how == "tiled" else None
        layer.zero_grad()
        x = x_BSD.detach().requires_grad_()
        (by_checkpoint(layer, x, tile) if how == "checkpoint" else layer(x)).backward(grad_BSD)

    exact = SwiGLU(args.dim, args.ffn).to(args.device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    for piece, grad in zip(x_BSD.split(tile, 1), grad_BSD.split(tile, 1), strict=True):
        exact(piece.double()).backward(grad.double())
    wanted = exact.down_proj.weight.grad
    assert wanted is not None
    for how in ("whole", "tiled", "checkpoint"):
        with Watched() as watched:
            for tensor in (x_BSD, grad_BSD, *layer.parameters()):
                watched.ledger.see(tensor)
            watched.ledger.begin("given")
            run(how)
        peak = max(watched.ledger.over_time(but=("given",)))
        found = layer.down_proj.weight.grad
        assert found is not None
        seconds = []
        for _ in range(args.turns):
            begin = time.perf_counter()
            run(how)
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        line = {"how": how, "peak_mib": round(peak / 2**20, 1), "seconds": round(median(seconds), 3)}
        print(json.dumps(line | {"error": float(f"{error:.2g}")}), flush=True)


if __name__ == "__main__":
    main()
