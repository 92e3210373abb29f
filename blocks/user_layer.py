"""`UserLayer`: a user's `@layer` function as a piece of a block: its operations and their cost."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import evolve, field

from xtrain.blocks.block import Layer
from xtrain.blocks.op_trace import TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


# Elementwise function → what torch keeps of it for its backward, and how many tensors of its size the backward makes on
# the way.
UNARY: Final[dict[str, tuple[str, int]]] = {
    "relu": ("output", 0),
    "sigmoid": ("output", 0),
    "tanh": ("output", 0),
    "exp": ("output", 0),
    "silu": ("input", 0),
    "gelu": ("input", 0),
    "mish": ("input", 0),
    "softplus": ("input", 0),
    "leaky_relu": ("input", 0),
    "hardswish": ("input", 0),
    "sin": ("input", 1),
    "cos": ("input", 1),
    "abs": ("input", 1),
    "square": ("input", 2),
    "pow": ("input", 2),
}
# Attribute names of a torch module, which no layer or weight may have.
RESERVED: Final = frozenset(
    """
    T_destination add_module angles apply axes beginning bfloat16 buffers call_super_init children compile compute cpu
    cuda double dump_patches embeds eval extra_repr float forward function get_buffer get_extra_state get_parameter
    get_submodule gives half in_pieces ipu is_cut is_whole load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters of_piece parameters part positions recompute register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ routes set_extra_state set_submodule
    share_memory state_dict step takes tiled tiles to to_empty train training type xpu zero_grad
    """.split()  # noqa: SIM905
)


def is_reserved(name: str) -> bool:
    """Return True if no layer or weight may have this name. Names that begin with `_` are reserved for all versions of
    torch."""
    return name in RESERVED or name.startswith("_")


@frozen(kw_only=True)
class LayerOp:
    """Operation of a layer. of: the values that it takes: 0 is the layer's input, n the result of its operation n.
    weights: names of the parameters that it uses."""

    name: str
    of: tuple[int, ...]
    weights: tuple[str, ...] = ()


def _ops(values: Any) -> tuple[LayerOp, ...]:
    return tuple(each if isinstance(each, LayerOp) else LayerOp(**each) for each in values)


def _weights(values: Any) -> tuple[BlockParameter, ...]:
    return tuple(each if isinstance(each, BlockParameter) else BlockParameter(**each) for each in values)


@frozen(kw_only=True)
class UserFunction(Layer):
    """Layer of a user's function. function, arguments: what ranks call. code: 16 hex digits over what its text
    computes. weights: its parameters."""

    composable: ClassVar[bool] = False

    name: str
    function: str
    arguments: Mapping[str, Any] = field(hash=False)
    code: str
    weights: tuple[BlockParameter, ...] = field(converter=_weights)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        return (evolve(weight, name=f"{self.name}.{weight.name}") for weight in self.weights)


@frozen(kw_only=True)
class UserLayer(UserFunction):
    """Layer that computes each position by itself. ops: its operations; the last gives its result."""

    composable: ClassVar[bool] = False

    ops: tuple[LayerOp, ...] = field(converter=_ops)

    @property
    def is_cut(self) -> bool:
        """True if tensor parallelism cuts it; otherwise each rank holds all of it, for its own positions."""
        return any(weight.cut for weight in self.weights)

    @property
    def tiles(self) -> bool:
        return any(each.name == "linear" for each in self.ops)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        tokens = on.local.tokens if self.is_cut else on.local.between
        x = on.column_parallel_input(x) if self.is_cut else x
        out = on.in_pieces(x, tokens, self._trace) if self.tiles else self._trace(on, x, tokens)
        return on.row_parallel_output(out) if self.is_cut else out

    def _trace(self, on: "Tracer", x: TracedTensor, tokens: int) -> TracedTensor:
        values = [x]
        for each in self.ops:
            names = [f"{self.name}.{name}" for name in each.weights]
            values.append(_traced(on, each.name, [values[i] for i in each.of], names, tokens))
        return values[-1]


def _traced(on: "Tracer", name: str, of: list[TracedTensor], modules: list[str], tokens: int) -> TracedTensor:
    """Record one operation as torch runs it."""
    ops, size, weights = on.ops, of[0].gradient, [f"{module}.weight" for module in modules]
    numbers = on.bytes_of(*weights)
    match name:
        case "linear":
            outputs, inputs = on.shapes[weights[0]]
            makes, flops = tokens * outputs * on.local.width, 2 * tokens * outputs * inputs
            return ops.linear(of[0], makes, weight=numbers, flops=flops, parameters=weights)
        case "rms_norm":
            return on.norm(of[0], modules[0], tokens)
        case "softmax":
            return ops.op(*of, makes=size, keeps_output=True)
        case "scaled":
            return ops.op(*of, makes=size)
        case "shifted":
            return ops.op(*of, makes=size, fresh=False, weights=numbers, parameters=weights)
        case "add" | "sub":
            return ops.op(*of, makes=size, fresh=name == "sub")
        case "mul" if weights:  # products with the gradient are summed over positions
            scratch = (0, size)
            return ops.op(*of, makes=size, keeps=of, weights=numbers, parameters=weights, scratch=scratch)
        case "mul":
            return ops.op(*of, makes=size, keeps=of)
        case "div":
            return ops.op(*of, makes=size, keeps=of, scratch=(0, 2 * size))
    needs, between = UNARY[name]
    keeps = of if needs == "input" else ()
    return ops.op(*of, makes=size, keeps=keeps, keeps_output=needs == "output", scratch=(0, between * size))
