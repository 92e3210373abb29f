"""Grouped-query attention with rotary positions, and costs of attention kernels.

Rows may be spread over ranks by context parallelism.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from xtrain.blocks.block import Layer, later, norm_weight, not_above_zero, row_bias
from xtrain.blocks.op_trace import ALL_TO_ALL, ATTENTION, CP, CollectiveCall, TracedTensor
from xtrain.dsl.schema.rope import Rope
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter, RotaryAngles, pairs_within
from xtrain.plan.hardware import QUERIES, has_flash

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


TILE: Final = 256  # queries whose scores are in memory at once, for kernels that store scores and rows on one rank


@frozen
class AttentionLayer(Layer):
    """Grouped-query attention with rotary positions.

    qk_norm: RMSNorm on queries and keys, per head, or over all heads together with `wide_norm`; `plus_one` multiplies
    by 1 + weight. bias: on queries, keys and values. output_bias: on the output, before the residual stream. rope:
    apply rotary positions to queries and keys.

    gives, takes: name of keys and values, as in `Layer`. A layer that takes them has queries alone, and computes with
    keys and values that have their norm and positions.

    heads_of_keys, head_width: numbers of key/value heads and of numbers in each head; None: the model's. value_norm:
    RMSNorm without a weight on each head of values. key_values: there is no `v_proj`: values are the outputs of
    `k_proj`, before the norm of keys and positions.

    window: number of most recent positions of its document that a query sees, its own included; None: all earlier ones.
    sinks: every head has one more learned score in its softmax, whose value is zero. scale: factor of query-key
    products; None: 1 / √head_dim. cap: scores s become cap · tanh(s / cap); None: no cap. theta: base of this layer's
    frequencies, which are then unscaled; None: the model's. rotary: numbers of a head that are rotated, the first ones;
    None: all. gated: `q_proj` also gives a gate for each number of a head's output, which is multiplied by the gate's
    sigmoid (arXiv 2505.06708); its rows are the query and the gate of one head after the other. growth: queries at
    position p are multiplied by 1 + growth · ln(1 + ⌊p / `rope.original`⌋), as in Ministral 3; all numbers of a head
    are rotated. interleaved: rotary positions turn adjacent numbers; otherwise a number of the first half with one of
    the second.

    Raises ValueError unless window, scale, cap, base and rotary are above 0, and rotary is even.
    """

    attends = True
    adapts = True

    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = later(False)
    wide_norm: bool = later(False)
    rope: bool = later(True)
    window: int | None = later(None)  # pyright: ignore[reportIncompatibleVariableOverride]
    sinks: bool = later(False)
    scale: float | None = later(None)
    cap: float | None = later(None)
    theta: float | None = later(None)
    plus_one: bool = later(False)
    rotary: int | None = later(None)
    gated: bool = later(False)
    growth: float = later(0.0)
    interleaved: bool = later(False)
    heads_of_keys: int | None = later(None)
    head_width: int | None = later(None)
    value_norm: bool = later(False)
    key_values: bool = later(False)
    gives: str = later("")  # pyright: ignore[reportIncompatibleVariableOverride]
    takes: str = later("")  # pyright: ignore[reportIncompatibleVariableOverride]

    def __attrs_post_init__(self) -> None:
        sizes = ("window", "scale", "cap", "theta", "rotary", "heads_of_keys", "head_width")
        if (problem := not_above_zero(self, *sizes)) is not None:
            raise ValueError(problem)
        if self.rotary is not None and self.rotary % 2:
            raise ValueError(f"`rotary` is {self.rotary}, and must be even")
        if self.growth and (self.rotary is not None or self.theta is not None or not self.rope):
            raise ValueError("`growth` needs the model's rotary positions on all numbers of a head")

    def own(self, arch: Architecture) -> Architecture:
        width, heads = self.head_width or arch.head_dim, self.heads_of_keys or arch.kv_heads
        if (width, heads) == (arch.head_dim, arch.kv_heads):
            return arch
        return evolve(arch, head_dim=width, kv_heads=heads)

    def unfit(self, arch: Architecture) -> str | None:
        arch = self.own(arch)
        if arch.heads % arch.kv_heads:
            return f"`heads_of_keys` of `{self.name}` is {arch.kv_heads}, which does not divide {arch.heads} heads"
        if self.rope and arch.head_dim % 2:
            return f"`head_width` of `{self.name}` is {arch.head_dim}, and rotary positions turn pairs"
        if self.rotary is None or self.rotary <= arch.head_dim:
            return None
        return f"`rotary` of `{self.name}` is {self.rotary}, and a head has {arch.head_dim} numbers"

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        arch = self.own(arch)
        if self.sinks:  # modules list their own parameters before the parameters of child modules
            yield BlockParameter(
                name=f"{self.name}.sinks", shape=(arch.heads,), decays=False, initial="normal", cut="column"
            )
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        gates = queries if self.gated else 0
        others = [] if self.takes else ["k_proj"] if self.key_values else ["k_proj", "v_proj"]
        for name, width, heads in (
            ("q_proj", queries + gates, arch.heads),
            *((name, keys, arch.kv_heads) for name in others),
        ):
            yield BlockParameter(
                name=f"{self.name}.{name}.weight",
                shape=(width, arch.dim),
                decays=True,
                initial="normal",
                cut="column",
                heads=heads,
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
            heads=arch.heads,
        )
        if self.output_bias:
            yield row_bias(f"{self.name}.o_proj", arch.dim)
        norms = (("q_norm", queries), *(() if self.takes else (("k_norm", keys),)))
        for name, width in norms if self.qk_norm else ():
            if self.wide_norm:
                yield norm_weight(f"{self.name}.{name}", width, cut="column", plus_one=self.plus_one)
            else:  # a rank has used them on its own heads
                yield norm_weight(f"{self.name}.{name}", arch.head_dim, "always", plus_one=self.plus_one)

    def angles(self, arch: Architecture) -> RotaryAngles | None:
        if not self.rope:
            return None
        arch = self.own(arch)
        angles = evolve(arch.angles, growth=self.growth, width=self.rotary or arch.head_dim)
        return angles if self.theta is None else evolve(angles, theta=self.theta, rope=Rope())

    def words(self, arch: Architecture) -> tuple[str, ...]:
        window = "no window" if self.window is None else f"window {self.window:,}"
        own = self.own(arch)
        heads = () if own is arch else (f"{own.kv_heads} key/value heads of {own.head_dim}",)
        heads += ("keys and values of an earlier block",) if self.takes else ()
        heads += ("keys and values for later blocks",) if self.gives else ()
        if not self.rope:
            return "no positions", window, *heads
        base = "rotary positions" if self.theta is None else f"rotary positions of base {self.theta:,.12g}"
        return base, window, *heads

    def pair_flops(self, arch: Architecture) -> int:
        return 4 * arch.heads * self.own(arch).head_dim

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        if self.takes:
            return 0
        seen, arch = positions if self.window is None else min(positions, self.window), self.own(arch)
        return 2 * arch.kv_heads // tp * arch.head_dim * seen  # a key and a value of each of its heads

    def _on(self, on: "Tracer") -> "Tracer":
        """Return the recorder with the heads of this layer."""
        arch = on.resolved.architecture
        own = self.own(arch)
        if own is arch:
            return on
        from xtrain.plan.mesh import device_kind  # not for modules, which have no costs

        heads = own.kv_heads // on.resolved.size("tp")
        spread = heads if heads % on.axes.ulysses == 0 else on.axes.ulysses
        device = "cpu" if device_kind(on.resolved.spec) == "cpu" else "cuda"
        flash = has_flash(device, on.resolved.formats.compute, own.head_dim)
        local = evolve(on.local, kv_heads=heads, spread_kv=spread, head_dim=own.head_dim, flash=flash)
        return evolve(on, local=local)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        on = self._on(on)
        local = on.local
        turns = not self.interleaved and self.rotary in (None, local.head_dim)
        x = on.column_parallel_input(x)
        gate: TracedTensor | None = None

        def project(name: str) -> TracedTensor:
            return on.linear(x, f"{self.name}.{name}", local.tokens)

        def positioned(y: TracedTensor, name: str, norm: str, heads: int) -> TracedTensor:
            nonlocal gate
            size = y.size
            if self.gated and name == "q_proj":
                size //= 2
                y, gate = on.ops.split(y, size, size)
            if local.fused and self.rope and turns:
                return _turned(self, on, y, f"{self.name}.{norm}", heads)
            if self.qk_norm:
                rows = local.tokens * (1 if self.wide_norm else heads)
                y = on.norm(y, f"{self.name}.{norm}", rows, cut=self.wide_norm)
            if not self.rope:
                return y
            # x · cos + rotated x · sin: nothing of x is kept.
            if turns:
                return on.ops.op(y, makes=size, scratch=(5 * size // 2, 2 * size))
            turned = size * (self.rotary or local.head_dim) // local.head_dim
            moved = turned if self.interleaved else 0
            return on.ops.op(y, makes=size, scratch=(7 * turned // 2 + moved, 3 * turned + moved))

        q = positioned(project("q_proj"), "q_proj", "q_norm", local.heads)
        if self.takes:
            kinds = on.resolved.architecture.kinds
            takes = (len(each.layers) for each in kinds if any(it.takes == self.takes for it in each.block.layers()))
            k, v = on.ops.take(self.takes, local.keys, local.keys, blocks=sum(takes))
        else:
            keys = project("k_proj")
            k = positioned(keys, "k_proj", "k_norm", local.kv_heads)
            v = keys if self.key_values else project("v_proj")
            if self.value_norm:
                v = on.norm(v, "", local.tokens * local.kv_heads, width=local.head_dim)
        if self.gives:
            on.ops.give(self.gives, k, v)
        out = trace_kernel(self, on, (q, k, v))
        if gate is not None:
            share = on.ops.op(gate, makes=out.size, keeps_output=True)
            out = on.ops.op(out, share, makes=out.size, keeps=(out, share))
        return on.row_parallel_linear(out, f"{self.name}.o_proj", local.tokens)


def _turned(layer: AttentionLayer, on: "Tracer", y: TracedTensor, norm: str, heads: int) -> TracedTensor:
    """Record normalization and rotation of heads in one pass."""
    local, weight = on.local, f"{norm}.weight"
    if layer.qk_norm and layer.wide_norm:
        y = on.norm(y, norm, local.tokens, cut=True)
    if not layer.qk_norm or layer.wide_norm:
        return on.ops.op(y, makes=y.size)
    return on.ops.op(
        y,
        makes=y.size,
        keeps=(y,),
        extra=(local.tokens * heads * local.exact,),
        weights=on.bytes_of(weight),
        parameters=(weight,),
    )


def trace_kernel(layer: AttentionLayer, on: "Tracer", parts: Sequence[TracedTensor]) -> TracedTensor:
    """Record the attention kernel: from queries, keys and values, in one tensor or more, to the input of the output
    matrix."""
    local, axes = on.local, on.axes
    if axes.ulysses > 1:
        parts = (_to_heads(on, *parts),)
    is_causal = not layer.sinks and layer.cap is None and (layer.window is None or layer.window >= local.sequence)
    if axes.ring > 1 or (local.attention in ("documents", "blocks") and not is_causal):
        out = _blockwise(layer, on, parts)
    elif local.attention == "blocks":
        out = _by_queries(layer, on, parts)
    else:
        out = _whole_rows(layer, on, parts)
    return _to_positions(on, out) if axes.ulysses > 1 else out


def _flops(layer: AttentionLayer, on: "Tracer") -> int:
    local = on.local
    pairs = local.tokens * pairs_within(local.sequence, layer.window) // local.sequence
    return 4 * pairs * local.heads * local.head_dim


def _whole_rows(layer: AttentionLayer, on: "Tracer", parts: Sequence[TracedTensor]) -> TracedTensor:
    """Record one product for each row, or one under a mask over all positions."""
    ops, local = on.ops, on.local
    size, sinks = local.queries, _sinks(layer, on)
    statistics = local.tokens * local.heads * local.exact  # logsumexp of the scores
    seen = local.rows * local.sequence**2
    masked, scores = local.attention == "mask", local.heads // on.axes.ulysses * seen * local.exact
    written_out = masked and (layer.sinks or layer.cap is not None)
    mask = seen * (1 if written_out else local.width) if masked else 0
    scratch = (0, parts[0].size if len(parts) == 1 else 0)
    if written_out:  # the slopes of the cap are stored as well
        scratch = (2 * scores, 3 * scores if layer.cap is None else 4 * scores)
    out = ops.op(
        *parts,
        makes=size,
        keeps=parts,
        keeps_output=True,
        extra=(statistics,),
        arranged=(mask,) if mask else (),
        scratch=scratch,
        saved=ATTENTION,
        flops=_flops(layer, on),
        attends=True,
        **(sinks if written_out else {}),
    )
    if not layer.sinks or written_out:
        return out
    # The share of the softmax left by the sink, for each query, times the output without the sink.
    shares = (statistics, *(() if local.width == local.exact else (local.tokens * local.heads * local.width,)))
    return ops.op(out, makes=size, keeps=(out,), extra=shares, scratch=(0, size), **sinks)


def trace_selected(
    on: "Tracer",
    parts: Sequence[TracedTensor],
    chosen: TracedTensor,
    after: Callable[[TracedTensor], TracedTensor] | None = None,
) -> TracedTensor:
    """Record attention under a mask of the keys that each query sees, one for all heads. after: records what follows
    while a rank has all positions of its heads."""
    local, spread = on.local, on.axes.ulysses > 1
    parts = (_to_heads(on, *parts),) if spread else parts
    out = on.ops.op(
        *parts,
        chosen,
        makes=local.queries,
        keeps=parts,
        keeps_output=True,
        extra=(local.tokens * local.heads * local.exact,),
        arranged=(local.rows * local.sequence**2 * local.width,),
        scratch=(0, parts[0].size if spread else 0),
        saved=ATTENTION,
        flops=4 * local.tokens * local.sequence * local.heads * local.head_dim,
        attends=True,
        apart=True,
    )
    on.ops.ops[-1].receivers = tuple(parts)
    out = out if after is None else after(out)
    return _to_positions(on, out) if spread else out


def _by_queries(layer: AttentionLayer, on: "Tracer", parts: Sequence[TracedTensor]) -> TracedTensor:
    """Record attention over blocks of queries of all rows: each block takes scores with the keys up to its last query.
    The backward holds three tensors of that size."""
    local = on.local
    heads, length = local.heads // on.axes.ulysses, local.sequence
    blocks = [(min(QUERIES, length - first), min(first + QUERIES, length)) for first in range(0, length, QUERIES)]
    keys = 2 * local.tokens * local.spread_kv * local.head_dim * local.width
    block = local.rows * heads * min(QUERIES, length) * local.head_dim * local.width
    scores = local.rows * heads * max(queries * seen for queries, seen in blocks) * local.width
    pairs = local.rows * sum(queries * seen for queries, seen in blocks)
    return on.ops.op(
        *parts,
        makes=local.queries,
        keeps=parts,
        scratch=(keys + block + 2 * scores, keys + 2 * block + 3 * scores),
        saved=ATTENTION,
        flops=4 * pairs * heads * local.head_dim,
        attends=True,
    )


def _sinks(layer: AttentionLayer, on: "Tracer") -> dict[str, Any]:
    """Return the arguments of an operation that uses the parameter of the sinks."""
    if not layer.sinks:
        return {}
    name = f"{layer.name}.sinks"
    return {"weights": on.bytes_of(name), "parameters": (name,)}


def _to_heads(on: "Tracer", *parts: TracedTensor) -> TracedTensor:
    """Record one all-to-all of queries, keys and values together."""
    ops, local = on.ops, on.local
    size = local.tokens * (local.heads + 2 * local.spread_kv) * local.head_dim * local.width
    call = CollectiveCall("ulysses", "all_to_all", CP, size)
    joined = ops.op(*parts, makes=size, scratch=(0, size), named=parts)
    with ops.scope():
        sent = ops.op(joined, makes=size, fresh=False, named=(joined,))
        received = ops.op(sent, makes=size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
        return ops.op(received, makes=size)


def _to_positions(on: "Tracer", out: TracedTensor) -> TracedTensor:
    ops, size = on.ops, out.gradient  # of a view too
    call = CollectiveCall("ulysses", "all_to_all", CP, size)
    sent = ops.op(out, makes=size)
    received = ops.op(sent, makes=size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
    return ops.op(received, makes=size)


def _blockwise(layer: AttentionLayer, on: "Tracer", parts: Sequence[TracedTensor]) -> TracedTensor:
    """Record attention block by block. In a ring, keys and values are passed on, and so are their gradients, one
    message more, in the format of exact sums."""
    ops, local, axes = on.ops, on.local, on.axes
    keys = 2 * local.tokens * local.spread_kv * local.head_dim
    queries = local.queries // local.width
    width, exact = local.width, local.exact
    around = [CollectiveCall("ring", op, CP, keys * width) for op in ("send", "recv")] * (axes.ring - 1)
    back = [CollectiveCall("ring", op, CP, keys * exact) for op in ("send", "recv")] * (axes.ring if around else 0)
    coming = keys * (exact + width) if around else 0
    repeated = 2 * queries * width if local.heads != local.spread_kv else 0
    sums = queries * exact + keys * (exact + width)
    statistics = local.tokens * local.heads * exact  # logsumexp of the scores
    scores, each = _scores(layer, on), queries * width
    if scores and not around:
        block = 4 * scores
    elif scores:  # all scores where a rank meets its own keys, half of them where it meets keys of another rank
        met = max(3 * scores, 2 * scores + 3 * each)
        block = max(met, coming + each + max(3 * scores // 2, scores + 5 * each // 2))
    else:
        block = (keys * exact if around else 0) + 7 * each // 2 + (2 * keys * width if repeated else 0)
    at_once = max(3 * scores, each + 2 * queries * exact)
    return ops.op(
        *parts,
        makes=queries * width,
        keeps=parts[:1] if len(parts) > 1 else (),
        keeps_output=True,
        extra=(statistics,),
        arranged=(keys * width, *(() if len(parts) > 1 else (queries * width,))),
        scratch=(
            (keys * width if around else 0) + repeated + queries * exact + at_once,
            sums + repeated + block - (queries + keys) * width,
        ),
        saved=ATTENTION,
        flops=_flops(layer, on),
        attends=True,
        calls=around,
        back_calls=[*around, *back],
        apart=True,
        **_sinks(layer, on),
    )


def _scores(layer: AttentionLayer, on: "Tracer") -> int:
    """Return the bytes of scores in memory at once for kernels that store them."""
    local, axes = on.local, on.axes
    if local.flash and layer.cap is None:
        return 0
    heads = local.heads // axes.ulysses
    if axes.ring > 1:
        return local.rows * heads * (local.sequence // axes.ring) ** 2 * local.exact
    tile = min(local.sequence, TILE, layer.window or TILE)
    return heads * tile * local.sequence * local.exact
