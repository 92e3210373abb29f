"""What goes to the ranks of a server and comes back: a name, JSON values, and arrays of numbers, as bytes.

No part of it is a pickle: what a stranger has sent is in it.
"""

from typing import Any

import msgspec
import numpy as np
from attrs import field, frozen


@frozen(kw_only=True, eq=False)
class RankMessage:
    """A request of a kind, or the answer to one. arrays: numbers of any shape, by name."""

    name: str
    values: dict[str, Any] = field(factory=dict)
    arrays: dict[str, np.ndarray] = field(factory=dict)

    def pack(self) -> bytes:
        arrays = [[name, each.dtype.str, each.shape, each.tobytes()] for name, each in self.arrays.items()]
        return msgspec.msgpack.encode([self.name, self.values, arrays])

    @classmethod
    def unpack(cls, content: bytes) -> "RankMessage":
        """Raises msgspec.DecodeError or ValueError for anything that `pack` has not made."""
        name, values, arrays = msgspec.msgpack.decode(content, type=tuple[str, dict[str, Any], list[_Packed]])
        found = {key: np.frombuffer(data, dtype).reshape(shape) for key, dtype, shape, data in arrays}
        return cls(name=name, values=values, arrays=found)


_Packed = tuple[str, str, tuple[int, ...], bytes]
