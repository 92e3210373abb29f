"""Log-probabilities of a reference on disk: a number for each token of a store, under a hash of what they depend on."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, frozen

from xtrain.planner.canonical import DATA, digest
from xtrain.regular_files import read_json
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.stores.cache_folder import make_folder, move_aside

# Part of every key: raise it whenever the same weights and documents would give other numbers.
FORMAT: Final = 1
NUMBERS, META = "logprobs.bin", "meta.json"
DTYPES: Final = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
AT_ONCE: Final = 1 << 20  # numbers


def column_key(depends_on: Any) -> str:
    """Hex name of the numbers that JSON values determine."""
    return digest([FORMAT, depends_on], DATA, size=16)


@frozen(kw_only=True, eq=False)
class StoredColumn:
    """numbers: [tokens], mapped and read-only; NaN of tokens that nothing is computed of. digest: of their bytes."""

    numbers: np.ndarray
    digest: str


def open_column(folder: Path, tokens: int, form: str) -> StoredColumn | None:
    """The column in `folder`; None if it is missing, unreadable, or not so many numbers of this format."""
    try:
        meta = read_json(folder / META)
        numbers = np.asarray(np.memmap(folder / NUMBERS, dtype=DTYPES[form], mode="r"))
        intact = (
            (meta["format"], meta["numbers"], meta["tokens"]) == (FORMAT, form, tokens) == (FORMAT, form, len(numbers))
        )
        return StoredColumn(numbers=numbers, digest=str(meta["digest"])) if intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@define(eq=False)
class ColumnWriter:
    """A column under way."""

    numbers: np.ndarray

    def put(self, places: np.ndarray, values: np.ndarray) -> None:
        """places: int64, tokens; -1 among them is left out. values: of the same shape."""
        known = places >= 0
        self.numbers[places[known]] = values[known]


def write_column(
    folder: Path, tokens: int, form: str, covers: Any, fill: Callable[[ColumnWriter], None], *, replaces: bool
) -> None:
    """Put the column that `fill` writes at `folder`, in one step; all of it is NaN before.

    covers: JSON values that it depends on, for people. replaces: what stands there makes room. Raises what `fill`
    raises, and DataError if the cache cannot be written.
    """

    def write(partial: Path) -> None:
        with _growing(partial / NUMBERS, tokens, DTYPES[form]) as numbers:
            fill(ColumnWriter(numbers))
        meta = {"format": FORMAT, "numbers": form, "tokens": tokens, "digest": _digest(partial / NUMBERS)}
        with (partial / META).open("wb") as file:
            file.write(json.dumps({**meta, "covers": covers}, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())

    try:
        if replaces:
            folder.parent.mkdir(parents=True, exist_ok=True)
            move_aside(folder)
        make_folder(folder, write, lambda there: open_column(there, tokens, form) is not None)
    except OSError as error:
        remedy = "Free some space or choose another cache folder."
        raise DataError(f"cannot write log-probabilities: {error}", path=folder, remedy=remedy) from error


@contextmanager
def _growing(path: Path, tokens: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """An array of NaN in a file, which is on the disk behind the block."""
    numbers = np.memmap(path, dtype=dtype, mode="w+", shape=(tokens,))
    for first in range(0, tokens, AT_ONCE):
        numbers[first : first + AT_ONCE] = np.nan
    yield numbers
    numbers.flush()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    content = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            content.update(block)
    return content.hexdigest()
