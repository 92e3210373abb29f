"""Which documents are trained on and which are held out, on disk: mapped, every process of a machine shares them."""

import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..stores.cache_folder import ATTEMPTS, make_folder
from ..stores.store import TokenStore
from .rows_cache import rows_key
from .split import split_holdout

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
        sound = training.dtype == heldout.dtype == np.int64 and len(training) + len(heldout) == documents
        return (training, heldout) if sound else None
    except (OSError, ValueError, EOFError):
        return None


def _write(split: Split, folder: Path) -> None:
    for name, documents in zip(FILES, split, strict=True):
        with (folder / name).open("wb") as file:
            np.save(file, documents, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
