"""SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate(x)) · up(x)); and the same with GELU."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from xtrain.planner.architecture import Architecture, BlockParameter
from xtrain.planner.blocks.block import Layer, later, row_bias
from xtrain.planner.costs.op_trace import TracedTensor

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer


@frozen
class SwiGLULayer(Layer):
    """Of width `ffn`, which tensor parallelism cuts. bias: one on each of its three matrices. activation: of the gate;
    gelu_tanh is GELU as its tanh approximates it, which makes it a GEGLU."""

    reads = ("ffn",)
    adapts = True

    bias: bool = later(False)
    activation: Literal["silu", "gelu_tanh"] = later("silu")

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        return swiglu_parameters(self.name, arch.dim, arch.ffn, cut=True, bias=self.bias)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"ffn {arch.ffn}",)

    @property
    def tiles(self) -> bool:
        return True

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        summands = on.in_pieces(on.column_parallel_input(x), on.local.tokens, self._trace)
        return on.row_parallel_sum(summands, f"{self.name}.down_proj")

    def _trace(self, on: "Tracer", x: TracedTensor, tokens: int) -> TracedTensor:
        fused = on.local.fused and self.activation == "silu"
        return on.row_parallel_summand(_hidden(on, x, self.name, tokens, fused), f"{self.name}.down_proj", tokens)


def swiglu_parameters(name: str, dim: int, ffn: int, *, cut: bool, bias: bool = False) -> Iterator[BlockParameter]:
    """cut: tensor parallelism cuts the width; else each of its ranks has all of it, for its own positions."""
    for matrix, rows, columns in (("gate_proj", ffn, dim), ("up_proj", ffn, dim), ("down_proj", dim, ffn)):
        last = matrix == "down_proj"
        yield BlockParameter(
            name=f"{name}.{matrix}.weight",
            shape=(rows, columns),
            decays=True,
            initial="residual" if last else "normal",
            cut=("row" if last else "column") if cut else None,
            partial="never" if cut else "always",
        )
        if bias and last:
            yield row_bias(f"{name}.{matrix}", rows, "by_position" if cut else "always")
        elif bias:
            yield BlockParameter(
                name=f"{name}.{matrix}.bias",
                shape=(rows,),
                decays=False,
                initial="zeros",
                cut="column" if cut else None,
                partial="never" if cut else "always",
            )


def trace_swiglu(on: "Tracer", x: TracedTensor, name: str, tokens: int) -> TracedTensor:
    """Of one that is not cut."""
    return on.linear(_hidden(on, x, name, tokens, on.local.fused), f"{name}.down_proj", tokens)


def _hidden(on: "Tracer", x: TracedTensor, name: str, tokens: int, fused: bool) -> TracedTensor:
    gate = on.linear(x, f"{name}.gate_proj", tokens)
    if fused:
        up = on.linear(x, f"{name}.up_proj", tokens)
        return on.ops.op(gate, up, makes=up.size, keeps=(up, gate))  # each for both gradients
    with on.ops.scope():
        active = on.ops.op(gate, makes=gate.size, keeps=(gate,))
    up = on.linear(x, f"{name}.up_proj", tokens)
    with on.ops.scope():
        return on.ops.op(active, up, makes=up.size, keeps=(active, up))
