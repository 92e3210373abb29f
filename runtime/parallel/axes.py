"""The groups in which the modules of a rank work together. Set-up ops fill them in; None means an axis of one rank."""

from attrs import define, frozen
from torch.distributed import ProcessGroup


@frozen(eq=False)
class TensorAxis:
    """Tensor parallel: matrices are cut over `group`.

    sequence: between blocks a rank holds its piece of the positions instead of all of them.
    loss: the loss is taken on a rank's own piece of the vocabulary.
    """

    group: ProcessGroup
    sequence: bool
    loss: bool

    @property
    def size(self) -> int:
        return self.group.size()


@define(eq=False)
class Axes:
    """One object for all modules of a model.

    row: all ranks that hold positions of the same rows (ring · ulysses · tp).
    """

    tensor: TensorAxis | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    row: ProcessGroup | None = None
