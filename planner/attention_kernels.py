"""Which kernel computes attention, on each kind of device.

documents: one product a document, torch's own kernel. blocks: rows that are one document each some queries at a time,
by plain products over the keys up to the last of these, all others as documents. flex: a block mask of all documents.
mask: a plain mask.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .resolved import Resolved

QUERIES: Final = 64  # of a block
# Positions of a row for which blocks take 0.5 to 0.8 of the time of torch's kernel on a CPU (docs/performance.md).
SHORTEST, LONGEST = 128, 512
EXACT: Final = ("fp32", "fp64")  # below, torch's kernel has a softmax in fp32, and blocks one in the format itself

# The kernels of a model that is read beside the one that is trained.
PLAIN: Final = {"cpu": "documents", "cuda": "flex"}


def attention_kernels(run: "Resolved") -> dict[str, str]:
    """Device type → kernel."""
    kernel = run.spec.model.attention
    if kernel != "auto":
        return {"cpu": str(kernel), "cuda": str(kernel)}
    return {**PLAIN, "cpu": "blocks"} if in_blocks(run) else dict(PLAIN)


def in_blocks(run: "Resolved") -> bool:
    """Whether blocks are the fastest on a CPU; a ring has a kernel of its own, and what is compiled keeps torch's."""
    return (
        SHORTEST <= run.batch.sequence <= LONGEST
        and run.formats.compute in EXACT
        and run.size("ring") == 1
        and run.spec.compile.mode == "none"
    )
