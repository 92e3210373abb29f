"""What an optimizer keeps for a parameter between two steps."""

from collections.abc import Sequence

from attrs import frozen


@frozen
class StateTensor:
    """A tensor of the shape of a parameter, or of one that follows from it; it is cut over ranks as the parameter is.

    format: of its numbers; empty: that of the parameter. block: it has one number for so many along the last dim.
    """

    name: str
    format: str = ""
    block: int = 1

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """parameter: the shape of a parameter, or of a rank's piece of it."""
        return (*parameter[:-1], parameter[-1] // self.block) if self.block > 1 else tuple(parameter)
