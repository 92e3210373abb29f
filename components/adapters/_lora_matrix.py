"""LoRA matrices of a matrix of a block: parameters, shapes and costs."""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from xtrain.blocks.adapted import AdaptedMatrix
from xtrain.blocks.op_trace import MATMUL, TP, CollectiveCall, TracedTensor
from xtrain.dsl.schema.adapters import DROPOUT_CHUNK
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


DROPOUT_SCRATCH: Final = 8  # bytes per drawn number: the random bits, and the shifted bits
NORM_CHUNK: Final = 2**22  # elements of a matrix whose row norms are computed at a time


def rows_at_once(inputs: int) -> int:
    """Return the number of matrix rows whose norms are computed at a time."""
    return max(1, NORM_CHUNK // inputs)


@frozen
class LoraMatrix(AdaptedMatrix):
    """LoRA matrices A and B of a block's matrix; with `dora` also the magnitudes of its rows. drops: dropout on the
    inputs of A. by_input: tensor parallelism cuts the matrix by input. pissa: the initial A and B are stored too,
    and their product is subtracted from the matrix. turned: it is a stack of experts [E, outputs, inputs]."""

    rank: int
    scale: float
    dora: bool = False
    drops: bool = False
    by_input: bool = False
    pissa: bool = False
    turned: bool = False

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.components.adapters.lora_torch"

    @property
    def decomposes(self) -> bool:
        return self.pissa

    @property
    def drops_inputs(self) -> bool:
        return self.drops

    @property
    def scales(self) -> bool:
        return self.dora

    @property
    def magnitude(self) -> str:
        """Name of the row magnitudes inside the block."""
        return f"{self._before}lora_magnitude_vector"

    def factors(self) -> tuple[str, str]:
        """Return the names of A and B inside the block."""
        ending = "" if self.of_experts else ".weight"
        return f"{self._before}lora_A{ending}", f"{self._before}lora_B{ending}"

    @property
    def of_experts(self) -> bool:
        """True for a stack of routed experts, whose module holds the parameters of all experts."""
        return not self.name.endswith(".weight")

    @property
    def _before(self) -> str:
        """Prefix of the adapter's parameter names."""
        return f"{self.place}.{self.name.rpartition('.')[2]}_" if self.of_experts else f"{self.place}."

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return experts, inputs and outputs of a stack."""
        experts, rows, columns = shape
        return (experts, columns, rows) if self.turned else (experts, rows, columns)

    def begun(self) -> tuple[str, str]:
        """Return the names of the initial A and B, if they are stored."""
        a, b = (name.replace("lora_", "lora_begun_") for name in self.factors())
        return a, b

    def parameters(self, matrix: BlockParameter) -> Iterator[BlockParameter]:
        """Yield the adapter's parameters. If the matrix is cut by output, B and magnitudes are cut too, and every rank
        uses the whole A for its outputs. If it is cut by input, A is cut too, and the whole B is multiplied by the
        rank's own sums. Routed experts have one pair each, [E, inputs, R] and [E, R, outputs]."""
        column, row = matrix.cut == "column", matrix.cut == "row"
        if matrix.expert:
            experts, inputs, outputs = self._sides(matrix.shape)
            shapes = (experts, inputs, self.rank), (experts, self.rank, outputs)
        else:
            outputs, inputs = matrix.shape
            shapes = (self.rank, inputs), (outputs, self.rank)
        a, b = (
            BlockParameter(
                name=name, shape=shape, decays=True, initial="zeros", expert=matrix.expert, adapter=self.name
            )
            for name, shape in zip(self.factors(), shapes, strict=True)
        )
        a = evolve(a, cut="row" if row else None, partial="always" if column else "never" if row else matrix.partial)
        b = evolve(
            b, cut="column" if column else None, partial="always" if row else "never" if column else matrix.partial
        )
        if self.dora:
            shape = (matrix.shape[0], outputs) if matrix.expert else (outputs,)
            yield evolve(b, name=self.magnitude, shape=shape, decays=False, initial="ones")
        yield a
        yield b
        if self.pissa:
            yield from (evolve(each, name=name, begun=True) for each, name in zip((a, b), self.begun(), strict=True))

    def trace(
        self, on: "Tracer", x: TracedTensor, out: TracedTensor, tokens: int, *, parts: int = 1, added: int | None = None
    ) -> TracedTensor:
        a, b = self.factors()
        numbers = [prod(on.shapes[name]) for name in (a, b)]
        if len(on.shapes[a]) > 2:  # a token is multiplied by the factors of one expert
            numbers = [each // on.shapes[a][0] for each in numbers]
        if self.drops:
            size = tokens * on.shapes[a][1] * on.local.width // parts
            scratch = min(size // on.local.width, DROPOUT_CHUNK) * DROPOUT_SCRATCH
            x = on.ops.op(x, makes=size, scratch=(scratch, scratch), named=(x,))
        rest = None
        if self.drops and self.dora:
            shape, plain = on.shapes[self.name], out
            numbers_of_w = prod(shape[-2:])
            parts_of_w = shape[0] if self.of_experts and parts == 1 else 1
            out = on.ops.linear(
                x,
                plain.gradient,
                weight=0,
                flops=2 * tokens * numbers_of_w // parts,
                parameters=(self.name,),
                added=added,
                unpacked=on.unpacked(self.name, numbers_of_w * parts_of_w),
            )
            rest = on.ops.op(plain, out, makes=plain.gradient)
        low = on.ops.linear(
            x,
            tokens * self.rank * on.local.width // parts,
            weight=on.bytes_of(a) // parts,
            flops=2 * tokens * numbers[0] // parts,
            parameters=(a,),
            added=added,
        )
        if self.scale != 1:
            low = on.ops.op(low, makes=low.size)
        more = on.ops.linear(
            low,
            out.gradient,
            weight=on.bytes_of(b) // parts,
            flops=2 * tokens * numbers[1] // parts,
            parameters=(b,),
            added=added,
        )
        out = on.ops.add(out, more)
        if not self.dora:
            return out
        if not self.of_experts:
            scaled = self._scaled(on, out)
        else:
            own = (out.size,) if parts == 1 else ()  # every row's factors
            scaled = on.ops.op(out, makes=out.size, keeps=(out,), extra=own, scratch=(0, out.size))
        return scaled if rest is None else on.ops.add(scaled, rest)

    def trace_beside(self, on: "Tracer") -> None:
        if not self.dora:
            return
        (experts, inputs, outputs), exact = self._sides(on.shapes[self.name]), on.local.exact
        columns = min(outputs, rows_at_once(inputs))
        numbers = sum(prod(on.shapes[name]) for name in self.factors())
        casts = exact * (numbers + columns * inputs) if exact != on.local.width else 0
        size = experts * outputs
        norms = on.ops.op(
            makes=size * exact,
            scratch=(exact * columns * inputs + casts + on.unpacked(self.name, inputs * outputs), 0),
            saved=MATMUL,
            flops=2 * experts * outputs * inputs * self.rank,
        )
        on.ops.op(
            makes=size * on.local.width,
            keeps=(norms,),
            keeps_output=True,
            weights=on.bytes_of(self.magnitude),
            parameters=(self.magnitude,),
        )

    def _scaled(self, on: "Tracer", out: TracedTensor) -> TracedTensor:
        """Trace the row norms of W + s · B · A, a chunk of rows at a time, and the scaling of every output."""
        (outputs, inputs), exact = on.shapes[self.name], on.local.exact
        rows, sizes = min(outputs, rows_at_once(inputs)), [prod(on.shapes[name]) for name in self.factors()]
        casts = exact * (sizes[0] + rows * (inputs + sizes[1] // outputs)) if exact != on.local.width else 0
        sums = (CollectiveCall("tp", "all_reduce", TP, outputs * exact),) if self.by_input and on.axes.tensor else ()
        on.ops.op(
            makes=outputs * exact,
            scratch=(exact * rows * inputs + casts + on.unpacked(self.name, outputs * inputs), 0),
            saved=MATMUL,
            flops=2 * outputs * inputs * self.rank,
            calls=sums,
        )
        return on.ops.op(
            out,
            makes=out.size,
            keeps=(out,),
            extra=(outputs * exact, outputs * on.local.width),
            weights=on.bytes_of(self.magnitude),
            parameters=(self.magnitude,),
            scratch=(0, out.size),
        )
