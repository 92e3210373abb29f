"""Tokens a second of an 8B model on one H200, predicted from the kernels that torch makes for it, without a device.

    python benchmarks/cuda_counts.py                      # needs triton: pip install triton

One step of the real program runs on fake tensors; Inductor writes the CUDA code of a block, forward and backward, whose
kernels and bytes are counted (`tests/support/cuda_code.py`). Of the loss and of the norm the bytes of all operators are
counted. A roofline makes times of these: products and attention at the rates below, everything else at the speed of the
memory. Rates are of microbenchmarks on an H200, not of runs: what comes out is a prediction. The published 10,471
tokens/s of KempnerForge (full recomputation, 4 rows x 2, cuDNN attention) come out as 10,386.

Prints a JSON line for each case: kernels a layer, bytes a token and layer, microseconds a token by part, tokens/s.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from cuda_code import Graph, compiled

from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.device import FakeDevice
from xtrain.runtime.nn import loss
from xtrain.runtime.nn.gradients import squares_of

LAYERS, DIM, FFN, VOCAB, KEYS = 32, 4096, 14336, 128256, 1024
SEQUENCE, MICRO, ACCUMULATE = 4096, 4, 2
TOKENS = SEQUENCE * MICRO
BLOCK: Final = 2 * DIM * DIM + 2 * DIM * KEYS + 3 * DIM * FFN
PARAMETERS: Final = LAYERS * (BLOCK + 2 * DIM) + 2 * VOCAB * DIM + DIM
# Rates of an H200: products of 16,384 rows, memory, attention forward and backward by flex, and by cuDNN or
# FlashAttention 3.
BF16, FP8, MEMORY, FLEX, FASTEST = 740e12, 1200e12, 4.0e12, (420e12, 320e12), (600e12, 470e12)
HOST = 1.0e-3  # seconds of a step in which the device waits for the host
LOGIT = 8  # bytes a logit of the compiled loss
UPDATE, CLIP = 14, 4  # bytes a parameter: fused AdamW in bf16, scaled gradients
SIZES = f"dim = {DIM}, layers = 2, heads = 32, kv_heads = 8, ffn = {FFN}, vocab = {VOCAB}, tie_embeddings = false"
SPEC = f"""
experiment counts {{ seed = 1, budget = 4 steps }}
model llama {{ {SIZES} }}
tokenizer bytes
dataset made {{ source = synthetic() }}
batch {{ sequence = {SEQUENCE}, micro = {MICRO}, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = cuda }}
compile {{ mode = default }}
cluster h200 {{ devices = 1 }}
checkpoint {{ enabled = false }}
"""
SINGLE, FLASH = "rows of one document", "FlashAttention 3"
IN_FP8 = "precision { params = bf16, compute = fp8 { recipe = rowwise } }\nactivation selective"
CASES = {
    f"bf16, {SINGLE}, selective": "precision { params = bf16 }\nactivation selective",
    "bf16, selective": "precision { params = bf16 }\nactivation selective",
    f"bf16, {FLASH}, selective": "precision { params = bf16 }\nactivation selective",
    "bf16, full": "precision { params = bf16 }\nactivation full",
    "fp8, selective": IN_FP8,
    f"fp8, {FLASH}, selective": IN_FP8,
    f"fp8, {SINGLE}, selective": IN_FP8,
}
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "slice", "split", "unflatten", "detach", "alias", "unsqueeze", "expand",
    "select", "permute", "as_strided", "squeeze", "unbind", "_reshape_alias", "chunk", "empty", "new_empty",
    "device",  # a question, not an operation
}  # fmt: skip


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, by name; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out

    @property
    def total(self) -> int:
        """Of all but products."""
        return sum(size for name, size in self.bytes.items() if name not in ("mm", "addmm"))


def graphs(case: str) -> tuple[Graph, Graph]:
    """Return the code of a block's forward and backward: of rows of several documents, which flex or FlashAttention
    computes, or of one, which cuDNN does."""
    single = SINGLE in case
    text = SPEC.replace("{ dim", "{ attention = flash3, dim") if FLASH in case else SPEC
    with tempfile.TemporaryDirectory() as made:
        loaded = plan_from_text(text + CASES[case], f"{made}/counts.xtrain", [], world=1)
        assert loaded.plan is not None, loaded.diagnostics.render(color=False)
        found = compiled(loaded.plan, codegen=True, packed=not single, single=single)
    assert not found.breaks and not found.unknown
    attends = "_scaled_dot_product" if single else "_varlen" if FLASH in case else "flex"
    blocks = [graph for graph in found.code if any(name.startswith(attends) for name in graph.calls)]
    forward, backward = blocks  # another one makes the mask
    return forward, backward


def loss_bytes() -> float:
    """Return the bytes a token of the head and the loss, beside its products."""
    chunk, real = 1 << 30, loss.compiled_piece

    def piece(*key: Any, slopes: bool) -> Any:
        def call(logits: Tensor, labels: Tensor) -> Any:
            before = moved.bytes.copy()
            out = real(*key, slopes=slopes)(logits, labels)
            moved.bytes = before
            moved.bytes["loss"] += LOGIT * logits.numel()
            return out

        return call

    # The piece runs as it is written, and is counted as compiled.
    with (
        FakeDevice("cuda", 9),
        patch.object(loss, "compiled_piece", piece),
        patch.object(torch, "compile", lambda x: x),
    ):
        hidden = torch.empty(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.nn.Parameter(torch.empty(VOCAB, DIM, dtype=torch.bfloat16))
        labels = torch.empty(TOKENS, dtype=torch.int64)
        with Moved() as moved:
            head = loss.Head(vocabulary=VOCAB, z_weight=0.0, chunk_bytes=chunk, compiled=True)
            loss.token_losses(hidden, weight, labels, head).objective.backward()
    return moved.total / TOKENS


def norm_bytes() -> float:
    """Return the bytes a parameter of the gradient norm."""
    gradient = torch.empty(FFN, DIM, dtype=torch.bfloat16, device="meta")
    with Moved() as moved:
        squares_of([gradient], torch.zeros((), dtype=torch.float64, device="meta"))
    return moved.total / gradient.numel()


def predicted(name: str, forward: Graph, backward: Graph, head: float, norm: float) -> dict[str, Any]:
    """Return the counts and the prediction of a case."""
    fp8, again = name.startswith("fp8"), name.endswith("full")
    rates = FLEX if SINGLE not in name and FLASH not in name else FASTEST
    block = LAYERS * (6 * BLOCK + (2 * (BLOCK - DIM * FFN) if again else 0))
    attended = LAYERS * 2 * SEQUENCE * DIM  # operations of a causal forward
    seconds = {
        "products": block / (FP8 if fp8 else BF16) + 6 * VOCAB * DIM / BF16,
        "attention": attended * (2 if again else 1) / rates[0] + 2.5 * attended / rates[1],
        "pointwise": LAYERS * (forward.moved + backward.moved) / TOKENS / MEMORY,
        "loss": head / MEMORY,
        "update": PARAMETERS * (UPDATE + CLIP + norm + 6 * (ACCUMULATE - 1)) / MEMORY / (TOKENS * ACCUMULATE),
        "host": HOST / (TOKENS * ACCUMULATE),
    }
    return {
        "case": f"8B, {name}, {MICRO} x {ACCUMULATE} rows of {SEQUENCE}",
        "torch": torch.__version__,
        "kernels_forward": dict(forward.calls),
        "kernels_backward": dict(backward.calls),
        "bytes_a_token_and_layer": [round(graph.moved / TOKENS) for graph in (forward, backward)],
        "loss_bytes_a_token": round(head),
        "norm_bytes_a_parameter": round(norm, 2),
        "microseconds_a_token": {part: round(time * 1e6, 2) for part, time in seconds.items()},
        "predicted_tokens_per_second": round(1 / sum(seconds.values())),
    }


def main() -> None:
    head, norm = loss_bytes(), norm_bytes()
    for name in CASES:
        print(json.dumps(predicted(name, *graphs(name), head, norm)), flush=True)


if __name__ == "__main__":
    main()
