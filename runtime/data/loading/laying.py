"""Rows of a token store laid out as model inputs in one pass over memory; compiled.

The same as the stages `to_tensor`, `flatten`, `shift_tokens` and `pack` one after the other, which see to each document
in Python: what they give is given here bit for bit.
"""

import numpy as np

from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.jit import kernel


@kernel
def lay_rows(
    indices, row_offsets, document, cut_segments, cut_starts, row_capacity, documents, offsets, tokens, trained,
    align, pad_segment, before, ids, labels, positions, real, bounds, real_lengths,
):  # fmt: skip
    """Fill the outputs for some rows, a negative index meaning a row of padding; (segments, labels).

    `row_offsets` … `row_capacity` are those of `Rows`, `documents` int64 the document of the store each of them stands
    for; `offsets`, `tokens` and `trained` are those of the store. Outputs, all contiguous: int64 `ids`, `labels`,
    `positions` and bool `real` [rows, positions]; int32 `bounds` and `real_lengths` with room for a segment a position,
    and one more. Bounds count from `before`: rows of several stores share outputs, a call for each behind the last. If
    the samples of a row do not fit, the answer is (-1 - row, positions needed).
    """
    capacity = ids.shape[1]
    segments, valid = 0, 0
    begins, lengths = np.empty(256, np.int64), np.empty(256, np.int64)
    bounds[0] = before
    for row in range(len(indices)):
        filled = 0
        index = indices[row]
        first, last = (row_offsets[index], row_offsets[index + 1]) if index >= 0 else (row_offsets[0], row_offsets[0])
        cut = _first_at_least(cut_segments, first)
        if last - first > len(begins):
            begins, lengths = np.empty(2 * (last - first), np.int64), np.empty(2 * (last - first), np.int64)
        # Documents lie far apart. Where they are is looked up first, for all of a row, so that these reads from memory
        # wait beside each other, and not each behind the copy before it.
        for segment in range(first, last):
            origin = documents[document[segment]]
            begin, end = offsets[origin], offsets[origin + 1]
            if cut < len(cut_segments) and cut_segments[cut] == segment:
                begin += cut_starts[cut]
                cut += 1
            begins[segment - first], lengths[segment - first] = begin, min(end - begin - 1, row_capacity)
        for segment in range(last - first):
            begin, length = begins[segment], lengths[segment]
            room = length if align == 1 else (length + align - 1) // align * align
            if filled + room > capacity:
                return -1 - row, filled + room
            # Slices of one row each: the loops over them need no multiplication and become vector instructions.
            _copy(tokens[begin : begin + length], ids[row, filled : filled + length])
            following = tokens[begin + 1 : begin + 1 + length]
            # Compiled for masks or for none: without them this is no question.
            if trained is None:
                _copy(following, labels[row, filled : filled + length])
                valid += length
            else:
                mask = trained[begin + 1 : begin + 1 + length]
                valid += _copy_trained(following, mask, labels[row, filled : filled + length])
            _count(positions[row, filled : filled + room])
            real[row, filled : filled + length] = True
            _blank(row, filled + length, filled + room, ids, labels, real)
            filled += room
            real_lengths[segments] = length
            segments += 1
            bounds[segments] = before + row * capacity + filled
        _blank(row, filled, capacity, ids, labels, real)
        while filled < capacity:
            room = min(pad_segment, capacity - filled)
            _count(positions[row, filled : filled + room])
            filled += room
            real_lengths[segments] = 0
            segments += 1
            bounds[segments] = before + row * capacity + filled
    return segments, valid


@kernel
def _first_at_least(ascending, value):
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) >> 1
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _copy(source, target):
    for at in range(len(target)):
        target[at] = source[at]


@kernel
def _copy_trained(source, mask, target):
    trained = 0
    for at in range(len(target)):
        target[at] = source[at] if mask[at] else IGNORE_INDEX
        trained += mask[at] != 0
    return trained


@kernel
def _count(target):
    for at in range(len(target)):
        target[at] = at


@kernel
def _blank(row, begin, end, ids, labels, real):
    ids[row, begin:end] = 0
    labels[row, begin:end] = IGNORE_INDEX
    real[row, begin:end] = False
