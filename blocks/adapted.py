"""Decoder blocks with adapters: matrices next to those of a block, trained instead of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from xtrain.blocks.block import Chain
from xtrain.blocks.op_trace import TracedTensor
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.plan.architecture import TASKS, Architecture, BlockParameter, ParameterSpec, widest_task

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer


@frozen
class AdaptedMatrix:
    """A matrix of a block, by the name of its parameter, and what an adapter adds to its product. The module that
    `torch_module` names puts that into the modules of a rank. task: whose adapter it is; empty where there is one
    alone."""

    name: str
    task: str = field(default="", kw_only=True)

    @property
    def place(self) -> str:
        """The module in whose place, or inside which, its parameters are."""
        owner = self.name.rpartition(".")[0]
        return f"{owner}.{TASKS}.{self.task}" if self.task else owner

    @property
    def decomposes(self) -> bool:
        """Whether its first values are made of the matrix, which is the rest from there on."""
        return False

    @property
    def drops_inputs(self) -> bool:
        """Whether some of what goes in is dropped in training."""
        return False

    @property
    def scales(self) -> bool:
        """Whether every output of the product has a factor of its own."""
        return False

    @classmethod
    def torch_module(cls) -> str:
        """The module that ranks import for it: `…_torch`, beside its own."""
        return f"{cls.__module__}_torch"

    def parameters(self, matrix: BlockParameter) -> Iterator[BlockParameter]:
        """What it has beside the matrix, in the order in which modules register them."""
        raise NotImplementedError

    def trace(
        self,
        on: "Tracer",
        x: TracedTensor,
        out: TracedTensor,
        tokens: int,
        *,
        parts: int = 1,
        added: int | None = None,
    ) -> TracedTensor:
        """Write down what is added to `out`, the product of the matrix and `x`, of so many tokens; the sum. Of routed
        experts that are computed one after the other, x and out are those of one of so many `parts`; added: as of
        `OpTrace.linear`."""
        raise NotImplementedError

    def trace_beside(self, on: "Tracer") -> None:
        """Write down what it computes of a stack of routed experts once, before the products of single ones."""


def alone_name(parameter: ParameterSpec) -> str:
    """What a parameter of a task is called in a run of that task alone, which draws it by this name."""
    return parameter.name.replace(f".{TASKS}.{parameter.task}.", ".", 1) if parameter.task else parameter.name


@frozen
class AdaptedBlock(Chain):
    """A block, which is its only piece, with an adapter of some of its matrices."""

    matrices: tuple[AdaptedMatrix, ...]

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """Those of an adapter stand behind those of the module that they are added to."""
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
    """The adapters that several tasks have of a matrix, each of some of the rows; as the rows differ from microbatch to
    microbatch, the trace has all of them go through that of the widest task."""

    of: tuple[AdaptedMatrix, ...]

    def trace_beside(self, on: "Tracer") -> None:
        for matrix in self.of:
            matrix.trace_beside(on)

    def trace(
        self,
        on: "Tracer",
        x: TracedTensor,
        out: TracedTensor,
        tokens: int,
        *,
        parts: int = 1,
        added: int | None = None,
    ) -> TracedTensor:
        adapter, widest = on.run.architecture.adapter, widest_task(on.run.architecture)
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
    """(layer, matrix) of all that an adapter is of, in the order of the model; the head is in no layer."""
    found = {layer: kind.block for kind in arch.kinds for layer in kind.layers}
    for layer, block in sorted(found.items()):
        if isinstance(block, AdaptedBlock):
            yield from ((layer, matrix) for matrix in block.matrices)
    yield from ((None, matrix) for matrix in arch.head_matrices)
