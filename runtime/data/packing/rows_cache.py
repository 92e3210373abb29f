"""Packed rows on disk, under the hash of everything they depend on, mapped into memory by those that read them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.planner.canonical import DATA, digest
from xtrain.regular_files import read_json
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.packing.rows import Rows
from xtrain.runtime.data.stores.cache_folder import ATTEMPTS, make_folder

# Part of every key: raise it whenever the same documents and settings would be packed otherwise.
FORMAT = 2
ARRAYS: Final = ("document", "row_offsets", "cut_segments", "cut_starts")
NUMBERS: Final = (
    "capacity", "align", "num_positions", "num_truncated", "num_skipped", "num_empty", "num_dropped_positions",
)  # fmt: skip


def rows_key(**depends_on: Any) -> str:
    """Hex name of the rows that these JSON values determine: the store, the choice of documents, the packing."""
    return digest([FORMAT, depends_on], DATA, size=16)


def cached_rows(folder: Path, pack: Callable[[], Rows]) -> Rows:
    """Open the rows in `folder`, calling `pack` first if they are missing or damaged.

    Raises what `pack` raises, and DataError if the folder cannot be written.
    """
    for _ in range(ATTEMPTS):
        rows = open_rows(folder)
        if rows is not None:
            return rows
        _store(pack(), folder)
        # What is mapped from the files can be dropped from memory at any time, and all ranks share it.
    raise DataError("packed rows were damaged while they were written", path=folder, remedy="Check this file system.")


def open_rows(folder: Path) -> Rows | None:
    """The rows in `folder`, or None if any part of them is missing, unreadable or not what was written."""
    try:
        meta = read_json(folder / "meta.json")
        values: dict[str, Any] = {name: _mapped(folder / f"{name}.npy") for name in ARRAYS}
        values |= {name: int(meta[name]) for name in NUMBERS}
        rows = Rows(**values)
        # The fingerprint is that of bytes, and says nothing about what they are taken for.
        shapes = all(values[name].ndim == 1 and values[name].dtype in (np.int32, np.int64) for name in ARRAYS)
        intact = shapes and meta["format"] == FORMAT and meta["fingerprint"] == rows.fingerprint()
        return rows if intact else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def num_rows(folder: Path) -> int | None:
    """How many rows there are in `folder`, without reading them; None if there are none, or of another format."""
    try:
        if read_json(folder / "meta.json")["format"] != FORMAT:
            return None
        return len(_mapped(folder / "row_offsets.npy")) - 1
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _store(rows: Rows, folder: Path) -> None:
    try:
        make_folder(folder, lambda partial: _write(rows, partial), lambda there: open_rows(there) is not None)
    except OSError as error:
        remedy = "Free some space or choose another cache folder."
        raise DataError(f"cannot write packed rows: {error}", path=folder, remedy=remedy) from error


def _mapped(path: Path) -> np.ndarray:
    # A plain array over the mapping: slicing a memmap object costs several times as much. Nothing cannot be mapped.
    mapped = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 128 else np.load(path)
    return np.asarray(mapped)


def _write(rows: Rows, folder: Path) -> None:
    for name in ARRAYS:
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, getattr(rows, name), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    meta = {"format": FORMAT, "fingerprint": rows.fingerprint(), **{name: getattr(rows, name) for name in NUMBERS}}
    with (folder / "meta.json").open("wb") as file:
        file.write(json.dumps(meta, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
