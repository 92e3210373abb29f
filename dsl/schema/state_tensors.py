"""What an optimizer keeps for a parameter between two steps."""

from collections.abc import Sequence
from typing import Literal

from attrs import frozen


@frozen
class StateTensor:
    """A tensor of the shape of a parameter, or of one that follows from it; it is cut over ranks as the parameter is.

    format: of its numbers; empty: that of the parameter. block: it has one number for so many along the last dim.
    single: a dim, counted from the end, of which it has one place; -1: the last. begins: at 0, or as a copy of the
    parameter.
    """

    name: str
    format: str = ""
    block: int = 1
    single: int = 0
    begins: Literal["zeros", "weights"] = "zeros"

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """parameter: the shape of a parameter, or of a rank's piece of it."""
        shape = list(parameter)
        shape[-1] //= self.block
        if self.single:
            shape[self.single] = 1
        return tuple(shape)
