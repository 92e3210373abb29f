"""Reads packed rows out of a token store."""

from functools import cached_property
from hashlib import blake2b
from typing import Final

import numpy as np
from attrs import define, frozen

from ..stores.store import TokenStore
from .rows import Rows

# The number of a row that holds nothing but padding.
PADDING: Final = -1
# Where nobody asks which dataset a row is of, or where it stands in the run.
UNKNOWN: Final = -1


@frozen(kw_only=True, eq=False)
class RawRow:
    """A packed row as it lies in a store."""

    segments: list[np.ndarray]
    """Views into the store; L positions come with L + 1 tokens, the last a label."""
    trained: list[np.ndarray] | None = None
    """Of each segment, uint8 [L + 1]: 1 where the token is to be predicted. None: all of them are."""
    dataset: int = UNKNOWN
    """Number of its dataset among those that are trained on; UNKNOWN if there is one alone, and in evaluation."""
    position: int = UNKNOWN
    """Rows of the run before it; UNKNOWN in evaluation."""


@define(kw_only=True, frozen=True, eq=False)
class RowReader:
    """Reads the tokens of packed rows."""

    store: TokenStore
    documents: np.ndarray
    """int64: the document of the store that each document index in `rows` stands for."""
    rows: Rows

    def row(self, index: int, *, dataset: int = UNKNOWN, position: int = UNKNOWN) -> RawRow:
        """Row `index`, without segments for PADDING; it says of itself what `dataset` and `position` say."""
        if index == PADDING:
            return RawRow(segments=[], dataset=dataset, position=position)
        rows = self.rows
        segments = slice(int(rows.row_offsets[index]), int(rows.row_offsets[index + 1]))
        documents = self.documents[rows.document[segments]]
        first = self.store.offsets[documents] + rows.starts(segments)
        # The last position of a document reads its last token but one.
        end = np.minimum(first + rows.capacity + 1, self.store.offsets[documents + 1])
        cuts = [slice(a, b) for a, b in zip(first.tolist(), end.tolist(), strict=True)]
        tokens, trained = self.store.tokens, self.store.trained
        return RawRow(
            segments=[tokens[cut] for cut in cuts],
            trained=None if trained is None else [trained[cut] for cut in cuts],
            dataset=dataset,
            position=position,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of every row's content: the store's, the choice of documents, and their packing."""
        return self._digest(self.store.key)

    def was_called(self, fingerprint: str) -> bool:
        """Whether these rows had that fingerprint under another name of the same data."""
        return any(self._digest(name) == fingerprint for name in self.store.aliases)

    def _digest(self, store: str) -> str:
        digest = blake2b(f"{store} {self.rows.fingerprint()}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.documents, dtype=np.int64).data)
        return digest.hexdigest()
