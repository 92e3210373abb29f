"""Kernels of attention, of pointwise operations and of the loss, and which results recomputation keeps.

Pointwise kernels: `plain` runs torch's operations one after the other; `fused` makes one pass over the rows for each,
compiled by numba (`runtime/nn/fused_kernels.py`), in a fifth to a half of the time on a CPU.
"""

from typing import Final

from xtrain.dsl.schema.setting import Auto
from xtrain.plan.hardware import BLOCK_MASKS, CUDNN_ON, EXACT, HIGHEST, has_cudnn, plain_kernels
from xtrain.plan.mesh import device_kind
from xtrain.plan.resolved import Resolved, exchanges, sums_positions

# Row lengths for which blocks take 0.5 to 0.8 of the time of torch's kernel on a CPU (docs/performance.md).
SHORTEST, LONGEST = 128, 512
CODE: Final = "transformers"  # attention as the code of a model computes it


def pointwise_kernels(resolved: Resolved) -> dict[str, str]:
    """Return device type → `plain` or `fused`: numba has no bf16, and the compiler fuses compiled code itself."""
    ours = "code" not in resolved.architecture.own
    fused = ours and resolved.formats.compute in EXACT and resolved.spec.compile.mode == "none"
    # Their last numbers are computed one by one, with other rounding.
    fused = fused and not resolved.spec.precision.batch_invariant
    return {"cpu": "fused" if fused else "plain", "cuda": "plain"}


def attention_kernels(resolved: Resolved) -> dict[str, str]:
    """Return device type → kernel. HIGHEST is added where the machine's value of `matmul` decides."""
    kernel = resolved.spec.model.attention
    if resolved.spec.precision.batch_invariant:
        return {"cpu": "tiles", "cuda": "tiles"}
    code = resolved.architecture.own.get("code")
    if code is not None and not code["attention"]:
        return {"cpu": CODE, "cuda": CODE}
    if kernel != "auto":
        return {"cpu": str(kernel), "cuda": str(kernel)}
    plain = plain_kernels(resolved.architecture.head_dim)
    if on_cudnn(resolved):
        plain["cuda"] = "cudnn"
    if not in_blocks(resolved):
        return plain
    undecided = resolved.spec.precision.matmul == "auto" and resolved.formats.compute == "fp32"
    return {**plain, "cpu": "blocks", **({HIGHEST: plain["cpu"]} if undecided else {})}


def on_cudnn(resolved: Resolved) -> bool:
    """Return True if cuDNN's kernel is fastest for rows of one document on the devices of the cluster. A ring has its
    own kernel; without a `cluster` the devices are unknown."""
    sheet = resolved.spec.cluster.sheet
    known = sheet is not None and device_kind(resolved.spec) != "cpu" and sheet.capability in CUDNN_ON
    fits = has_cudnn(resolved.formats.compute, resolved.architecture.head_dim)
    return known and fits and resolved.size("ring") == 1


def in_blocks(resolved: Resolved) -> bool:
    """Return True if attention in blocks is fastest on a CPU. A ring has its own kernel, and compiled code keeps
    torch's. So do fp32 products at their highest precision, where blocks take up to 1.8 times as long as torch's
    kernel."""
    return (
        SHORTEST <= resolved.batch.sequence <= LONGEST
        and resolved.formats.compute in EXACT
        and not (resolved.formats.compute == "fp32" and resolved.spec.precision.matmul == "highest")
        and not resolved.small_products
        and resolved.size("ring") == 1
        and resolved.spec.compile.mode == "none"
    )


def resolve_save(resolved: Resolved) -> tuple[str, ...]:
    """Return the operations whose results selective recomputation keeps."""
    save = resolved.spec.activation.save
    if not isinstance(save, Auto):
        return save
    attention = () if hides_attention(resolved) else ("attention",)
    exchanged = ("all_to_all",) if exchanges(resolved.spec, resolved.layout) else ()
    summed = ("reduce_scatter",) if sums_positions(resolved.spec, resolved.layout) else ()
    return ("matmul", *attention, *exchanged, *summed)


def hides_attention(resolved: Resolved) -> bool:
    """Return True if attention may run as a separately compiled function, whose results selective recomputation cannot
    keep.

    So do the kernels of cuda with block masks, unless whole blocks are compiled.
    """
    if resolved.spec.compile.mode != "none":
        return compiles_parts(resolved)
    return device_kind(resolved.spec) != "cpu" and attention_kernels(resolved)["cuda"] in BLOCK_MASKS


def compiles_parts(resolved: Resolved) -> bool:
    """Return True if blocks are compiled in parts: those with experts, or with feed-forward layers in pieces. Selective
    recomputation does not see results inside compiled parts."""
    spec = resolved.spec
    return spec.compile.mode != "none" and (spec.model.experts > 0 or spec.activation.tile_mlp != 1)


def compiles_loss(resolved: Resolved) -> bool:
    """Return True if the cross-entropy of a piece of logits is compiled on CUDA: each rank has all logits of a token,
    and nothing else is read from them."""
    spec, ends = resolved.spec, resolved.architecture.ends
    plain = spec.loss.plain and resolved.architecture.has_logits and ends.logit_cap is None
    compiled = spec.compile.mode != "none" and device_kind(spec) != "cpu"
    return compiled and plain and resolved.size("tp") == 1
