"""Documents that resemble an earlier one, by MinHash and locality-sensitive hashing with datasketch. Without torch.

The similarity of two documents is the Jaccard index of their sets of `WORDS` words in a row, estimated by the share of
`PERMUTATIONS` minima that agree (Broder 1997). Documents are compared if all minima of a band agree; datasketch chooses
the bands for a similarity. The minima are in a file; memory holds a byte for each document, and hashes of `AT_ONCE`
documents at once.
"""

import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.words import words

WORDS: Final = 5
PERMUTATIONS: Final = 128
AT_ONCE: Final = 1 << 23
BLOCK: Final = 1 << 14
_SEED: Final = 1


def datasketch() -> Any:
    """Import the package. Raises DataError if it is missing."""
    try:
        import datasketch
    except ImportError:
        remedy = 'Install it with `pip install "xtrain[minhash]"`.'
        raise DataError("`deduplicate` with a number needs the package datasketch", remedy=remedy) from None
    return datasketch


def datasketch_version() -> str:
    """Return the version of the installed package, on which minima may depend; empty without it."""
    try:
        return version("datasketch")
    except PackageNotFoundError:
        return ""


def resembling_documents(
    texts: Iterator[str], count: int, similarity: float, folder: Path, at_once: int = AT_ONCE
) -> np.ndarray:
    """Return the numbers of `count` texts that resemble an earlier one by at least `similarity`, int64, ascending.

    A text is left out whether or not the earlier one is left out too. In a band, texts are compared with the first of
    those that agree, and those unlike it with the next one. folder: for a temporary file of 512 bytes a text. Raises
    DataError without datasketch, and OSError.
    """
    package = datasketch()
    lsh = package.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        for text in texts:
            sketch = package.MinHash(num_perm=PERMUTATIONS, seed=_SEED)
            sketch.update_batch(list(shingles(text)))
            file.write(sketch.hashvalues.astype(np.uint32).tobytes())
        file.flush()
        if count == 0:
            return np.empty(0, dtype=np.int64)
        minima_NP = np.memmap(file, dtype=np.uint32, mode="r", shape=(count, PERMUTATIONS))
        similar_N = np.zeros(count, dtype=bool)
        least = int(np.ceil(similarity * PERMUTATIONS - 1e-9))
        for band in range(lsh.b):
            for group in _agreeing(minima_NP, range(band * lsh.r, (band + 1) * lsh.r), at_once):
                _compare(minima_NP, group, least, similar_N)
    return np.flatnonzero(similar_N)


def shingles(text: str) -> set[bytes]:
    """Return the different runs of `WORDS` words of a text; of a shorter text, all of it."""
    own = words(text) or [text]
    return {" ".join(own[first : first + WORDS]).encode() for first in range(max(1, len(own) - WORDS + 1))}


def _agreeing(minima_NP: np.ndarray, columns: range, at_once: int) -> Iterator[np.ndarray]:
    """Yield the numbers of texts that agree in all columns, ascending; no single ones. Reads the minima once for each
    `at_once` texts."""
    count = len(minima_NP)
    parts = -(-count // at_once)
    factors = np.random.default_rng(_SEED).integers(1 << 62, size=len(columns), dtype=np.uint64) | np.uint64(1)
    for part in range(parts):
        numbers, hashes = [], []
        for first in range(0, count, BLOCK):
            block = minima_NP[first : first + BLOCK, columns.start : columns.stop].astype(np.uint64)
            found = (block * factors).sum(axis=1, dtype=np.uint64)  # of 64 bits; what collides is compared and differs
            own = np.flatnonzero(found % np.uint64(parts) == part)
            numbers.append(own + first)
            hashes.append(found[own])
        number_M, hash_M = np.concatenate(numbers), np.concatenate(hashes)
        order = np.argsort(hash_M, kind="stable")
        starts = np.flatnonzero(np.diff(hash_M[order], prepend=hash_M[order[:1]] + np.uint64(1)))
        for group in np.split(number_M[order], starts[1:]):
            if len(group) > 1:
                yield group


def _compare(minima_NP: np.ndarray, group: np.ndarray, least: int, similar_N: np.ndarray) -> None:
    """Mark the texts of a group of which `least` minima an earlier one has too."""
    rest = group
    while len(rest) > 1:
        first, others, unlike = rest[0], rest[1:], []
        for start in range(0, len(others), BLOCK):
            some = others[start : start + BLOCK]
            like = (minima_NP[some] == minima_NP[first]).sum(axis=1) >= least
            similar_N[some[like]] = True
            unlike.append(some[~like])
        rest = np.concatenate(unlike)
