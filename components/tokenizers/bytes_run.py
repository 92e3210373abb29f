"""Bytes as tokens."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from xtrain.runtime.feed.tokenizers import Placed, TextTokenizer, TokenBytes


def open_tokenizer(source: str, base: Path) -> TextTokenizer:
    """Open the tokenizer; it has no files."""
    return ByteTokenizer()


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text's UTF-8 form; 256 is bos, 257 is eos."""

    name = "bytes"
    fingerprint = "bytes-258"
    vocab_size = 258
    bos = 256
    eos = 257
    specials = frozenset((bos, eos))
    has_bos = True
    begins_with = (bos,)
    special_names = MappingProxyType({"⟨bos⟩": bos, "⟨eos⟩": eos})
    chat_template = None
    bytes_of = TokenBytes(inside=np.repeat((1, 0), (256, 2)), first=np.repeat((1, 0), (256, 2)))

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of `text`, uint8 [bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode byte ids, ignoring others; invalid UTF-8 becomes U+FFFD."""
        values = np.asarray(ids, dtype=np.int64)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def piece(self, token: int) -> str:
        """Return an ASCII character, the two hexadecimal digits of another byte, or ⟨bos⟩ or ⟨eos⟩."""
        names = {token: name for name, token in self.special_names.items()}
        return names.get(token) or (chr(token) if token < 128 else f"\\x{token:02x}")

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """Encode texts as bytes, with ⟨bos⟩ and ⟨eos⟩ as one token each; all bytes of a character have the character's
        place."""
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
