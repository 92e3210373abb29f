"""Which documents are kept back for evaluation."""

import numpy as np

from ..errors import DataError

# Row orders key the same generator by (seed, epoch); no epoch gets this far, so the two never share a stream.
STREAM = 2**64 - 1


def split_holdout(offsets: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into (training, held out), both int64 [documents of that part], ascending.

    `offsets` int64 [documents + 1] are token offsets. Documents are held out in a seeded random order until they hold
    `fraction` of all tokens: at least one if `fraction` > 0, all but one at most if `fraction` < 1. The result
    depends on the three arguments alone.
    Raises DataError if `fraction` is outside [0, 1], or for a single document that would have to be in both parts.
    """
    if not 0.0 <= fraction <= 1.0:
        raise DataError(f"hold-out fraction {fraction} is outside 0 to 1")
    lengths = np.diff(offsets)
    documents = np.arange(len(lengths), dtype=np.int64)
    if fraction == 0.0:
        return documents, documents[:0]
    if fraction == 1.0:
        return documents[:0], documents
    if len(documents) < 2:
        raise DataError(
            f"{len(documents)} document cannot be split into training and hold-out",
            remedy="Add documents, or set the hold-out fraction to 0 or 1.",
        )
    key = np.array([seed, STREAM], dtype=np.uint64)
    shuffled = np.random.Generator(np.random.Philox(key=key)).permutation(documents)
    heldout_tokens = np.cumsum(lengths[shuffled])
    enough = int(np.searchsorted(heldout_tokens, fraction * heldout_tokens[-1])) + 1
    count = min(enough, len(documents) - 1)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
