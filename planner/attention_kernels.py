"""Which kernel computes attention, on each kind of device.

documents: one product a document, torch's own kernel. blocks: rows that are one document each some queries at a time,
by plain products over the keys up to the last of these, all others as documents. flex: a block mask of all documents.
mask: a plain mask.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

QUERIES: Final = 64  # of a block
# Positions of a row for which blocks take 0.5 to 0.8 of the time of torch's kernel on a CPU (docs/performance.md).
SHORTEST, LONGEST = 128, 512
EXACT: Final = ("fp32", "fp64")  # below, torch's kernel has a softmax in fp32, and blocks one in the format itself

NARROWEST: Final = 16  # head for which torch's compiler has a kernel of flex on CUDA


# Beside the kernel of a CPU, that of one whose fp32 products are in force at their highest precision.
HIGHEST: Final = "cpu, highest"


def attention_kernels(run: "Resolved") -> dict[str, str]:
    """Device type → kernel; HIGHEST too, where what `matmul` becomes on the machine decides."""
    kernel = run.spec.model.attention
    if kernel != "auto":
        return {"cpu": str(kernel), "cuda": str(kernel)}
    plain = plain_kernels(run.architecture.head_dim)
    if not in_blocks(run):
        return plain
    undecided = run.spec.precision.matmul == "auto" and run.formats.compute == "fp32"
    return {**plain, "cpu": "blocks", **({HIGHEST: plain["cpu"]} if undecided else {})}


def kernel_on(device: str, matmul: str, kernels: dict[str, str]) -> str:
    """That of a kind of device with what `matmul` is in force."""
    return kernels.get(f"{device}, {matmul}", kernels[device])


def plain_kernels(head_dim: int) -> dict[str, str]:
    """Those of a model that is read beside the one that is trained."""
    return {"cpu": "documents", "cuda": "flex" if head_dim >= NARROWEST else "documents"}


def in_blocks(run: "Resolved") -> bool:
    """Whether blocks are the fastest on a CPU; a ring has a kernel of its own, and what is compiled keeps torch's. So
    do fp32 products at their highest precision, with which blocks take up to 1.8 of the time of torch's kernel."""
    return (
        SHORTEST <= run.batch.sequence <= LONGEST
        and run.formats.compute in EXACT
        and not (run.formats.compute == "fp32" and run.spec.precision.matmul == "highest")
        and not run.small_products
        and run.size("ring") == 1
        and run.spec.compile.mode == "none"
    )
