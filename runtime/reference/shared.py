"""A column in the cache of every machine of a run: who has it, who writes it, and that all have the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.reference.column import AT_ONCE, ColumnWriter, StoredColumn, open_column, write_column
from xtrain.runtime.state import Rank

Blocks = Iterator[tuple[np.ndarray, np.ndarray]]
"""Tokens of a store, int64, -1 for none, and the number of each."""


@frozen(kw_only=True, eq=False)
class SharedColumn:
    """folder: in the cache, which machines share, or which each has for itself. tokens: of the store. form: fp32 or
    fp64. All methods are collective."""

    rank: Rank
    folder: Path
    tokens: int
    form: str

    def source(self) -> int | None:
        """The first rank that has the column; None if none does."""
        return next((rank for rank, digest in enumerate(self._digests()) if digest), None)

    def write(self, covers: Any, blocks: Blocks) -> None:
        """The first rank of each machine writes what all ranks make together. covers: as of `write_column`."""
        self._put(covers, blocks, writes=self.rank.local_rank == 0, replaces=False)

    def copy(self, covers: Any, source: int) -> None:
        """The first rank of each machine that lacks what the rank `source` has, or has another, takes it from there."""
        digests = self._digests()
        others = {digest != digests[source] for digest in digests}
        if True in others:
            lacks = digests[self.rank.rank] != digests[source]
            writes = lacks and self.rank.local_rank == 0
            self._put(covers, self._sent(source), writes=writes, replaces=bool(digests[self.rank.rank]))

    def open_everywhere(self) -> StoredColumn:
        """The column, on every rank the same. Raises DataError."""
        found = self._own()
        if found is None or len(set(self._digests())) > 1:
            message = f"rank {self.rank.rank} does not find the log-probabilities that were written"
            raise DataError(message, path=self.folder, remedy="Check this file system.")
        return found

    def _own(self) -> StoredColumn | None:
        return open_column(self.folder, self.tokens, self.form)

    def _digests(self) -> list[str]:
        """Of what each rank finds; empty where there is none."""
        found = self._own()
        digests = [found.digest if found is not None else ""]
        if self.rank.world_size > 1:
            own, digests = digests[0], [""] * self.rank.world_size
            dist.all_gather_object(digests, own)
        return digests

    def _put(self, covers: Any, blocks: Blocks, *, writes: bool, replaces: bool) -> None:
        def fill(writer: ColumnWriter) -> None:
            for places, numbers in blocks:
                writer.put(places, numbers)

        if writes:
            write_column(self.folder, self.tokens, self.form, covers, fill, replaces=replaces)
        for _ in blocks:  # a rank that does not write takes part as well
            pass
        if self.rank.world_size > 1:  # nobody looks for it before it is there
            dist.all_reduce(torch.zeros(1))

    def _sent(self, source: int) -> Blocks:
        """All of the column of a rank, piece by piece."""
        own = self._own() if self.rank.rank == source else None
        for first in range(0, self.tokens, AT_ONCE):
            places = np.arange(first, min(first + AT_ONCE, self.tokens))
            piece = torch.empty(len(places), dtype=torch.float64 if self.form == "fp64" else torch.float32)
            if own is not None:
                piece = torch.from_numpy(own.numbers[first : first + len(places)].copy())
            dist.broadcast(piece, src=source)
            yield places, piece.numpy()
