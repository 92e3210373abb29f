"""Which rooms open rows have left, as a set of bits that is asked for the least room that is enough; compiled.

Room is a small whole number: bit r of the words says whether some row has room r. A second level of bits, the summary,
says which words are not 0, so that two or three words answer.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xtrain.runtime.data.jit import kernel

SIX, WORD = np.uint64(6), np.uint64(63)
ONE = np.uint64(1)


def _lowest_bit(typing, word):
    """Index of the lowest set bit of a uint64 that is not 0: one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


# What it is called with is not what the text above takes: numba gives it the types.
lowest_bit: Any = intrinsic(_lowest_bit)


@kernel
def no_rooms(capacity):
    """An empty set of rooms 0 … capacity: its words and their summary, uint64.

    The last bit of the words, beyond the capacity, is always set, so that every search ends.
    """
    words = np.zeros((capacity + 1 >> 6) + 1, np.uint64)
    summary = np.zeros((len(words) >> 6) + 1, np.uint64)
    add_room(words, summary, len(words) * 64 - 1)
    return words, summary


@kernel
def least_room(words, summary, needed):
    """The least room in the set from `needed` on, beyond the capacity if there is none; uint64 both."""
    # Written this way, with no other number than uint64, numba counts no references here; else a search takes thrice
    # the time.
    at = needed >> SIX
    word = words[at] >> (needed & WORD)
    if word:
        return needed + lowest_bit(word)
    at += ONE
    block = at >> SIX
    word = summary[block] >> (at & WORD)
    if word:
        at += lowest_bit(word)
        return (at << SIX) + lowest_bit(words[at])
    block += ONE
    while not summary[block]:
        block += ONE
    at = (block << SIX) + lowest_bit(summary[block])
    return (at << SIX) + lowest_bit(words[at])


@kernel
def add_room(words, summary, room):
    bit = np.uint64(room)
    at = bit >> SIX
    words[at] |= ONE << (bit & WORD)
    summary[at >> SIX] |= ONE << (at & WORD)


@kernel
def remove_room(words, summary, room):
    """Take out a room that is in the set."""
    bit = np.uint64(room)
    at = bit >> SIX
    words[at] ^= ONE << (bit & WORD)
    if not words[at]:
        summary[at >> SIX] ^= ONE << (at & WORD)
