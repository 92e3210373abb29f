"""Grouped-query attention with rotary positions, over rows that context parallelism may have spread over ranks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ..architecture import Architecture, BlockParameter
from ..costs.op_trace import ALL_TO_ALL, ATTENTION, CP, CollectiveCall, TracedTensor
from .block import Layer, later, row_bias
from .norm import norm_weight

if TYPE_CHECKING:
    from ..costs.block_trace import Tracer


@frozen
class AttentionLayer(Layer):
    """qk_norm: RMSNorm on queries and keys, head by head, or with `wide_norm` over all heads together. bias: one on
    queries, keys and values. output_bias: one on what is added to the residual stream. rope: queries and keys are
    turned by their positions."""

    attends = True

    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = later(False)
    wide_norm: bool = later(False)
    rope: bool = later(True)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return ("rotary positions" if self.rope else "no positions",)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield BlockParameter(
                name=f"{self.name}.{name}.weight",
                shape=(width, arch.dim),
                decays=True,
                initial="normal",
                cut="column",
            )
            if self.bias:
                yield BlockParameter(
                    name=f"{self.name}.{name}.bias", shape=(width,), decays=False, initial="zeros", cut="column"
                )
        yield BlockParameter(
            name=f"{self.name}.o_proj.weight",
            shape=(arch.dim, queries),
            decays=True,
            initial="residual",
            cut="row",
        )
        if self.output_bias:
            yield row_bias(f"{self.name}.o_proj", arch.dim)
        if self.qk_norm and self.wide_norm:
            yield norm_weight(f"{self.name}.q_norm", queries, cut="column")
            yield norm_weight(f"{self.name}.k_norm", keys, cut="column")
        elif self.qk_norm:  # a rank has used them on its own heads
            yield norm_weight(f"{self.name}.q_norm", arch.head_dim, "always")
            yield norm_weight(f"{self.name}.k_norm", arch.head_dim, "always")

    def cached(self, arch: Architecture, tp: int) -> int:
        return 2 * arch.kv_heads // tp * arch.head_dim  # a key and a value of each of its heads

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        local = on.local
        x = on.column_parallel_input(x)

        def project(name: str, norm: str, heads: int) -> TracedTensor:
            y = on.linear(x, f"{self.name}.{name}", local.tokens)
            if not norm:
                return y
            size = y.size
            if self.qk_norm:
                rows = local.tokens * (1 if self.wide_norm else heads)
                y = on.norm(y, f"{self.name}.{norm}", rows, cut=self.wide_norm)
            if not self.rope:
                return y
            # x · cos + turned x · sin: nothing of x is kept.
            return on.ops.op(y, makes=size, scratch=(5 * size // 2, 2 * size))

        q = project("q_proj", "q_norm", local.heads)
        k = project("k_proj", "k_norm", local.kv_heads)
        v = project("v_proj", "", local.kv_heads)
        return on.row_parallel_linear(_kernel(on, q, k, v), f"{self.name}.o_proj", local.tokens)


def _kernel(on: "Tracer", q: TracedTensor, k: TracedTensor, v: TracedTensor) -> TracedTensor:
    """From queries, keys and values to what the output matrix takes."""
    ops, local, axes = on.ops, on.local, on.axes
    size, flops = local.queries, 4 * local.tokens * local.sequence * local.heads * local.head_dim
    statistics = local.tokens * local.heads * local.exact  # logsumexp of the scores
    if axes.ulysses == 1 and axes.ring == 1:
        return ops.op(
            *(q, k, v),
            makes=size,
            keeps=(q, k, v),
            keeps_output=True,
            extra=(statistics, *((local.rows * local.sequence**2 * local.width,) if local.masked else ())),
            saved=ATTENTION,
            flops=flops,
            attends=True,
        )
    parts: tuple[TracedTensor, ...] = (q, k, v)
    if axes.ulysses > 1:
        parts = (_to_heads(on, q, k, v),)
    out = (
        _ring(on, parts, flops, statistics)
        if axes.ring > 1
        else ops.op(
            *parts,
            makes=size,
            keeps=parts,
            keeps_output=True,
            extra=(statistics,),
            scratch=(0, parts[0].size),
            saved=ATTENTION,
            flops=flops,
            attends=True,
        )
    )
    return _to_positions(on, out) if axes.ulysses > 1 else out


def _to_heads(on: "Tracer", q: TracedTensor, k: TracedTensor, v: TracedTensor) -> TracedTensor:
    """One exchange of all three, which stay together."""
    ops, local = on.ops, on.local
    size = local.tokens * (local.heads + 2 * local.spread_kv) * local.head_dim * local.width
    call = CollectiveCall("ulysses", "all_to_all", CP, size)
    sent = ops.op(q, k, v, makes=size, scratch=(size, size))
    received = ops.op(sent, makes=size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
    return ops.op(received, makes=size)


def _to_positions(on: "Tracer", out: TracedTensor) -> TracedTensor:
    ops, call = on.ops, CollectiveCall("ulysses", "all_to_all", CP, out.size)
    sent = ops.op(out, makes=out.size)
    received = ops.op(sent, makes=out.size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
    return ops.op(received, makes=out.size)


def _ring(on: "Tracer", parts: tuple[TracedTensor, ...], flops: int, statistics: int) -> TracedTensor:
    """Keys and values go round; their gradients too, one message more, in the format of exact sums."""
    ops, local, axes = on.ops, on.local, on.axes
    keys = 2 * local.tokens * local.spread_kv * local.head_dim
    queries = local.queries // local.width
    width, exact = local.width, local.exact
    around = [CollectiveCall("ring", op, CP, keys * width) for op in ("send", "recv")] * (axes.ring - 1)
    back = [CollectiveCall("ring", op, CP, keys * exact) for op in ("send", "recv")] * axes.ring
    repeated = 2 * queries * width if local.heads != local.spread_kv else 0
    sums = queries * exact + keys * (exact + width)
    scores, each = local.scores, queries * width
    if scores:  # all of them where a rank meets its own keys, half of them where it meets another's
        met = max(3 * scores, 2 * scores + 3 * each)
        block = max(met, keys * (exact + width) + each + max(3 * scores // 2, scores + 5 * each // 2))
    else:
        block = keys * exact + 7 * each // 2 + (2 * keys * width if repeated else 0)
    at_once = max(3 * scores, each + 2 * queries * exact)
    return ops.op(
        *parts,
        makes=queries * width,
        keeps=parts[:1] if len(parts) > 1 else (),
        keeps_output=True,
        extra=(keys * width, statistics, *(() if len(parts) > 1 else (queries * width,))),
        scratch=(
            keys * width + repeated + queries * exact + at_once,
            sums + repeated + block - (queries + keys) * width,
        ),
        flops=flops,
        attends=True,
        calls=around,
        back_calls=[*around, *back],
    )
