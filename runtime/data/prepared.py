"""A dataset ready to be read: tokenised, split into training and hold-out, both packed into rows. Without torch."""

from pathlib import Path

import numpy as np
from attrs import frozen

from .packing import Method, pack_rows
from .row_reader import RowReader
from .rows import Oversized, Rows
from .rows_cache import cached_rows, rows_key
from .split import split_holdout
from .store import TokenStore

PARTS: tuple[str, ...] = ("training", "hold-out")


@frozen(kw_only=True, eq=False)
class PreparedDataset:
    """A tokenised dataset, its documents dealt to training and hold-out, both packed into rows."""

    name: str
    store: TokenStore
    train_documents: np.ndarray
    heldout_documents: np.ndarray
    train_rows: Rows
    heldout_rows: Rows

    @property
    def parts(self) -> dict[str, RowReader]:
        """`training` and `hold-out`, to be read row by row."""
        documents = (self.train_documents, self.heldout_documents)
        rows = (self.train_rows, self.heldout_rows)
        return {
            part: RowReader(store=self.store, documents=own, rows=packed)
            for part, own, packed in zip(PARTS, documents, rows, strict=True)
        }


def prepare(
    store: TokenStore,
    *,
    dataset: str,
    cache: Path,
    holdout: float,
    seed: int,
    sequence: int,
    oversized: Oversized,
    align: int = 1,
    method: Method = "sequential",
    group: int = 1,
) -> PreparedDataset:
    """Split off the hold-out and pack both parts, or open what was packed before, in `cache`.

    Raises DataError as `split_holdout`, `pack_rows` and `cached_rows` do.
    """
    documents = dict(zip(PARTS, split_holdout(store.offsets, holdout, seed), strict=True))
    settings = {"capacity": sequence, "align": align, "oversized": oversized}
    # The rows of best_fit are those of multipack: it differs in how they are dealt.
    settings |= {} if method == "sequential" else {"group": group}

    def packed(part: str) -> Rows:
        def pack() -> Rows:
            lengths = store.lengths_of(documents[part])
            return pack_rows(lengths, sequence, oversized, align, method=method, group=group)

        return cached_rows(cache / rows_key(store=store.key, holdout=holdout, seed=seed, part=part, **settings), pack)

    return PreparedDataset(
        name=dataset,
        store=store,
        train_documents=documents["training"],
        heldout_documents=documents["hold-out"],
        train_rows=packed("training"),
        heldout_rows=packed("hold-out"),
    )
