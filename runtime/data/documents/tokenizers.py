"""Text to token ids and back: raw bytes, or any `tokenizer.json`."""

import re
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from attrs import frozen

from ....planner.data.tokenizer_folder import TokenizerUnreadable, find_chat_template, find_special_tokens
from ..errors import DataError


@frozen(kw_only=True, eq=False)
class Placed:
    """The tokens of a text and where they stand in it."""

    ids: np.ndarray
    """Unsigned integers of at most 32 bits [tokens]."""
    starts: np.ndarray
    """int64 [tokens]: the first character of each."""
    ends: np.ndarray
    """int64 [tokens]: one behind the last character of each."""


class TextTokenizer(Protocol):
    """What data and generation need of a tokenizer. Ids are below `vocab_size`; encoding adds no bos and no eos."""

    @property
    def name(self) -> str:
        """What the user called it."""
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
        """Ids of `text`, unsigned integers of at most 32 bits, shape [tokens]."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    @property
    def specials(self) -> Set[int]:
        """Ids that are no text, as bos and eos."""
        ...

    def piece(self, token: int) -> str:
        """One token as the vocabulary writes it: the name of a special one, of others not always text."""
        ...

    @property
    def has_bos(self) -> bool:
        """Whether bos is a token of its own, and not eos in its place."""
        ...

    @property
    def special_names(self) -> Mapping[str, int]:
        """How a template writes the special tokens, and their ids."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template for conversations that comes with it, if any does."""
        ...

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """The tokens of texts that a template has written: here the names of special tokens stand for these."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text's UTF-8 form; 256 is bos, 257 is eos."""

    name = "bytes"
    fingerprint = "bytes-258"
    vocab_size = 258
    bos = 256
    eos = 257
    specials = frozenset((bos, eos))
    has_bos = True
    special_names = MappingProxyType({"⟨bos⟩": bos, "⟨eos⟩": eos})
    chat_template = None

    def encode(self, text: str) -> np.ndarray:
        """Bytes of `text`, uint8 [bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the byte ids, others ignored; bytes that form no character become U+FFFD."""
        values = np.asarray(ids, dtype=np.int64)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def piece(self, token: int) -> str:
        """A character of ASCII, the two hexadecimal digits of any other byte, or ⟨bos⟩ and ⟨eos⟩."""
        names = {token: name for name, token in self.special_names.items()}
        return names.get(token) or (chr(token) if token < 128 else f"\\x{token:02x}")

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """Bytes, in which ⟨bos⟩ and ⟨eos⟩ are one token each; all bytes of a character stand where it does."""
        return [self._encode_rendered(text) for text in texts]

    def _encode_rendered(self, text: str) -> Placed:
        ids, starts, ends = [], [], []
        at = 0
        for part in re.split(f"({'|'.join(self.special_names)})", text):
            if part in self.special_names:
                ids.append(np.array([self.special_names[part]], dtype=np.uint16))
                starts.append(np.array([at]))
                ends.append(np.array([at + len(part)]))
            else:
                data = self.encode(part)
                character = np.cumsum((data & 0xC0) != 0x80) - 1 + at  # only the first byte is not 10xxxxxx
                ids.append(data.astype(np.uint16))
                starts.append(character)
                ends.append(character + 1)
            at += len(part)
        return Placed(ids=np.concatenate(ids), starts=np.concatenate(starts), ends=np.concatenate(ends))


class HuggingFaceTokenizer:
    """A `tokenizer.json`, with bos and eos taken from the files beside it or recognised by name.

    Special tokens written out in a text are encoded as the characters they are: a document that quotes
    `<|endoftext|>` does not end there. Truncation and padding set in the file are switched off.
    Raises DataError if the file is missing or unreadable, or if there is neither a bos nor an eos.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise DataError(
                "no such tokenizer", path=path, remedy="Give a folder holding `tokenizer.json`, or the file itself."
            )
        self._content = path.read_bytes()
        try:
            self._backend = _backend(self._content)
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"not a tokenizer: {error}", path=path) from error
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        try:
            special = find_special_tokens(path.parent, vocabulary)
            self.chat_template = find_chat_template(path.parent)
        except TokenizerUnreadable as problem:
            raise DataError(problem.message, path=problem.path, remedy=problem.remedy) from problem
        self.name = str(directory)
        self.bos = special.bos
        self.eos = special.eos
        self.has_bos = special.own_bos
        added = self._backend.get_added_tokens_decoder().items()
        named = {token: each.content for token, each in added if each.special}
        named |= {token: self._backend.id_to_token(token) for token in (self.bos, self.eos)}
        self.specials = frozenset(named)
        self.special_names = {name: token for token, name in named.items()}
        # The largest id, not the number of entries: vocabularies have holes.
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = blake2b(self._content + f"|{self.bos}|{self.eos}".encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # A pickled backend forgets how it treats special tokens.
        return {name: value for name, value in self.__dict__.items() if name not in ("_backend", "_rendered_backend")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend = _backend(self._content)

    @cached_property
    def _rendered_backend(self) -> Any:
        backend = _backend(self._content)
        backend.encode_special_tokens = False
        # It would move the places of tokens away from the blanks in them.
        backend.post_processor = None
        return backend

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint32 [tokens]."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, over all cores unless TOKENIZERS_PARALLELISM says otherwise."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; special tokens and ids beyond the vocabulary are left out."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size and token not in (self.bos, self.eos)]
        return self._backend.decode(known, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """As `tokenizer.json` writes it; `⟨7⟩` for an id that it does not have."""
        return self._backend.id_to_token(token) or f"⟨{token}⟩"

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """Ids, uint32, and places of the tokens of rendered conversations."""
        found = []
        for encoding in self._rendered_backend.encode_batch(list(texts), add_special_tokens=False):
            places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            ids = np.asarray(encoding.ids, dtype=np.uint32)
            found.append(Placed(ids=ids, starts=places[:, 0], ends=places[:, 1]))
        return found


def _backend(content: bytes) -> Any:
    from tokenizers import Tokenizer as Backend

    backend: Any = Backend.from_str(content.decode())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def load_tokenizer(kind: str, base: Path) -> TextTokenizer:
    """`bytes`, or the path (relative to `base`) of a folder with a `tokenizer.json` or of the file itself.

    Raises DataError as HuggingFaceTokenizer does.
    """
    return ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(base / kind)
