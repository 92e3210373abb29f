"""Per-layer inputs: a vector of each token for each block, as in Gemma 3n and Gemma 4 E2B and E4B.

Input of block l: (norm(P_l x / √dim) + √width · E_l[token]) / √2 with the residual stream x before the first block. The
first block makes the inputs of all blocks; each block adds a gated projection of its own to the residual stream.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.blocks.block import Layer, norm_weight, not_above_zero
from xtrain.blocks.op_trace import INDEX, TP, CollectiveCall, TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer

INPUTS: Final = "layer_inputs"


def of_layer(number: int) -> str:
    """Return the name of the input of a block."""
    return f"{INPUTS}.{number}"


@frozen
class LayerInputsLayer(Layer):
    """Layer of the first block that makes the inputs of all blocks, `width` numbers each, and returns x as it is.
    vocab: number of tokens that its table has rows for.

    Tensor parallelism cuts the rows of the table; each rank projects its own positions. Raises ValueError unless width
    and vocab are above 0.
    """

    composable: ClassVar[bool] = False  # blocks of a user's family are equal
    adapts: ClassVar[bool] = True
    embeds: ClassVar[bool] = True
    gives: ClassVar[str] = INPUTS

    width: int
    vocab: int

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.layer_inputs"

    def __attrs_post_init__(self) -> None:
        if (problem := not_above_zero(self, "width", "vocab")) is not None:
            raise ValueError(problem)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"makes inputs of {self.width} for each block",)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        every = arch.blocks * self.width
        yield BlockParameter(
            name=f"{self.name}.table.weight",
            shape=(self.vocab, every),
            decays=False,
            initial="normal",
            cut="column",
            multiplied=0.0,
            linear=False,
        )
        yield _matrix(f"{self.name}.projection", every, arch.dim)
        yield norm_weight(f"{self.name}.norm", self.width, "by_position")

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        layers, local = on.resolved.architecture.blocks, on.local
        out = on.linear(x, f"{self.name}.projection", local.between)
        size = out.size
        out = on.norm(on.ops.op(out, makes=size), f"{self.name}.norm", local.between * layers)
        out = on.ops.add(out, on.ops.op(self._embedded(on, size), makes=size))
        on.ops.give(self.gives, *on.ops.views(out, layers))
        return x

    def _embedded(self, on: "Tracer", size: int) -> TracedTensor:
        """Record the lookup of all vectors of each token. size: bytes for this rank's positions."""
        local, tensor, table = on.local, on.axes.tensor, f"{self.name}.table.weight"
        calls: tuple[CollectiveCall, ...] = ()
        back: tuple[CollectiveCall, ...] = ()
        whole = size // local.between * local.tokens
        if tensor:
            calls = (CollectiveCall("tp", "reduce_scatter" if on.axes.sequence else "all_reduce", TP, whole),)
            back = (CollectiveCall("tp", "all_gather", TP, whole),) if on.axes.sequence else ()
        return on.ops.op(
            makes=size,
            extra=(local.tokens * (INDEX + 1),) if tensor else (),
            scratch=(2 * whole, whole) if tensor else (0, 0),
            weights=on.bytes_of(table),
            parameters=(table,),
            calls=calls,
            back_calls=back,
        )


@frozen
class LayerInputLayer(Layer):
    """Projection of GELU(gate(x)) · input of this block, for the residual stream. width: of the input.

    Tensor parallelism does not cut its matrices: each rank computes its own positions.
    """

    composable: ClassVar[bool] = False
    adapts: ClassVar[bool] = True
    takes: ClassVar[str] = INPUTS

    width: int

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.layer_inputs"

    def __attrs_post_init__(self) -> None:
        if (problem := not_above_zero(self, "width")) is not None:
            raise ValueError(problem)

    def taken(self, layer: int) -> str:
        return of_layer(layer)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield _matrix(f"{self.name}.gate", self.width, arch.dim)
        yield _matrix(f"{self.name}.projection", arch.dim, self.width)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        ops, tokens = on.ops, on.local.between
        gate = on.linear(x, f"{self.name}.gate", tokens)
        (given,) = ops.take(self.takes, gate.size)
        active = ops.op(gate, makes=gate.size, keeps=(gate,))
        gated = ops.op(active, given, makes=gate.size, keeps=(active, given))
        return on.linear(gated, f"{self.name}.projection", tokens)


def _matrix(module: str, outputs: int, inputs: int) -> BlockParameter:
    return BlockParameter(
        name=f"{module}.weight", shape=(outputs, inputs), decays=True, initial="normal", partial="by_position"
    )
