"""Tensors of the wire: dense, or the values of a sparse matrix by rows (CSR), little-endian."""

from math import prod
from typing import Any, Final

import numpy as np

from xtrain.server.engine import Array
from xtrain.server.protobuf import Malformed

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STORED: Final = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
# Limit over all tensors of a request: a sparse matrix of a few bytes can stand for a dense one of any size.
MOST_NUMBERS: Final = 2**24


def read_tensor(tensor: dict[str, Any], most: int = MOST_NUMBERS) -> Array:
    """Return a tensor, float32 or int64, with the dims of its shape; without a shape one dim. most: maximum of numbers.
    Raises Malformed."""
    dtype, shape = tensor.get("dtype", 0), tensor.get("shape", [])
    if dtype not in STORED:
        raise Malformed(f"dtype {dtype}; known are {', '.join(map(str, STORED))}")
    if len(shape) > 2:
        raise Malformed(f"a shape of {len(shape)} dims; there may be two")
    if max(shape, default=0) > most or prod(shape) > most:
        raise Malformed(f"more than {MOST_NUMBERS} numbers in the tensors of a request")
    if "csr" in tensor:
        return _dense_of(tensor["csr"], dtype, shape)
    flat = _numbers(tensor.get("dense", b""), dtype)
    if shape and prod(shape) != flat.size:
        raise Malformed(f"{flat.size} numbers for a shape {shape}")
    return flat.reshape(shape) if shape else flat


def _dense_of(csr: dict[str, Any], dtype: int, shape: list[int]) -> Array:
    if len(shape) != 2:
        raise Malformed("a sparse tensor without a shape of two dims")
    values = _numbers(csr.get("values", b""), dtype)
    starts, columns = (_numbers(csr.get(name, b""), INT64) for name in ("crow", "col"))
    rows, width = shape
    fits = (
        starts.size == rows + 1
        and starts[0] == 0
        and starts[-1] == values.size == columns.size
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < width)).all())
    )
    if not fits:
        raise Malformed("rows and columns of a sparse tensor that do not fit its shape and values")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(starts)), columns] = values
    return dense


def _numbers(raw: bytes | memoryview, dtype: int) -> Array:
    stored = np.dtype(STORED[dtype])
    if len(raw) % stored.itemsize:
        raise Malformed(f"{len(raw)} bytes for numbers of {stored.itemsize}")
    numbers = np.frombuffer(raw, stored)
    if dtype == BFLOAT16:  # the upper half of a float32
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.int64) if dtype == INT32 else numbers
