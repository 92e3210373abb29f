"""How many bytes of text tokens stand for, from what a `tokenizer.json` says of how they are decoded."""

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

import numpy as np
from attrs import frozen

SPACE: Final = "▁"  # stands for a space in vocabularies of SentencePiece
# `<0x0A>`: a byte, in vocabularies that spell unknown characters in bytes.
BYTE_NAMES: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@frozen(kw_only=True, eq=False)
class TokenBytes:
    """Bytes of UTF-8 that each token stands for, int64 [vocabulary] both: 0 for special tokens.

    first: where the token is the first of a text. Some tokenizers put a space before it, which is not part of the text.
    """

    inside: np.ndarray
    first: np.ndarray


def token_bytes(
    content: bytes, vocabulary: Mapping[str, int], added: Set[int], specials: Set[int], size: int
) -> TokenBytes | None:
    """Count the bytes of the tokens of a `tokenizer.json`. None if they stand for no fixed number of bytes, as where
    words are put together with spaces. added: tokens that stand for themselves.

    Together the tokens of a text have the bytes of what they decode to, which is the text as its normalizer leaves it.
    """
    described = json.loads(content)
    decoders = list(_steps(described.get("decoder"), "decoders"))
    kinds = {each["type"] for each in decoders}
    prepended = False
    if "ByteLevel" in kinds:
        readers = _steps(described.get("pre_tokenizer"), "pretokenizers")
        prepended = any(each["type"] == "ByteLevel" and each.get("add_prefix_space") for each in readers)
        mark = "Ġ"
    elif "Metaspace" in kinds or any(each.get("pattern") == {"String": SPACE} for each in decoders):
        prepended = any(
            (each["type"] == "Strip" and each.get("content") == " " and each.get("start", 0) > 0)
            or (each["type"] == "Metaspace" and each.get("prepend_scheme", "always") != "never")
            for each in decoders
        )
        mark = SPACE
    else:
        return None
    inside, first = np.zeros((2, size), dtype=np.int64)
    for piece, token in vocabulary.items():
        if token in specials:
            continue
        if token in added:
            count = len(piece.encode())
        elif mark != SPACE:
            count = len(piece)  # each character is a byte
        else:
            spelt = piece in BYTE_NAMES and "ByteFallback" in kinds
            count = 1 if spelt else len(piece.replace(SPACE, " ").encode())
        inside[token] = count
        first[token] = count - (prepended and piece.startswith(mark))
    return TokenBytes(inside=inside, first=first)


def _steps(part: dict[str, Any] | None, several: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of a `tokenizer.json`, of which a sequence has `several`."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[several]:
        yield from _steps(step, several)
