"""Decoder blocks with adapters: trained matrices next to the frozen matrices of a block."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from attrs import evolve, field

from xtrain.blocks.block import Chain
from xtrain.blocks.op_trace import TracedTensor
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import TASKS, Architecture, BlockParameter, ParameterSpec, widest_task

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen
class AdaptedMatrix:
    """Adapter of one matrix of a block, named after the matrix's parameter. `torch_module` names the module that adds
    it to a rank's modules. task: the task that owns the adapter; empty if there is only one adapter."""

    name: str
    task: str = field(default="", kw_only=True)

    @property
    def place(self) -> str:
        """Module path of the adapter's parameters: the matrix's own module, or a task's child of it."""
        owner = self.name.rpartition(".")[0]
        return f"{owner}.{TASKS}.{self.task}" if self.task else owner

    @property
    def decomposes(self) -> bool:
        """True if the adapter's first values come from the matrix, which then keeps only the remainder."""
        return False

    @property
    def drops_inputs(self) -> bool:
        """True if training applies dropout to the adapter's inputs."""
        return False

    @property
    def scales(self) -> bool:
        """True if each output of the product has a factor of its own."""
        return False

    @classmethod
    def torch_module(cls) -> str:
        """Return the name of the module that ranks import: this class's module name + `_torch`."""
        return f"{cls.__module__}_torch"

    def parameters(self, matrix: BlockParameter) -> Iterator[BlockParameter]:
        """Yield the adapter's parameters in the order in which modules register them."""
        raise NotImplementedError

    def trace(
        self, on: "Tracer", x: TracedTensor, out: TracedTensor, tokens: int, *, parts: int = 1, added: int | None = None
    ) -> TracedTensor:
        """Record what the adapter adds to `out`, the product of the matrix and `x` over `tokens` tokens, and return the
        sum. For routed experts computed one after the other, x and out belong to one of `parts` experts. added: see
        `OpTrace.linear`."""
        raise NotImplementedError

    def trace_beside(self, on: "Tracer") -> None:
        """Record the operations on a stack of routed experts that run once, before the products of single experts."""


def alone_name(parameter: ParameterSpec) -> str:
    """Return the name of a task's parameter in a run of that task alone; its initial values are drawn under this
    name."""
    return parameter.name.replace(f".{TASKS}.{parameter.task}.", ".", 1) if parameter.task else parameter.name


@frozen
class AdaptedBlock(Chain):
    """Block (its only piece) with adapters on some of its matrices."""

    composable: ClassVar[bool] = False

    matrices: tuple[AdaptedMatrix, ...]

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """Yield the block's parameters; an adapter's parameters follow the module's own parameters."""
        own = list(super().parameters(arch))
        by_name = {parameter.name: parameter for parameter in own}
        ends = {parameter.owner: parameter.name for parameter in own}
        behind: dict[str, list[BlockParameter]] = {}
        for matrix in self.matrices:
            parameter = by_name[matrix.name]
            added = (evolve(each, task=matrix.task) for each in matrix.parameters(parameter))
            behind.setdefault(ends[parameter.owner], []).extend(added)
        for parameter in own:
            yield parameter
            yield from behind.get(parameter.name, ())

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        adapted: dict[str, AdaptedMatrix] = {}
        for matrix in self.matrices:
            of_tasks = tuple(each for each in self.matrices if each.name == matrix.name)
            adapted[matrix.name] = TaskMatrices(matrix.name, of_tasks) if matrix.task else matrix
        return super().trace(evolve(on, adapted=adapted), x)


@frozen
class TaskMatrices(AdaptedMatrix):
    """Adapters of several tasks on one matrix, each applied to some of the rows. Because the rows differ between
    microbatches, the trace sends all rows through the adapter of the widest task."""

    of: tuple[AdaptedMatrix, ...]

    def trace_beside(self, on: "Tracer") -> None:
        for matrix in self.of:
            matrix.trace_beside(on)

    def trace(
        self, on: "Tracer", x: TracedTensor, out: TracedTensor, tokens: int, *, parts: int = 1, added: int | None = None
    ) -> TracedTensor:
        adapter, widest = on.resolved.architecture.adapter, widest_task(on.resolved.architecture)
        assert isinstance(adapter, TaskAdapters)
        of = {matrix.task: matrix for matrix in self.of}
        shares = [each == widest for each in adapter.tasks]
        own_x = on.ops.split(x, *(x.gradient * share for share in shares))
        own_out = on.ops.split(out, *(out.gradient * share for share in shares))
        found = [
            of[task].trace(on, own_in, own, tokens * share, parts=parts, added=added) if task in of else own
            for task, share, own_in, own in zip(adapter.tasks, shares, own_x, own_out, strict=True)
        ]
        return on.ops.op(*found, makes=out.gradient, fresh=False)


def adapted_matrices(arch: Architecture) -> Iterator[tuple[int | None, AdaptedMatrix]]:
    """Yield (layer, matrix) for every adapted matrix in model order; the layer of the head is None."""
    found = {layer: kind.block for kind in arch.kinds for layer in kind.layers}
    for layer, block in sorted(found.items()):
        if isinstance(block, AdaptedBlock):
            yield from ((layer, matrix) for matrix in block.matrices)
    yield from ((None, matrix) for matrix in head_matrices(arch))


def head_matrices(arch: Architecture) -> tuple[AdaptedMatrix, ...]:
    """Return the matrices of the architecture's adapter on a vocabulary head."""
    assert all(isinstance(matrix, AdaptedMatrix) for matrix in arch.head_matrices)
    return cast(tuple[AdaptedMatrix, ...], arch.head_matrices)
