"""Rows cut after their longest document are rows that were packed at that length, in every field."""

import numpy as np
import pytest
import torch
from attrs import fields

from xtrain.components.collators.flatten_torch import flatten
from xtrain.components.collators.pack_torch import pack
from xtrain.components.collators.shift_tokens_torch import shift_tokens
from xtrain.components.collators.to_tensor_torch import to_tensor
from xtrain.runtime.feed.collate import compose, padded_length, trimmed
from xtrain.runtime.feed.microbatch import Microbatch, Units
from xtrain.runtime.feed.packing.stored_rows import RawRow

CAPACITY = 48


def raw(*lengths: int) -> RawRow:
    segments = [np.arange(1, length + 2, dtype=np.uint16) for length in lengths]
    columns = {"w": [np.arange(length + 1, dtype=np.float32) for length in lengths]}
    return RawRow(segments=segments, columns=columns, values={"v": [float(length) for length in lengths]})


def chain(capacity: int, unit: str | None, align: int):
    more = {"unit": unit, "columns": ["w"], "values": ["v"] if unit else []}
    return compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=capacity, align=align, **more)])


def assert_same(ours: object, theirs: object, kind: type) -> None:
    for name in (attribute.name for attribute in fields(kind)):
        one, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(other, Units):
            assert_same(one, other, Units)
        elif isinstance(other, dict):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other), name
        else:
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, name


@pytest.mark.parametrize("unit", [None, "sequence"])
@pytest.mark.parametrize(("rows", "multiple", "align", "length"), [
    (((5,), (9, 3)), 4, 1, 12),
    (((5,), (9, 3)), 8, 4, 16),
    (((2, 2), ()), 4, 4, 8),
    (((), ()), 4, 1, 4),
    (((40,), (3,)), 16, 1, 48),
    (((41,), (3,)), 20, 1, 48),
])  # fmt: skip
def test_cut_rows_are_rows_of_that_length(rows, multiple, align, length, unit):
    whole = chain(CAPACITY, unit, align)([raw(*each) for each in rows])
    assert padded_length(whole, multiple) == length
    assert_same(trimmed(whole, length), chain(length, unit, align)([raw(*each) for each in rows]), Microbatch)
