"""Text to token ids and back: what is asked of a tokenizer, and how the one of a plan is opened."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

import numpy as np
from attrs import frozen

from xtrain.dsl.schema.tokenizers import tokenizer_kind
from xtrain.runtime.data.documents.token_bytes import TokenBytes
from xtrain.runtime.ops import code_of


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
    def begins_with(self) -> tuple[int, ...]:
        """Ids that it puts before a text where nobody lays it out as a document, as other libraries ask it."""
        ...

    @property
    def bytes_of(self) -> TokenBytes | None:
        """How many bytes of text each token stands for; None where that is no fixed number."""
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


def load_tokenizer(source: str, base: Path) -> TextTokenizer:
    """That which a spec or a plan names; paths are relative to `base`.

    Raises DataError as HuggingFaceTokenizer does.
    """
    kind = tokenizer_kind(source)
    return code_of(kind, kind.run_module()).open_tokenizer(source, base)
