"""The kinds of value that flow through a collate chain, in the order in which they come to be.

One vocabulary for the links of a spec, the edges of a plan, the stages of a run and the `@collator` of a user.
"""

from typing import Final

RAW_ROWS: Final = "rows of token arrays"
TENSOR_ROWS: Final = "rows of token tensors"
TOKEN_SAMPLES: Final = "token samples"
LABELLED_SAMPLES: Final = "labelled samples"
MICROBATCH: Final = "microbatch"
LOCAL_MICROBATCH: Final = "part of a microbatch"

KINDS: Final = (RAW_ROWS, TENSOR_ROWS, TOKEN_SAMPLES, LABELLED_SAMPLES, MICROBATCH, LOCAL_MICROBATCH)
# Who makes these decides how rows are laid out and cut, which the plan has to know: only `pack` and `shard` do.
_LAID_OUT: Final = (MICROBATCH, LOCAL_MICROBATCH)


def may_give(takes: str) -> tuple[str, ...]:
    """The kinds that a collator of the user's may make of what it takes: the same, or a later one before `pack`."""
    if takes in _LAID_OUT:
        return (takes,)
    return tuple(kind for kind in KINDS[KINDS.index(takes) :] if kind not in _LAID_OUT)
