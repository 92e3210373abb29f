"""Text to token ids and back: raw bytes, or any `tokenizer.json`."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .errors import DataError
from .special_tokens import find_special_tokens


class Tokenizer(Protocol):
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


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text's UTF-8 form; 256 is bos, 257 is eos."""

    name = "bytes"
    fingerprint = "bytes-258"
    vocab_size = 258
    bos = 256
    eos = 257

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


class HuggingFaceTokenizer:
    """A `tokenizer.json`, with bos and eos taken from the files beside it or recognised by name.

    Special tokens written out in a text are encoded as the characters they are: a document that quotes
    `<|endoftext|>` does not end there. Truncation and padding set in the file are switched off.
    Raises DataError if the file is missing or unreadable, or if there is neither a bos nor an eos.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise DataError(
                "no such tokenizer", path=path, remedy="Give a folder holding `tokenizer.json`, or the file itself."
            )
        content = path.read_bytes()
        try:
            backend: Any = Backend.from_str(content.decode())
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"not a tokenizer: {error}", path=path) from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        special = find_special_tokens(path.parent, vocabulary)
        self._backend = backend
        self.name = str(directory)
        self.bos = special.bos
        self.eos = special.eos
        # The largest id, not the number of entries: vocabularies have holes.
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = blake2b(content + f"|{self.bos}|{self.eos}".encode(), digest_size=16).hexdigest()

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


def load_tokenizer(kind: str, base: Path) -> Tokenizer:
    """`bytes`, or the path (relative to `base`) of a folder with a `tokenizer.json` or of the file itself.

    Raises DataError as HuggingFaceTokenizer does.
    """
    return ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(base / kind)
