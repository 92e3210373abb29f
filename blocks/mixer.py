"""`UserMixer`: a user's `@layer` function that mixes positions, as a piece of a block."""

from collections.abc import Mapping, Set
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field

from xtrain.blocks.code_layer import position_flops, trace_described
from xtrain.blocks.op_trace import TracedTensor
from xtrain.blocks.user_layer import UserFunction
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


@frozen(kw_only=True)
class LayerState:
    """State that a layer carries from one position of a document to the next. shape: of one document. initial: of its
    first position."""

    shape: tuple[int, ...]
    initial: Literal["zeros", "ones"]


def _states(values: Any) -> tuple[LayerState, ...]:
    return tuple(each if isinstance(each, LayerState) else LayerState(**each) for each in values)


@frozen(kw_only=True)
class UserMixer(UserFunction):
    """Layer that mixes the positions of a document: a position sees itself, and earlier ones by its states alone.

    Every tensor-parallel rank computes all of it. A description that `runtime/inspect/mixers.py` makes has its costs.
    """

    composable: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

    states: tuple[LayerState, ...] = field(converter=_states)

    @classmethod
    def torch_module(cls) -> str:
        return "xtrain.runtime.nn.mixer"

    def position_flops(self, arch: Architecture) -> int:
        return position_flops(self._costs(arch), self.parameters(arch))

    def pair_flops(self, arch: Architecture) -> int:
        return round(sum(op["flops"][2] for op in self._costs(arch)["float32"]))

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        return sum(prod(state.shape) for state in self.states)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        split = on.axes.tensor and on.axes.sequence
        x = on.column_parallel_input(x) if split else x
        first = len(on.ops.ops)
        out = trace_described(on, x, self._costs(on.resolved.architecture), {})
        for op in on.ops.ops[first:]:
            op.apart = True
        return on.ops.op(out, makes=x.gradient // on.resolved.size("tp")) if split else out

    def _costs(self, arch: Architecture) -> Mapping[str, Any]:
        return arch.own["mixers"][self.name]["costs"]
