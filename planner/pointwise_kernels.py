"""What computes the pointwise parts of a block, its norms, rotations and the middle of SwiGLU, on each kind of device.

plain: torch's operations one after the other. fused: one pass over the rows for each, compiled by numba
(`runtime/models/fused_kernels.py`), which takes a fifth to a half of the time on a CPU.
"""

from typing import TYPE_CHECKING

from xtrain.planner.attention_kernels import EXACT

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved


def pointwise_kernels(run: "Resolved") -> dict[str, str]:
    """Device type → `plain` or `fused`: numba has no bf16, and what is compiled is fused by the compiler."""
    fused = run.formats.compute in EXACT and run.spec.compile.mode == "none"
    return {"cpu": "fused" if fused else "plain", "cuda": "plain"}
