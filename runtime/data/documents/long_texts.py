"""Ids of long texts, put together from those of pieces that overlap.

A tokenizer takes hundreds of bytes of memory for a character. What it does at the ends of a piece is not what it does
in the middle of the text: it may put a space before it, or split blanks and words otherwise. So pieces overlap, and one
is continued by the next where both have the same tokens in the same places for long enough.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from xtrain.runtime.data.documents.tokenizers import Placed

PIECE: Final = 1 << 20
"""Characters of a piece."""
OVERLAP: Final = 1 << 13
"""Characters that two pieces have in common; more where they have other tokens there."""
VARIED: Final = 32
"""Different tokens from which on a text without words is no repetition."""


def joined(text: str, encode: Callable[[str], Placed], piece: int = PIECE, overlap: int = OVERLAP) -> np.ndarray:
    """Ids of a text, uint32 [tokens], as of the whole. encode: gives the tokens of a text and their places in it."""
    found: list[np.ndarray] = []
    begin, first, tokens = 0, 0, encode(text[:piece])  # of the piece: its place, the first token that is not taken yet
    while (end := begin + piece) < len(text):
        common = overlap
        while common < piece // 2:
            others = encode(text[end - common : end - common + piece])
            if (cut := _cut(tokens, others, text[begin:end], piece - common, common)) is not None:
                break
            common *= 4
        else:  # where the text ends decides on every token
            return encode(text).ids
        found.append(tokens.ids[first : cut[0]])
        begin, first, tokens = end - common, cut[1], others
    return np.concatenate([*found, tokens.ids[first:]])


def _cut(tokens: Placed, others: Placed, text: str, offset: int, common: int) -> tuple[int, int] | None:
    """Numbers of the token from which on the next piece decides: in the piece, and in the next one.

    None if both have other tokens in the middle half of what they have in common, or if that has neither the beginning
    or end of a word nor many tokens: how `aaaa…` is divided is decided at its end. text: the piece. offset: place of
    the next piece in it.
    """
    low, high = offset + common // 4, offset + common - common // 4
    spans = [
        (int(np.searchsorted(each.starts, low - moved)), int(np.searchsorted(each.starts, high - moved)))
        for each, moved in ((tokens, 0), (others, offset))
    ]
    (first, last), (second, after) = spans
    places = tokens.starts[first:last]
    same = np.array_equal(tokens.ids[first:last], others.ids[second:after])
    if not same or not np.array_equal(places, others.starts[second:after] + offset):
        return None
    middle = (last - first) // 2
    by_distance = sorted(range(last - first), key=lambda index: abs(index - middle))
    for index in by_distance:
        if text[places[index] - 1].isspace() != text[places[index]].isspace():
            return first + index, second + index
    return (first + middle, second + middle) if len(np.unique(tokens.ids[first:last])) >= VARIED else None
