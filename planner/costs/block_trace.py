"""A block of the model as a trace: norm → attention → add → norm → feed-forward → add, as `runtime/models` runs it."""

from attrs import frozen

from ..resolved import Resolved
from .expert_trace import add_experts, add_swiglu
from .local import Local
from .op_trace import ALL_TO_ALL, ATTENTION, CollectiveCall, FsdpUnit, OpTrace, TracedTensor

TP, CP = "setup.parallel.tp", "setup.parallel.cp"


@frozen
class BlockAxes:
    """Names of axes as they stand in `Traffic`; an empty name: one rank. sequence: as of `tp`."""

    tensor: str
    sequence: bool
    ring: int
    ulysses: int
    row: str
    row_node: str
    experts: int


def axes_of(run: Resolved) -> BlockAxes:
    row = run.wide("ring", "ulysses", "tp")
    return BlockAxes(
        tensor="tp" if run.size("tp") > 1 else "",
        sequence=run.spec.parallel.tp.sequence,
        ring=run.size("ring"),
        ulysses=run.size("ulysses"),
        row=" · ".join(row),
        row_node=CP if run.context > 1 else TP,
        experts=run.layout.ep,
    )


def block_trace(run: Resolved, local: Local, experts: FsdpUnit | None) -> OpTrace:
    """One block; `experts`: the FSDP unit of its experts, if they are one."""
    arch, axes = run.architecture, axes_of(run)
    trace = OpTrace(TracedTensor(local.stream, local.stream))
    x = trace.input
    normed = add_norm(trace, x, local.between, local.dim, local)
    x = trace.add(x, _attention(trace, normed, local, axes, qk_norm=arch.qk_norm))
    normed = add_norm(trace, x, local.between, local.dim, local)
    if arch.is_moe:
        out = add_experts(trace, normed, run, local, experts)
    else:
        out = leave(
            trace, add_swiglu(trace, enter(trace, normed, local, axes), local.tokens, local.ffn, local), local, axes
        )
    trace.add(x, out)
    return trace


def add_norm(trace: OpTrace, x: TracedTensor, rows: int, width: int, local: Local) -> TracedTensor:
    """RMSNorm over `width` of each of `rows`: keeps what goes in, and of every row one over its root mean square."""
    size, exact = rows * width * local.width, rows * width * local.exact
    casts = local.exact != local.width
    return trace.op(
        x,
        makes=size,
        keeps=(x,),
        extra=(rows * local.exact,),
        weights=width * local.width,
        scratch=(2 * exact, 5 * exact - size) if casts else (0, 2 * exact),
    )


def enter(trace: OpTrace, x: TracedTensor, local: Local, axes: BlockAxes) -> TracedTensor:
    """Activations between blocks → whole ones, before matrices that tensor parallel cuts by output."""
    if not axes.tensor:
        return x
    size = local.whole
    if not axes.sequence:
        return trace.views(x, back_calls=(CollectiveCall("tp", "all_reduce", TP, size),))[0]
    return trace.op(
        x,
        makes=size,
        scratch=(size, size),
        calls=(CollectiveCall("tp", "all_gather", TP, size),),
        back_calls=(CollectiveCall("tp", "reduce_scatter", TP, size),),
    )


def leave(trace: OpTrace, x: TracedTensor, local: Local, axes: BlockAxes) -> TracedTensor:
    """Partial sums → activations between blocks, after matrices that tensor parallel cuts by input."""
    if not axes.tensor:
        return x
    size = local.whole
    if not axes.sequence:
        return trace.op(
            x, makes=size, fresh=False, scratch=(0, 0), calls=(CollectiveCall("tp", "all_reduce", TP, size),)
        )
    return trace.op(
        x,
        makes=local.stream,
        scratch=(size, size),
        calls=(CollectiveCall("tp", "reduce_scatter", TP, size),),
        back_calls=(CollectiveCall("tp", "all_gather", TP, size),),
    )


def _attention(trace: OpTrace, normed: TracedTensor, local: Local, axes: BlockAxes, *, qk_norm: bool) -> TracedTensor:
    x = enter(trace, normed, local, axes)
    query, key = local.heads * local.head_dim, local.kv_heads * local.head_dim

    def project(width: int, heads: int, rotated: bool) -> TracedTensor:
        size, weight = local.tokens * width * local.width, width * local.dim * local.width
        y = trace.linear(x, size, weight=weight, flops=2 * local.tokens * width * local.dim)
        if rotated and qk_norm:
            y = add_norm(trace, y, local.tokens * heads, local.head_dim, local)
        # x · cos + turned x · sin: nothing of x is kept.
        return trace.op(y, makes=size, scratch=(5 * size // 2, 2 * size)) if rotated else y

    q = project(query, local.heads, True)
    k = project(key, local.kv_heads, True)
    v = project(key, local.kv_heads, False)
    out = _kernel(trace, q, k, v, local, axes)
    flops = 2 * local.tokens * query * local.dim
    return leave(
        trace, trace.linear(out, local.whole, weight=query * local.dim * local.width, flops=flops), local, axes
    )


def _kernel(
    trace: OpTrace, q: TracedTensor, k: TracedTensor, v: TracedTensor, local: Local, axes: BlockAxes
) -> TracedTensor:
    """From queries, keys and values to what the output matrix takes."""
    size, flops = local.queries, 4 * local.tokens * local.sequence * local.heads * local.head_dim
    statistics = local.tokens * local.heads * local.exact  # logsumexp of the scores
    if axes.ulysses == 1 and axes.ring == 1:
        return trace.op(
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
        parts = (_to_heads(trace, q, k, v, local),)
    out = (
        _ring(trace, parts, local, axes, flops, statistics)
        if axes.ring > 1
        else trace.op(
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
    return _to_positions(trace, out, local) if axes.ulysses > 1 else out


def _to_heads(trace: OpTrace, q: TracedTensor, k: TracedTensor, v: TracedTensor, local: Local) -> TracedTensor:
    """One exchange of all three, which stay together."""
    size = local.tokens * (local.heads + 2 * local.spread_kv) * local.head_dim * local.width
    call = CollectiveCall("ulysses", "all_to_all", CP, size)
    sent = trace.op(q, k, v, makes=size, scratch=(size, size))
    received = trace.op(sent, makes=size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
    return trace.op(received, makes=size)


def _to_positions(trace: OpTrace, out: TracedTensor, local: Local) -> TracedTensor:
    call = CollectiveCall("ulysses", "all_to_all", CP, out.size)
    sent = trace.op(out, makes=out.size)
    received = trace.op(sent, makes=out.size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
    return trace.op(received, makes=out.size)


def _ring(
    trace: OpTrace, parts: tuple[TracedTensor, ...], local: Local, axes: BlockAxes, flops: int, statistics: int
) -> TracedTensor:
    """Keys and values go round; their gradients too, one message more, in the format of exact sums."""
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
    return trace.op(
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
