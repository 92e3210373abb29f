"""Tokens as text for people: special ones by their names, and what is only a part of a character by its bytes."""

import re
from collections.abc import Sequence
from itertools import groupby

from xtrain.runtime.data.documents.tokenizers import TextTokenizer

UNREADABLE = "\N{REPLACEMENT CHARACTER}"


def written(tokenizer: TextTokenizer, ids: Sequence[int], before: int | None = None) -> str:
    """The text of `ids` as it stands behind the token `before`. A backslash stands before characters that spell the
    name of a special token and are none, and before every backslash in front of such a name or such a token."""
    names = "|".join(map(re.escape, sorted(tokenizer.special_names, key=len, reverse=True)))
    found: list[str] = []
    for special, group in groupby(ids, key=tokenizer.specials.__contains__):
        some = list(group)
        if special:
            if found:
                found[-1] = re.sub(r"\\+\Z", lambda end: end[0] * 2, found[-1])
            found.append("".join(map(tokenizer.piece, some)))
        else:
            text = continued(tokenizer, some, before)
            found.append(re.sub(rf"(\\*)({names})", r"\1\1\\\2", text) if names else text)
        before = some[-1]
    return "".join(found)


def continued(tokenizer: TextTokenizer, ids: Sequence[int], before: int | None) -> str:
    """The text that tokens which are not special add to that of the token `before`.

    Decoders treat the beginning of a text in their own way, many leave out a space there.
    """
    if before is None or before in tokenizer.specials:
        return tokenizer.decode(ids)
    head, whole = tokenizer.decode([before]), tokenizer.decode([before, *ids])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)


def pieces(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """The text of every token by itself; as the vocabulary writes it, where that is no text."""
    found, before = [], None
    for token in ids:
        text = tokenizer.piece(token) if token in tokenizer.specials else continued(tokenizer, [token], before)
        found.append(tokenizer.piece(token) if not text or UNREADABLE in text else text)
        before = token
    return found
