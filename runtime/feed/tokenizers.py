"""Tokenizers: their interface, opening the tokenizer of a plan, bytes per token, long texts, tokens as readable text.

A tokenizer takes hundreds of bytes of memory per character, so `joined` tokenizes long texts in pieces. At the ends of
a piece the tokens differ from those in the middle of a text: a tokenizer may add a space or split words in another way.
Pieces therefore overlap, and one continues the other where both have the same tokens at the same positions for long
enough.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from attrs import frozen

from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.runtime.base.ops import code_of

SPACE: Final = "▁"  # stands for a space in vocabularies of SentencePiece
# `<0x0A>`: a byte, in vocabularies that spell unknown characters in bytes.
BYTE_NAMES: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@frozen(kw_only=True, eq=False)
class TokenBytes:
    """Bytes of UTF-8 that each token stands for, int64 [vocabulary] both: 0 for special tokens.

    first: for the first token of a text. Some tokenizers put a space before it, which is not part of the text.
    """

    inside: np.ndarray
    first: np.ndarray


def token_bytes(
    content: bytes, vocabulary: Mapping[str, int], added: Set[int], specials: Set[int], size: int
) -> TokenBytes | None:
    """Count the bytes of the tokens of a `tokenizer.json`.

    None if they have no fixed number of bytes, as where words are joined with spaces. added: tokens that stand for
    themselves. Together the tokens of a text have the bytes of their decoded text, which is the text after the
    normalizer.
    """
    described = json.loads(content)
    decoders = list(_steps(described.get("decoder"), "decoders"))
    kinds = {decoder["type"] for decoder in decoders}
    prepended = False
    if "ByteLevel" in kinds:
        readers = _steps(described.get("pre_tokenizer"), "pretokenizers")
        prepended = any(reader["type"] == "ByteLevel" and reader.get("add_prefix_space") for reader in readers)
        mark = "Ġ"
    elif "Metaspace" in kinds or any(decoder.get("pattern") == {"String": SPACE} for decoder in decoders):
        prepended = any(
            (decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start", 0) > 0)
            or (decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never")
            for decoder in decoders
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
    """Yield the steps of a part of a `tokenizer.json`; a sequence has them under `several`."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[several]:
        yield from _steps(step, several)


@frozen(kw_only=True, eq=False)
class Placed:
    """The tokens of a text and their positions in it."""

    ids: np.ndarray
    """Unsigned integers of at most 32 bits [tokens]."""
    starts: np.ndarray
    """int64 [tokens]: the first character of each."""
    ends: np.ndarray
    """int64 [tokens]: one more than the last character of each."""


class TextTokenizer(Protocol):
    """Interface of tokenizers for data and generation. Ids are below `vocab_size`; encoding adds no bos and no eos."""

    @property
    def name(self) -> str:
        """The user's name of the tokenizer."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes whenever the same text could get other ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos(self) -> int:
        """Id that starts every document."""
        ...

    @property
    def eos(self) -> int:
        """Id that ends every document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, unsigned integers of at most 32 bits, shape [tokens]."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` without special tokens."""
        ...

    @property
    def specials(self) -> Set[int]:
        """Ids that are no text, as bos and eos."""
        ...

    def piece(self, token: int) -> str:
        """Return one token as the vocabulary writes it: the name of a special one; others are not always valid text."""
        ...

    @property
    def has_bos(self) -> bool:
        """True if bos is a token of its own, not eos instead of it."""
        ...

    @property
    def begins_with(self) -> tuple[int, ...]:
        """Ids that the tokenizer itself puts before a text, as other libraries use it."""
        ...

    @property
    def bytes_of(self) -> TokenBytes | None:
        """Bytes of text of each token; None if they are not fixed."""
        ...

    @property
    def special_names(self) -> Mapping[str, int]:
        """Names of special tokens as templates write them, and their ids."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Chat template of the tokenizer; None without one."""
        ...

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """Return the tokens of rendered texts, in which names of special tokens become these tokens."""
        ...


def load_tokenizer(source: str, base: Path) -> TextTokenizer:
    """Open the tokenizer that a spec or a plan names; paths are relative to `base`.

    Raises DataError as HuggingFaceTokenizer does.
    """
    kind = tokenizer_kind(source)
    return code_of(kind, kind.run_module()).open_tokenizer(source, base)


PIECE: Final = 1 << 20
"""Characters of a piece."""
OVERLAP: Final = 1 << 13
"""Characters in common of two pieces; more if their tokens differ there."""
VARIED: Final = 32
"""Number of different tokens from which a text without words counts as no repetition."""


def joined(text: str, encode: Callable[[str], Placed], piece: int = PIECE, overlap: int = OVERLAP) -> np.ndarray:
    """Return the ids of a text, uint32 [tokens], as if tokenized whole. encode: returns the tokens of a text with
    positions."""
    parts: list[np.ndarray] = []
    # of the piece: its position, the first token that is not taken yet
    begin, first, tokens = 0, 0, encode(text[:piece])
    while (end := begin + piece) < len(text):
        common = overlap
        while common < piece // 2:
            others = encode(text[end - common : end - common + piece])
            if (cut := _cut(tokens, others, text[begin:end], piece - common, common)) is not None:
                break
            common *= 4
        else:  # every token depends on the end of the text
            return encode(text).ids
        parts.append(tokens.ids[first : cut[0]])
        begin, first, tokens = end - common, cut[1], others
    return np.concatenate([*parts, tokens.ids[first:]])


def _cut(tokens: Placed, others: Placed, text: str, offset: int, common: int) -> tuple[int, int] | None:
    """Return where the next piece continues: token numbers in the piece and in the next one.

    None if their tokens differ in the middle half of the overlap, or if that half has neither a word boundary nor many
    different tokens: the split of `aaaa…` is decided at its end. text: the piece. offset: position of the next piece in
    it.
    """
    low, high = offset + common // 4, offset + common - common // 4
    spans = [
        (int(np.searchsorted(placed.starts, low - moved)), int(np.searchsorted(placed.starts, high - moved)))
        for placed, moved in ((tokens, 0), (others, offset))
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


UNREADABLE = "\N{REPLACEMENT CHARACTER}"


def written(tokenizer: TextTokenizer, ids: Sequence[int], before: int | None = None) -> str:
    """Return the text of `ids` after the token `before`.

    A backslash precedes characters that spell the name of a special token without being one, and every backslash before
    such a name or token.
    """
    names = "|".join(map(re.escape, sorted(tokenizer.special_names, key=len, reverse=True)))
    parts: list[str] = []
    for special, group in groupby(ids, key=tokenizer.specials.__contains__):
        some = list(group)
        if special:
            if parts:
                parts[-1] = re.sub(r"\\+\Z", lambda end: end[0] * 2, parts[-1])
            parts.append("".join(map(tokenizer.piece, some)))
        else:
            text = continued(tokenizer, some, before)
            parts.append(re.sub(rf"(\\*)({names})", r"\1\1\\\2", text) if names else text)
        before = some[-1]
    return "".join(parts)


def continued(tokenizer: TextTokenizer, ids: Sequence[int], before: int | None) -> str:
    """Return the text that tokens other than special ones add after the token `before`.

    Decoders treat the beginning of a text differently; many leave out a space there.
    """
    if before is None or before in tokenizer.specials:
        return tokenizer.decode(ids)
    head, whole = tokenizer.decode([before]), tokenizer.decode([before, *ids])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)


def pieces(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; as the vocabulary writes it if it is not valid text."""
    texts, before = [], None
    for token in ids:
        text = tokenizer.piece(token) if token in tokenizer.specials else continued(tokenizer, [token], before)
        texts.append(tokenizer.piece(token) if not text or UNREADABLE in text else text)
        before = token
    return texts
