"""The key-value cache of texts that are generated: what layers would compute again for positions that have been.

Only attention looks at other positions than its own; every other layer, those of a user's own among them, takes each
position by itself and needs nothing of the earlier ones.
Shapes: B rows, K key/value heads of this rank, L positions that there is room for, S new positions, A head width.
"""

from attrs import define, field
from torch import Tensor, nn


@define(eq=False)
class KeyValueCache:
    """Tensors of the positions so far, for every layer of this rank that asks for it.

    length: positions of a row that there is memory for. filled: positions that have been, in front of those of the
    forward that is under way.
    """

    length: int
    filled: int = 0
    _tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict, init=False)

    def extended(self, layer: nn.Module, *new: Tensor) -> list[Tensor]:
        """Each of the tensors [B, K, S, A] of a layer behind what it gave before: views [B, K, filled + S, A]."""
        known = self._tensors.get(layer)
        if known is None:
            known = tuple(x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new)
            self._tensors[layer] = known
        count = new[0].shape[2]
        for tensor, x in zip(known, new, strict=True):
            tensor.narrow(2, self.filled, count).copy_(x)
        return [tensor.narrow(2, 0, self.filled + count) for tensor in known]

    @property
    def bytes(self) -> int:
        """What it has allocated."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)
