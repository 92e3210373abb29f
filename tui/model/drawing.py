"""Curves as rows of text."""

from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from numpy import ndarray

Unit = Literal["number", "share", "bytes", "seconds", "count"]


@frozen(eq=False)
class Line:
    """One curve: `y` over ascending `x`, of the same length; where `y` is no number, the curve has a gap.

    dim: drawn in the background, as what another line is the smoothed form of.
    """

    name: str
    x: "ndarray"
    y: "ndarray"
    dim: bool = False
