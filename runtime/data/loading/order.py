"""In which order rows are visited, epoch after epoch, without any state to save."""

import numpy as np

from xtrain.runtime.data.errors import DataError


class RowOrder:
    """Endless seeded order of `num_rows` rows: every epoch is a permutation of its own.

    Global position p lies in epoch p // num_rows. A permutation depends on (num_rows, seed, epoch) alone, so any
    position can be asked for at any time; the last epoch's permutation is kept (8 bytes a row).
    Raises DataError if there are no rows or the seed is outside 0 to 2⁶⁴ - 1.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError("there are no rows to train on", remedy="Check the sources, the hold-out and the packing.")
        if not 0 <= seed < 1 << 64:
            raise DataError(f"seed {seed} is outside 0 to 2^64 - 1")
        self.num_rows = num_rows
        self.seed = seed
        # One value, so that a thread that reads ahead and another one never see the one's epoch with the other's order.
        self._last = (-1, np.empty(0, dtype=np.int64))

    def row(self, position: int) -> tuple[int, int]:
        """(epoch, row index) of a global position."""
        epoch, within = divmod(position, self.num_rows)
        return epoch, int(self.permutation(epoch)[within])

    def rows(self, start: int, count: int) -> np.ndarray:
        """Row indices of the positions start … start + count - 1, int64 [count], over as many epochs as it takes."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, within = divmod(start + done, self.num_rows)
            take = min(count - done, self.num_rows - within)
            out[done : done + take] = self.permutation(epoch)[within : within + take]
            done += take
        return out

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of one epoch, int64 [num_rows]."""
        assert epoch >= 0, "positions start at 0"
        known, permutation = self._last
        if epoch != known:
            key = np.array([self.seed, epoch], dtype=np.uint64)
            permutation = np.random.Generator(np.random.Philox(key=key)).permutation(self.num_rows)
            self._last = (epoch, permutation)
        return permutation
