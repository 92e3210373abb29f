"""Op trace of a block on one rank, recorded by its pieces (`xtrain.blocks`) as `runtime/nn` runs them."""

from collections.abc import Callable, Mapping, Set
from math import prod
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from xtrain.blocks.block import block_of
from xtrain.blocks.op_trace import (
    CP,
    INDEX,
    MATMUL,
    TP,
    CollectiveCall,
    Fp8Product,
    FsdpUnit,
    OpTrace,
    PieceTrace,
    TracedTensor,
)
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.plan.architecture import block_parameters, expert_widths, name_in_block
from xtrain.plan.estimates import Hardware
from xtrain.plan.mesh import device_kind, fits
from xtrain.plan.parameters import block_tensors
from xtrain.plan.resolved import Resolved, TrainedKind, attention_kernels, pointwise_kernels
from xtrain.planner.costs.memory_simulator import scratch_of, without_frozen
from xtrain.text.units import BYTES

if TYPE_CHECKING:
    from xtrain.blocks.adapted import AdaptedMatrix


HOPPER = 9  # the CUDA capability for which torch has grouped-product kernels
WIDEST_FLASH = 256  # the largest head width of flash attention


@frozen(kw_only=True)
class Local:
    """Sizes of one microbatch on one rank.

    tokens: the rank's tokens of the microbatch's rows. between: tokens of its residual stream, fewer if tensor
    parallelism cuts the sequence. routed: tokens that it sends to experts. sequence: positions of a whole row. heads,
    kv_heads, ffn: its share of them. spread_kv: key/value heads after ulysses distributes them, copies included. width,
    exact: bytes of a number in the compute format and in exact computations. attention: the kernel of rows that lie on
    one rank. fused: norms, rotations and SwiGLU are one pass each. flash: kernels do not store attention scores.
    grouped: one kernel computes all experts. token_keys: bytes of the token numbers that select dropped inputs.
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


def local_of(run: Resolved, cluster: Hardware) -> Local:
    """Return the sizes on the rank that has the most."""
    arch, batch, spec = run.architecture, run.batch, run.spec
    tp, ulysses = run.size("tp"), run.size("ulysses")
    tokens = run.positions
    kv_heads = arch.kv_heads // tp
    device = "cpu" if device_kind(spec) == "cpu" else "cuda"
    compute = run.formats.compute
    exact = max(BYTES[compute], BYTES["fp32"])
    flash = device == "cpu" or (compute == "bf16" and arch.head_dim % 8 == 0 and arch.head_dim <= WIDEST_FLASH)
    return Local(
        rows=batch.micro,
        tokens=tokens,
        between=tokens // tp if spec.parallel.tp.sequence else tokens,
        routed=tokens // tp,
        sequence=batch.sequence,
        dim=arch.dim,
        heads=arch.heads // tp,
        kv_heads=kv_heads,
        spread_kv=kv_heads if kv_heads % ulysses == 0 else ulysses,
        head_dim=arch.head_dim,
        ffn=arch.ffn // tp,
        vocab=-(-arch.vocab // tp),
        width=BYTES[compute],
        exact=exact,
        attention=attention_kernels(run)[device],
        fused=pointwise_kernels(run)[device] == "fused",
        flash=flash,
        grouped=compute == "bf16"
        and _capability(cluster) == HOPPER
        and not any(each % 8 for each in expert_widths(arch))
        and not isinstance(arch.adapter, TaskAdapters),  # experts are then computed one after the other
        token_keys=INDEX * tokens if arch.adapter is not None and arch.adapter.drops else 0,
    )


def _capability(cluster: Hardware) -> int:
    """Return the major version of the CUDA capability; 0 if unknown."""
    sheet = CLUSTERS[cluster.preset].sheet
    return 0 if sheet is None else sheet.capability


@frozen
class BlockAxes:
    """Names of axes as in `Traffic`; an empty name means one rank. sequence: the `sequence` setting of `tp`."""

    tensor: str
    sequence: bool
    ring: int
    ulysses: int
    row: str
    row_node: str
    experts: int


def axes_of(run: Resolved) -> BlockAxes:
    # A teacher is frozen, so its routers take no losses of rows.
    row = run.wide("ring", "ulysses", "tp") if run.inventory.trained else ()
    return BlockAxes(
        tensor="tp" if run.size("tp") > 1 else "",
        sequence=run.spec.parallel.tp.sequence,
        ring=run.size("ring"),
        ulysses=run.size("ulysses"),
        row=" · ".join(row),
        row_node=CP if run.context > 1 else TP,
        experts=run.layout.ep,
    )


def block_trace(run: Resolved, local: Local, kind: TrainedKind, experts: FsdpUnit | None) -> OpTrace:
    """Return the op trace of a kind of layers. experts: the FSDP unit of its experts, if they form one."""
    shapes = {
        name_in_block(parameter.name): run.cuts.gathered_shape(parameter)
        for parameter in block_parameters(run.architecture, kind.first)
    }
    trace = OpTrace(TracedTensor(local.stream, local.stream))
    quantised = frozenset(
        name_in_block(each.name) for each in block_tensors(run.inventory, kind.first) if each.quantised
    )
    tracer = Tracer(
        trace, run, local, axes_of(run), experts, shapes, quantised=quantised, fp8=kind.fp8, frozen=kind.frozen
    )
    block_of(kind).trace(tracer, trace.input)
    if run.async_tp:
        _multiply_meanwhile(trace)
    if kind.below and not kind.frozen:
        return trace
    return without_frozen(trace, shapes, kind.frozen, below=kind.below)


def _multiply_meanwhile(trace: OpTrace) -> None:
    """Let a tp gather overlap the product that uses it, and a tp sum the product that makes it. If several products use
    one gather, only the first counts."""
    for place, op in enumerate(trace.ops):
        calls = [call for call in (*op.calls, *op.back_calls) if call.node == TP]
        gathers = any(call.op == "all_gather" for call in op.calls)
        if {call.op for call in calls} != {"all_gather", "reduce_scatter"}:
            continue
        ops = trace.ops[place + 1 :] if gathers else reversed(trace.ops[:place])
        flops = next((each.flops for each in ops if each.flops and each.parameters), 0)
        op.calls = tuple(evolve(call, meanwhile=flops) for call in op.calls)
        op.back_calls = tuple(evolve(call, meanwhile=flops) for call in op.back_calls)


@frozen(eq=False)
class Tracer:
    """Recorder that the pieces of a block write to, with the data that they share.

    experts: the FSDP unit of the block's experts. shapes: of its parameters, as a rank computes with them. quantised:
    names of parameters that are unpacked for each product. adapted: name of a matrix → its adapter. fp8: modules whose
    matrices are multiplied in fp8. frozen: names of frozen parameters.
    """

    ops: OpTrace
    run: Resolved
    local: Local
    axes: BlockAxes
    experts: FsdpUnit | None
    shapes: Mapping[str, tuple[int, ...]]
    adapted: "Mapping[str, AdaptedMatrix]" = field(factory=dict)
    quantised: Set[str] = frozenset()
    fp8: Set[str] = frozenset()
    frozen: Set[str] = frozenset()

    def unpacked(self, name: str, numbers: int) -> int:
        """Return the bytes while `numbers` numbers of a matrix are unpacked for a product; 0 if it is not quantized."""
        base = self.run.cuts.base
        return 0 if name not in self.quantised or base is None else numbers * self.local.width + base.scratch(numbers)

    def linear(self, x: TracedTensor, name: str, tokens: int, *, bias: bool = True) -> TracedTensor:
        """Record x · Wᵀ of the module `name` on `tokens` tokens, with its bias if it has one."""
        names = [each for each in (f"{name}.weight", *((f"{name}.bias",) if bias else ())) if each in self.shapes]
        outputs, inputs = self.shapes[names[0]]
        if name in self.fp8:
            return self._fp8_linear(x, name, names, tokens)
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

    def _fp8_linear(self, x: TracedTensor, name: str, names: list[str], tokens: int) -> TracedTensor:
        """Record the product in fp8; the bias is added afterwards."""
        (weight, *biases), local, fp8 = names, self.local, self.run.formats.fp8
        assert fp8 is not None
        outputs, inputs = self.shapes[weight]
        cut = next((style for pattern, style in self.run.cuts.rules if fits(f"layers.0.{name}", pattern)), None)
        tensor = (self.axes.tensor,) if self.axes.tensor else ()
        context = tuple(axis for axis in ("ring", "ulysses") if self.run.size(axis) > 1)
        product = Fp8Product(
            recipe=fp8.chosen,
            tokens=tokens,
            outputs_wide=outputs,
            inputs_wide=inputs,
            width=local.width,
            exact=local.exact if device_kind(self.run.spec) == "cpu" else 0,
            inputs=tensor if cut == "row" else (),
            outputs=tensor if cut == "column" else (),
            spread=(*context, *(tensor if cut is None and tokens < local.tokens else ())),
            trained=weight not in self.frozen,
        )
        makes = tokens * outputs * local.width
        flops = 2 * tokens * outputs * inputs
        out = self.ops.linear(x, makes, weight=self.bytes_of(weight), flops=flops, parameters=(weight,), fp8=product)
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
        tile = self.run.tile
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

    def norm(self, x: TracedTensor, name: str, rows: int, *, cut: bool = False) -> TracedTensor:
        """Record RMSNorm of `rows` rows: it keeps its input and, for each row, the reciprocal root mean square. cut:
        tensor parallelism cuts rows, whose squares are then summed over ranks."""
        local, weight = self.local, f"{name}.weight"
        numbers = rows * prod(self.shapes[weight])
        size, exact = numbers * local.width, numbers * local.exact
        casts = local.exact != local.width
        sums = (CollectiveCall("tp", "all_reduce", TP, rows * local.exact),) if cut and self.axes.tensor else ()
        if local.fused and not sums:
            arranged = size if x.of is not None else 0  # parts of rows are copied first
            scratch = (arranged, arranged)
        else:
            scratch = (2 * exact, 5 * exact - size) if casts else (0, 2 * exact)
        return self.ops.op(
            x,
            makes=size,
            keeps=(x,),
            extra=(rows * local.exact,),
            calls=sums,
            back_calls=sums,
            weights=self.bytes_of(weight),
            parameters=(weight,),
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
            calls=(CollectiveCall("tp", "reduce_scatter", TP, size),),
            back_calls=(CollectiveCall("tp", "all_gather", TP, size),),
        )
