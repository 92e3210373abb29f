"""The groups in which the modules of a rank work together. Set-up ops fill them in; None means an axis of one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import define, evolve, frozen
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from xtrain.runtime.models.task_routing import TaskRouting


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

    row: all ranks that hold positions of the same rows (ring · ulysses · tp). tasks: which rows go through which
    adapter, where there are several. without_adapter: the model under the adapter is computed alone.
    shared_meanwhile: shared experts are computed while tokens are on their way to those of other ranks. recorded: where
    it is a list, mixtures of experts add what their routers choose, int64 [B, S, K], in the order of a forward.
    """

    tensor: TensorAxis | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    row: ProcessGroup | None = None
    tasks: "TaskRouting | None" = None
    without_adapter: bool = False
    shared_meanwhile: bool = False
    recorded: "list[Tensor] | None" = None

    @contextmanager
    def uncut_rows(self) -> Iterator[None]:
        """Meanwhile every rank computes all positions of a row: ranks of a ring and of ulysses, and those of tensor
        parallel between blocks, which hold a piece of them otherwise. Matrices, heads and experts stay where they are.
        """
        before = self.tensor, self.ring, self.ulysses
        self.tensor = None if self.tensor is None else evolve(self.tensor, sequence=False)
        self.ring = self.ulysses = None
        try:
            yield
        finally:
            self.tensor, self.ring, self.ulysses = before
