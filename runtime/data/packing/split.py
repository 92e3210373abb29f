"""Which documents are kept back for evaluation."""

import os
from pathlib import Path

import numpy as np

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.packing.rows_cache import rows_key
from xtrain.runtime.data.stores.cache_folder import ATTEMPTS, make_folder
from xtrain.runtime.data.stores.store import TokenStore

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


# on disk -------------------------------------------------------------------------------------------------------------


FILES = ("training.npy", "heldout.npy")
Split = tuple[np.ndarray, np.ndarray]


def cached_split(store: TokenStore, cache: Path, holdout: float, seed: int) -> Split:
    """(training, held out) as `split_holdout` gives them, worked out now if they are not in `cache`.

    Raises DataError as `split_holdout` does, and if the cache cannot be written.
    """
    folder = cache / f"split-{rows_key(store=store.folder, documents=store.num_documents, holdout=holdout, seed=seed)}"
    for _ in range(ATTEMPTS):
        if (found := _open(folder, store.num_documents)) is not None:
            return found
        split = split_holdout(store.offsets, holdout, seed)
        try:
            make_folder(
                folder,
                lambda partial, split=split: _write(split, partial),
                lambda there: _open(there, store.num_documents) is not None,
            )
        except OSError as error:
            remedy = "Free some space or choose another cache folder."
            raise DataError(
                f"cannot write which documents are held out: {error}", path=folder, remedy=remedy
            ) from error
    raise DataError("the file was damaged while it was written", path=folder, remedy="Check this file system.")


def _open(folder: Path, documents: int) -> Split | None:
    """What is in the folder, or None if it is missing or not whole."""
    try:
        training, heldout = (np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False)) for name in FILES)
        intact = training.dtype == heldout.dtype == np.int64 and len(training) + len(heldout) == documents
        return (training, heldout) if intact else None
    except (OSError, ValueError, EOFError):
        return None


def _write(split: Split, folder: Path) -> None:
    for name, documents in zip(FILES, split, strict=True):
        with (folder / name).open("wb") as file:
            np.save(file, documents, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
