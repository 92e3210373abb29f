"""The key-value cache of texts that are generated: what layers would compute again for positions that have been.

Only attention looks at other positions than its own; every other layer, those of a user's own among them, takes each
position by itself and needs nothing of the earlier ones.
Shapes: B rows, K key/value heads of this rank, L positions that there is room for, S new positions, A head width.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import define, field
from torch import Tensor, nn


class LayerCache(Protocol):
    """What layers ask for what they have computed of earlier positions. length: positions of a row that there is room
    for. filled: positions that have been; 0: prompts are computed."""

    length: int
    filled: int

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Keep tensors of new positions, and give those of all that the layer sees."""
        ...

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """Bool [B, 1, 1, count], which of so many positions that `extended` gives a layer each row sees; None: all."""
        ...


@define(eq=False)
class KeyValueCache:
    """Tensors of the positions so far, for every layer of this rank that asks for it.

    length: positions of a row that there is memory for. filled: positions that have been, in front of those of the
    forward that is under way. seen_B11L: bool, which of the positions of a row are its own; None: all. A layer that
    sees no more than the `window` newest positions keeps these alone: position p is the p modulo window, in the place
    of one that no later position sees.
    """

    length: int
    filled: int = 0
    seen_B11L: Tensor | None = None
    _tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict, init=False)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Each of the tensors [B, K, S, A] of a layer: those of the prompts, which come first, as they are; with those
        of one position behind them, S = 1, views [B, K, filled + 1 or window, A] of all that the layer keeps."""
        room = self.length if window is None else min(window, self.length)
        known = self._tensors.get(layer)
        if known is None:
            known = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new)
            self._tensors[layer] = known
        count = new[0].shape[2]
        assert self.filled == 0 or count == 1, "behind prompts there is one position at a time"
        for tensor, x in zip(known, new, strict=True):
            if count > room:
                tensor.copy_(x[:, :, -room:].roll(count, 2))
            else:
                tensor.narrow(2, self.filled % room, count).copy_(x)
        return new if self.filled == 0 else [tensor.narrow(2, 0, min(self.filled + 1, room)) for tensor in known]

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """As of `LayerCache`, in the order in which a layer has them that keeps so many."""
        if self.seen_B11L is None:
            return None
        end = self.filled + 1
        return self.seen_B11L[..., end - count : end].roll(end - count, -1)

    @property
    def bytes(self) -> int:
        """What it has allocated."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)
