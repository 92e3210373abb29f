"""The key-value cache of texts that are generated: what layers would compute again for positions that have been.

Only attention looks at other positions than its own; every other layer, those of a user's own among them, takes each
position by itself and needs nothing of the earlier ones.
Shapes: B rows, K key/value heads of this rank, L positions that there is room for, S new positions, A head width.
"""

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor, nn


@define(eq=False)
class KeyValueCache:
    """Tensors of the positions so far, for every layer of this rank that asks for it.

    length: positions of a row that there is memory for. filled: positions that have been, in front of those of the
    forward that is under way. A layer that sees no more than the `window` newest positions keeps these alone: position
    p is the p modulo window, in the place of one that no later position sees.
    """

    length: int
    filled: int = 0
    _tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict, init=False)
    _windows: dict[nn.Module, int | None] = field(factory=dict, init=False)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Each of the tensors [B, K, S, A] of a layer: those of the prompts, which come first, as they are; with those
        of one position behind them, S = 1, views [B, K, filled + 1 or window, A] of all that the layer keeps."""
        room = self.length if window is None else min(window, self.length)
        known = self._tensors.get(layer)
        if known is None:
            known = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new)
            self._tensors[layer], self._windows[layer] = known, window
        count = new[0].shape[2]
        assert self.filled == 0 or count == 1, "behind prompts there is one position at a time"
        for tensor, x in zip(known, new, strict=True):
            if count > room:
                tensor.copy_(x[:, :, -room:].roll(count, 2))
            else:
                tensor.narrow(2, self.filled % room, count).copy_(x)
        return new if self.filled == 0 else [tensor.narrow(2, 0, min(self.filled + 1, room)) for tensor in known]

    def newest(self, x: Tensor, count: int) -> Tensor:
        """Of what there is of every position, [..., length], that of the `count` newest ones, with the position that is
        under way, in the order in which a layer has them that keeps so many."""
        end = self.filled + 1
        return x[..., end - count : end].roll(end - count, -1)

    def moved(self, rows: Sequence[int], filled: int, length: int) -> "KeyValueCache":
        """Some of its rows, with room for `length` positions of which `filled` have been; the newest position stays the
        newest. Positions that were not there are zero, and nothing may see them."""
        found = KeyValueCache(length, filled)
        for layer, tensors in self._tensors.items():
            window, before = self._windows[layer], tensors[0].shape[2]
            room = length if window is None else min(window, length)
            count = min(self.filled, filled, before, room)
            newest, rows_B = torch.arange(-count, 0), torch.tensor(rows)
            device = tensors[0].device
            of, to = ((newest + self.filled) % before).to(device), ((newest + filled) % room).to(device)
            found._windows[layer] = window
            found._tensors[layer] = tuple(
                x.new_zeros(len(rows), x.shape[1], room, x.shape[3]).index_copy_(
                    2, to, x.index_select(0, rows_B.to(device)).index_select(2, of)
                )
                for x in tensors
            )
        return found

    def joined(self, other: "KeyValueCache", order: Sequence[int]) -> "KeyValueCache":
        """Its rows and those of another one with as many positions and as much room. order: places among its own, with
        the others behind them."""
        assert (self.length, self.filled) == (other.length, other.filled)
        found = KeyValueCache(self.length, self.filled)
        found._windows = dict(self._windows)
        found._tensors = {
            layer: tuple(
                torch.cat(pair).index_select(0, torch.tensor(order, device=pair[0].device))
                for pair in zip(tensors, other._tensors[layer], strict=True)
            )
            for layer, tensors in self._tensors.items()
        }
        return found

    @property
    def bytes(self) -> int:
        """What it has allocated."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)
