"""Segments on their way into the rows of a microbatch."""

from attrs import define, field
from torch import Tensor

from xtrain.runtime.data.packing.row_reader import UNKNOWN

# Label of a position on which no loss is taken; torch's cross entropy leaves it out by default.
IGNORE_INDEX = -100


@define(kw_only=True, frozen=True, eq=False)
class Sample:
    """One segment on its way into a row."""

    row: int
    """Row of the microbatch it belongs to."""
    tokens: Tensor
    """int64 [L + 1] as read; int64 [L], the inputs, once there are labels."""
    labels: Tensor | None = None
    """int64 [L], or None before they are made; IGNORE_INDEX where no loss is taken."""
    trained: Tensor | None = None
    """bool [L + 1]: whether each token is to be predicted. None: all of them, or the labels say it."""
    columns: dict[str, Tensor] = field(factory=dict)
    """Numbers along the tokens, by name: [L + 1] as read, or several of each [L + 1, width]; [L], those of the labels,
    once there are labels."""
    values: dict[str, float] = field(factory=dict)
    """Numbers of its document, by name."""
    side: int = 0
    """0 for the preferred side of a pair, and for what is no pair; 1 for the other side, the next sample."""
    dataset: int = UNKNOWN
    """Number of its dataset among those that are trained on; UNKNOWN if there is one alone, and in evaluation."""
    position: int = UNKNOWN
    """Rows of the run before the one it was packed into; UNKNOWN in evaluation."""


@define(kw_only=True, frozen=True)
class Samples:
    """The samples of a microbatch, in row order; rows without any exist all the same."""

    num_rows: int
    samples: tuple[Sample, ...]
