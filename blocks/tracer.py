"""Recorder of a block's op trace on one rank. Pieces write to it what `runtime/nn` runs."""

from collections.abc import Callable, Mapping, Set
from math import prod
from typing import Any, NamedTuple, Protocol

from attrs import evolve, field

from xtrain.blocks.memory_simulator import scratch_of
from xtrain.blocks.op_trace import (
    MATMUL,
    REDUCE_SCATTER,
    TP,
    CollectiveCall,
    FsdpUnit,
    OpTrace,
    PieceTrace,
    TracedTensor,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.mesh import device_kind, fits
from xtrain.plan.resolved import Resolved


@frozen(kw_only=True)
class Local:
    """Sizes of one microbatch on one rank.

    tokens: the rank's tokens of the microbatch's rows. between: tokens of its residual stream, fewer if tensor
    parallelism cuts the sequence. routed: tokens that it sends to experts. sequence: positions of a whole row. heads,
    kv_heads, ffn: its share of them. spread_kv: key/value heads after ulysses distributes them, copies included. width,
    exact: bytes of a number in the compute format and in exact computations. attention: the kernel of rows that lie on
    one rank. fused: norms, rotations and SwiGLU are one pass each. flash: kernels do not store attention scores.
    grouped: one kernel computes all experts. token_keys: bytes of the token numbers that select dropped inputs. shared:
    bytes of tensors that the layers of transformers' code keep together.
    """

    rows: int
    tokens: int
    between: int
    routed: int
    sequence: int
    dim: int
    heads: int
    kv_heads: int
    spread_kv: int
    head_dim: int
    ffn: int
    vocab: int
    width: int
    exact: int
    attention: str
    fused: bool
    flash: bool
    grouped: bool
    token_keys: int
    shared: int = 0

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.between * self.dim * self.width

    @property
    def whole(self) -> int:
        """Bytes of activations of all tokens, `dim` wide."""
        return self.tokens * self.dim * self.width

    @property
    def queries(self) -> int:
        return self.tokens * self.heads * self.head_dim * self.width

    @property
    def keys(self) -> int:
        return self.tokens * self.kv_heads * self.head_dim * self.width


class BlockAxes(NamedTuple):
    """Names of axes as in `Traffic`; an empty name means one rank. sequence: the `sequence` setting of `tp`."""

    tensor: str
    sequence: bool
    ring: int
    ulysses: int
    row: str
    row_node: str
    experts: int


class TracedAdapter(Protocol):
    """Adapter of a matrix as a trace uses it; the class is `AdaptedMatrix` (`blocks/adapted.py`)."""

    @property
    def drops_inputs(self) -> bool: ...

    @property
    def scales(self) -> bool: ...

    def trace(
        self, on: "Tracer", x: TracedTensor, out: TracedTensor, tokens: int, *, parts: int = 1, added: int | None = None
    ) -> TracedTensor: ...

    def trace_beside(self, on: "Tracer") -> None: ...


@frozen(eq=False)
class Tracer:
    """Recorder that the pieces of a block write to, with the data that they share.

    experts: the FSDP unit of the block's experts. shapes: of its parameters, as a rank computes with them. quantised:
    names of parameters that are unpacked for each product. adapted: name of a matrix → its adapter. scaled: modules
    whose matrices are multiplied in fp8 or rounded. frozen: names of frozen parameters.
    """

    ops: OpTrace
    resolved: Resolved
    local: Local
    axes: BlockAxes
    experts: FsdpUnit | None
    shapes: Mapping[str, tuple[int, ...]]
    adapted: Mapping[str, TracedAdapter] = field(factory=dict)
    quantised: Set[str] = frozenset()
    scaled: Set[str] = frozenset()
    frozen: Set[str] = frozenset()

    def unpacked(self, name: str, numbers: int) -> int:
        """Return the bytes while `numbers` numbers of a matrix are unpacked for a product; 0 if it is not quantized."""
        base = self.resolved.cuts.base
        return 0 if name not in self.quantised or base is None else numbers * self.local.width + base.scratch(numbers)

    def linear(self, x: TracedTensor, name: str, tokens: int, *, bias: bool = True) -> TracedTensor:
        """Record x · Wᵀ of the module `name` on `tokens` tokens, with its bias if it has one."""
        names = [each for each in (f"{name}.weight", *((f"{name}.bias",) if bias else ())) if each in self.shapes]
        outputs, inputs = self.shapes[names[0]]
        if name in self.scaled:
            return self._scaled_linear(x, name, names, tokens)
        out = self.ops.linear(
            x,
            tokens * outputs * self.local.width,
            weight=self.bytes_of(*names),
            flops=2 * tokens * outputs * inputs,
            parameters=names,
            unpacked=self.unpacked(names[0], outputs * inputs),
        )
        adapted = self.adapted.get(names[0])
        return out if adapted is None else adapted.trace(self, x, out, tokens)

    def _scaled_linear(self, x: TracedTensor, name: str, names: list[str], tokens: int) -> TracedTensor:
        """Record the product in fp8 or of rounded matrices; the bias is added afterwards."""
        from xtrain.blocks.scaled_products import Fp8Product, RoundedProduct  # most specs do without

        (weight, *biases), local, formats = names, self.local, self.resolved.formats
        outputs, inputs = self.shapes[weight]
        cut = next((style for pattern, style in self.resolved.cuts.rules if fits(f"layers.0.{name}", pattern)), None)
        tensor = (self.axes.tensor,) if self.axes.tensor else ()
        context = tuple(axis for axis in ("ring", "ulysses") if self.resolved.size(axis) > 1)
        common: dict[str, Any] = {
            "tokens": tokens,
            "outputs_wide": outputs,
            "inputs_wide": inputs,
            "width": local.width,
            "inputs": tensor if cut == "row" else (),
            "outputs": tensor if cut == "column" else (),
            "spread": (*context, *(tensor if cut is None and tokens < local.tokens else ())),
            "trained": weight not in self.frozen,
        }
        if formats.fp8 is not None:
            product = Fp8Product(
                recipe=formats.fp8.chosen,
                exact=local.exact if device_kind(self.resolved.spec) == "cpu" else 0,
                **common,
            )
        else:
            assert formats.qat is not None
            product = RoundedProduct(qat=formats.qat, **common)
        makes = tokens * outputs * local.width
        flops = 2 * tokens * outputs * inputs
        out = self.ops.linear(x, makes, weight=self.bytes_of(weight), flops=flops, parameters=(weight,), scaled=product)
        for bias in biases:
            out = self.ops.op(out, makes=makes, fresh=False, weights=self.bytes_of(bias), parameters=(bias,))
        return out

    def row_parallel_linear(self, x: TracedTensor, name: str, tokens: int) -> TracedTensor:
        """Record the product with a matrix that tensor parallelism cuts by input: the bias is added to the sum."""
        return self.row_parallel_sum(self.row_parallel_summand(x, name, tokens), name)

    def row_parallel_summand(self, x: TracedTensor, name: str, tokens: int) -> TracedTensor:
        """Record a rank's summand of a product that is cut by input."""
        return self.linear(x, name, tokens, bias=not self.axes.tensor)

    def row_parallel_sum(self, x: TracedTensor, name: str) -> TracedTensor:
        """Record the sum of the ranks' summands, with the bias."""
        out, bias = self.row_parallel_output(x), f"{name}.bias"
        if not self.axes.tensor or bias not in self.shapes:
            return out
        return self.ops.op(out, makes=out.gradient, fresh=False, weights=self.bytes_of(bias), parameters=(bias,))

    def in_pieces(
        self, x: TracedTensor, tokens: int, write: "Callable[[Tracer, TracedTensor, int], TracedTensor]"
    ) -> TracedTensor:
        """Record what `write` records for `tokens` tokens, in pieces if the plan tiles them."""
        tile = self.resolved.tile
        if tile is None or tile >= tokens:
            return write(self, x, tokens)
        size = x.gradient * tile // tokens
        trace = OpTrace(TracedTensor(size, size))
        write(evolve(self, ops=trace), trace.input, tile).gradient = 0  # its gradient is part of the whole gradient
        piece, pieces = PieceTrace(trace, self.local.exact // self.local.width), -(-tokens // tile)
        calls = [call for op in trace.ops for call in op.calls]
        return self.ops.op(
            x,
            makes=x.gradient,
            keeps=(x,),
            weights=sum(op.weights for op in trace.ops),
            parameters=trace.parameters,
            scratch=scratch_of(piece),
            saved=MATMUL,
            flops=sum(op.flops for op in trace.ops) * tokens // tile,
            calls=pieces * calls,
            back_calls=pieces * [*calls, *(call for op in trace.ops for call in (*op.back_calls, *op.weight_calls))],
            piece=piece,
        )

    def norm(
        self,
        x: TracedTensor,
        name: str,
        rows: int,
        *,
        cut: bool = False,
        parts: int = 1,
        width: int | None = None,
    ) -> TracedTensor:
        """Record RMSNorm of `rows` rows: it keeps its input and, for each row, the reciprocal root mean square. cut:
        tensor parallelism cuts rows, whose squares are then summed over ranks. parts: of a row, each normalized by
        itself. width: of the rows of a norm without a weight."""
        local, weights = self.local, () if width is not None else (f"{name}.weight",)
        numbers = rows * (prod(self.shapes[weights[0]]) if weights else width or 0)
        size, exact = numbers * local.width, numbers * local.exact
        casts = local.exact != local.width
        sums = (CollectiveCall("tp", "all_reduce", TP, rows * local.exact),) if cut and self.axes.tensor else ()
        if local.fused and not sums and parts == 1:
            arranged = size if x.of is not None else 0  # parts of rows are copied first
            scratch = (arranged, arranged)
        else:
            scratch = (2 * exact, 5 * exact - size) if casts else (0, 2 * exact)
        return self.ops.op(
            x,
            makes=size,
            keeps=(x,),
            extra=(rows * parts * local.exact,),
            calls=sums,
            back_calls=sums,
            weights=self.bytes_of(*weights),
            parameters=weights,
            scratch=scratch,
        )

    def bytes_of(self, *names: str) -> int:
        """Return the bytes of the gradients of parameters in the compute format."""
        return sum(prod(self.shapes[name]) for name in names) * self.local.width

    def column_parallel_input(self, x: TracedTensor, width: int | None = None) -> TracedTensor:
        """Record the gather of activations before matrices that tensor parallelism cuts by output. width: of the
        activations; None: width of the residual stream."""
        if not self.axes.tensor:
            return x
        size = self.local.whole if width is None else self.local.tokens * width * self.local.width
        if not self.axes.sequence:
            return self.ops.views(x, back_calls=(CollectiveCall("tp", "all_reduce", TP, size),))[0]
        return self.ops.op(
            x,
            makes=size,
            scratch=(size, size),
            calls=(CollectiveCall("tp", "all_gather", TP, size),),
            back_calls=(CollectiveCall("tp", "reduce_scatter", TP, size),),
        )

    def row_parallel_output(self, x: TracedTensor) -> TracedTensor:
        """Record the sum of partial results after matrices that tensor parallelism cuts by input."""
        if not self.axes.tensor:
            return x
        size = self.local.whole
        if not self.axes.sequence:
            return self.ops.op(
                x, makes=size, fresh=False, scratch=(0, 0), calls=(CollectiveCall("tp", "all_reduce", TP, size),)
            )
        return self.ops.op(
            x,
            makes=self.local.stream,
            scratch=(size, size),
            saved=REDUCE_SCATTER,
            calls=(CollectiveCall("tp", "reduce_scatter", TP, size),),
            back_calls=(CollectiveCall("tp", "all_gather", TP, size),),
        )
