"""The key-value cache of texts that are generated: what layers would compute again for positions that have been.

Only attention looks at other positions than its own; every other layer, those of a user's own among them, takes each
position by itself and needs nothing of the earlier ones.
Shapes: B rows, K key/value heads of this rank, L positions that there is room for, S new positions, A head width.
"""

from collections.abc import Sequence

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

    def newest(self, x: Tensor, count: int) -> Tensor:
        """Of what there is of every position, [..., length], that of the `count` newest ones, with the position that is
        under way, in the order in which a layer has them that keeps so many."""
        end = self.filled + 1
        return x[..., end - count : end].roll(end - count, -1)

    @property
    def bytes(self) -> int:
        """What it has allocated."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)
