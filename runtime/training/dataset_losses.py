"""Losses of the datasets of a mixture, from the same logits as the loss that is trained on.

Shapes: D datasets that are trained on, B rows of a microbatch.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.runtime.models.batch import RowLosses
from xtrain.runtime.state import Rank

# Rows of a dataset without a single valid token, after which that is worth a warning.
UNLABELLED_ROWS: Final = 50


class DatasetLosses:
    """Cross-entropies and valid tokens of each dataset on this rank, since they were last taken.

    They stay on the device, and ranks exchange them only when they are taken. Of one dataset alone there is nothing to
    count: its loss is that of the run.
    """

    def __init__(self, names: Sequence[str], rank: Rank) -> None:
        self._names, self._rank = tuple(names), rank
        # Those of which no token was learned from since the run was started, nor a word said about it.
        self._unlabelled = dict.fromkeys(names) if len(names) > 1 else {}
        self._sums_2D: Tensor | None = None
        if len(names) > 1:
            self._sums_2D = torch.zeros(2, len(names), dtype=torch.float64, device=rank.device)
            self._numbers_D = torch.arange(len(names), device=rank.device)

    @torch.no_grad()
    def add(self, batches: Iterable[RowLosses]) -> None:
        """Count the rows of some microbatches; those of tensor-parallel peers are counted by one of them."""
        if self._sums_2D is None or not self._rank.is_tp_first:
            return
        for batch in batches:
            own_BD = batch.dataset_B[:, None] == self._numbers_D
            for sums_D, of_rows_B in zip(self._sums_2D, (batch.cross_entropy_B, batch.valid_B), strict=True):
                # Chosen, not multiplied by 0 or 1: what is no number in one dataset is none in the others.
                sums_D += torch.where(own_BD, of_rows_B[:, None], 0.0).sum(0)

    def clear(self) -> None:
        """Begin anew."""
        if self._sums_2D is not None:
            self._sums_2D.zero_()

    def take(self) -> dict[str, float]:
        """`loss/NAME`, in nats a token, and `valid_tokens/NAME`, over all ranks; nothing of a dataset without valid
        tokens. Collective where there are several datasets."""
        if self._sums_2D is None:
            return {}
        if self._rank.world_size > 1:
            dist.all_reduce(self._sums_2D)
        sums, tokens = self._sums_2D.tolist()
        self.clear()
        for name, count in zip(self._names, tokens, strict=True):
            if count:
                self._unlabelled.pop(name, None)
        seen = [(name, total, count) for name, total, count in zip(self._names, sums, tokens, strict=True) if count]
        found: dict[str, float] = {f"loss/{name}": total / count for name, total, count in seen}
        found |= {f"valid_tokens/{name}": int(count) for name, _, count in seen}
        return found

    def unlabelled(self, rows: dict[str, int]) -> list[str]:
        """The datasets that have given many rows and not one valid token, each once. rows: of each dataset, since the
        run was started."""
        found = [name for name in self._unlabelled if rows.get(name, 0) >= UNLABELLED_ROWS]
        for name in found:
            del self._unlabelled[name]
        return found
