"""Reads packed rows out of a token store."""

from functools import cached_property
from hashlib import blake2b
from typing import Final

import numpy as np
from attrs import define

from .rows import Rows
from .store import TokenStore

# The number of a row that holds nothing but padding.
PADDING: Final = -1


@define(kw_only=True, frozen=True, eq=False)
class RowReader:
    """Reads the tokens of packed rows."""

    store: TokenStore
    documents: np.ndarray
    """int64: the document of the store that each document index in `rows` stands for."""
    rows: Rows

    def row(self, index: int) -> list[np.ndarray]:
        """Token segments of one row, views into the store; L positions come with L + 1 tokens, the last a label."""
        if index == PADDING:
            return []
        rows = self.rows
        segments = slice(int(rows.row_offsets[index]), int(rows.row_offsets[index + 1]))
        documents = self.documents[rows.document[segments]]
        first = self.store.offsets[documents] + rows.starts(segments)
        # The last position of a document reads its last token but one.
        end = np.minimum(first + rows.capacity + 1, self.store.offsets[documents + 1])
        return [self.store.tokens[a:b] for a, b in zip(first.tolist(), end.tolist(), strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of every row's content: the store's, the choice of documents, and their packing."""
        digest = blake2b(f"{self.store.key} {self.rows.fingerprint()}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.documents, dtype=np.int64).data)
        return digest.hexdigest()
