"""Feed-forward layers: SwiGLU (Shazeer 2020, arXiv 2002.05202), GEGLU, squared ReLU and mixtures of experts.

Costs assume balanced routing: every expert gets tokens · experts_per_token / experts tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from attrs import evolve

from xtrain.blocks.block import Layer, later, norm_weight, not_above_zero, row_bias
from xtrain.blocks.op_trace import ALL_TO_ALL, INDEX, MATMUL, TP, CollectiveCall, TracedTensor
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.model import ExpertTransformer
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer

Activation = Literal["silu", "gelu_tanh", "relu2"]
UNGATED: Final = ("relu2",)  # activations of `up_proj` itself, in layers without `gate_proj`


@frozen
class SwiGLULayer(Layer):
    """SwiGLU of width `wider` · `ffn`, which tensor parallelism cuts. bias: on each of its matrices. activation: of the
    gate; `gelu_tanh` is the tanh approximation of GELU, which makes the layer a GEGLU; `relu2` is the square of ReLU
    (So et al. 2021, arXiv 2109.08668), of a layer without gate. gate_scale: factor of the gate before its activation.
    """

    reads = ("ffn",)
    adapts = True

    bias: bool = later(False)
    activation: Activation = later("silu")
    wider: int = later(1)
    gate_scale: float = later(1.0)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        ffn = self.wider * arch.ffn
        return swiglu_parameters(self.name, arch.dim, ffn, cut=True, bias=self.bias, activation=self.activation)

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"ffn {self.wider * arch.ffn}",)

    def unfit(self, arch: Architecture) -> str | None:
        return not_above_zero(self, "wider")

    @property
    def tiles(self) -> bool:
        return True

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        summands = on.in_pieces(on.column_parallel_input(x), on.local.tokens, self._trace)
        return on.row_parallel_sum(summands, f"{self.name}.down_proj")

    def _trace(self, on: "Tracer", x: TracedTensor, tokens: int) -> TracedTensor:
        hidden = _hidden(on, x, self.name, tokens, self.activation, scaled=self.gate_scale != 1)
        return on.row_parallel_summand(hidden, f"{self.name}.down_proj", tokens)


def swiglu_parameters(
    name: str, dim: int, ffn: int, *, cut: bool, bias: bool = False, activation: Activation = "silu"
) -> Iterator[BlockParameter]:
    """Yield the parameters of a SwiGLU. cut: tensor parallelism cuts the width; otherwise each rank holds all of it,
    for its own positions."""
    matrices = (("gate_proj", ffn, dim), ("up_proj", ffn, dim), ("down_proj", dim, ffn))
    for matrix, rows, columns in matrices[activation in UNGATED :]:
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


def trace_swiglu(
    on: "Tracer", x: TracedTensor, name: str, tokens: int, activation: Activation = "silu"
) -> TracedTensor:
    """Record a SwiGLU that tensor parallelism does not cut."""
    return on.linear(_hidden(on, x, name, tokens, activation), f"{name}.down_proj", tokens)


def _hidden(
    on: "Tracer", x: TracedTensor, name: str, tokens: int, activation: Activation, *, scaled: bool = False
) -> TracedTensor:
    if activation in UNGATED:
        return _squared(on, on.linear(x, f"{name}.up_proj", tokens))
    gate = on.linear(x, f"{name}.gate_proj", tokens)
    if scaled:
        gate = on.ops.op(gate, makes=gate.size)
    if on.local.fused and activation == "silu":
        up = on.linear(x, f"{name}.up_proj", tokens)
        return on.ops.op(gate, up, makes=up.size, keeps=(up, gate))  # each for both gradients
    with on.ops.scope():
        active = on.ops.op(gate, makes=gate.size, keeps=(gate,))
    up = on.linear(x, f"{name}.up_proj", tokens)
    with on.ops.scope():
        return on.ops.op(active, up, makes=up.size, keeps=(active, up))


def _squared(on: "Tracer", x: TracedTensor) -> TracedTensor:
    """Record the square of ReLU."""
    with on.ops.scope():
        positive = on.ops.op(x, makes=x.size, keeps_output=True)
        return on.ops.op(positive, makes=x.size, keeps=(positive,), scratch=(0, x.size))


EP = "setup.parallel.ep"
MOST_PARTS = 8  # experts of a rank that are simulated separately; a larger number is simulated as this many groups


@frozen
class ExpertsLayer(Layer):
    """Mixture of experts with the settings of an `ExpertTransformer`. gated_ffn: width of one more expert that every
    token is sent to, whose output is multiplied by the sigmoid of its own score; 0: none.

    groups: groups of consecutive experts. A token is sent only to experts in `groups_per_token` groups: those with the
    highest sum of their two best scores. scale: factor of the experts' weights. choice_bias: choose experts by score +
    bias, even if `router { bias_speed }` does not change biases.

    matrix_bias: a bias on the router and on each of the three matrices of routed experts. limit: clamps gates to at
    most `limit` and values to ± `limit`; the result is (value + 1) · gate · sigmoid(alpha · gate), as in gpt-oss (arXiv
    2508.10925); None: activation(gate) · value.

    activation: of gates, as in `SwiGLULayer`; experts of `relu2` have no gate. input_norm: routed experts take an
    RMSNorm of the layer's input. router_norm: the router takes RMSNorm(x) / √dim. factors: the weight of each expert
    has a learned factor. shared_ffn: width of the shared experts together; 0: as wide as so many routed experts.

    Raises ValueError unless limit and alpha are above 0.
    """

    settings = ExpertTransformer
    reads = ("ffn",)
    adapts = True

    gated_ffn: int = later(0)
    groups: int = later(1)
    groups_per_token: int = later(1)
    scale: float = later(1.0)
    choice_bias: bool = later(False)
    matrix_bias: bool = later(False)
    limit: float | None = later(None)
    alpha: float = later(1.702)
    activation: Activation = later("silu")
    input_norm: bool = later(False)
    router_norm: bool = later(False)
    factors: bool = later(False)
    shared_ffn: int = later(0)

    def __attrs_post_init__(self) -> None:
        if (problem := not_above_zero(self, "limit", "alpha")) is not None:
            raise ValueError(problem)

    def unfit(self, arch: Architecture) -> str | None:
        if (problem := not_above_zero(self, "scale", "groups", "groups_per_token")) is not None:
            return problem
        if self.gated_ffn < 0:
            return f"`gated_ffn` is {self.gated_ffn}, and must be at least 0"
        if self.groups_per_token > self.groups:
            return f"`groups_per_token` {self.groups_per_token} exceeds `groups` {self.groups}"
        if arch.experts % self.groups:
            return f"`groups` of `{self.name}` is {self.groups}, which does not divide {arch.experts} experts"
        allowed = arch.experts // self.groups * self.groups_per_token
        if arch.experts_per_token > allowed:
            return f"`{self.name}` sends a token to {arch.experts_per_token} experts, of {allowed} in its groups"
        return None

    @property
    def inner(self) -> tuple[str, ...]:
        """Names of the matrices whose products give the hidden values of an expert."""
        return ("up_proj",) if self.activation in UNGATED else ("gate_proj", "up_proj")

    def shared_width(self, arch: Architecture) -> int:
        """Return the width of the shared experts together."""
        return self.shared_ffn or arch.shared_experts * arch.expert_ffn

    def has_bias(self, arch: Architecture) -> bool:
        """Return True if experts are chosen by score + bias."""
        return self.choice_bias or arch.router_bias_speed > 0

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield BlockParameter(
            name=f"{self.name}.gate.weight",
            shape=(arch.experts, arch.dim),
            decays=True,
            initial="normal",
            partial="always",
            router=True,
        )
        if self.matrix_bias:
            yield row_bias(f"{self.name}.gate", arch.experts, "always")
        if self.factors:
            name = f"{self.name}.gate.factors"
            yield BlockParameter(name=name, shape=(arch.experts,), decays=False, initial="ones", partial="always")
        if self.router_norm:
            yield norm_weight(f"{self.name}.gate.norm", arch.dim, "always")
        matrices = dict.fromkeys(self.inner, (arch.dim, arch.expert_ffn))
        matrices["down_proj"] = (arch.expert_ffn, arch.dim)
        for matrix, (rows, columns) in matrices.items():
            # Stacked [E, K, N]: the output is the last dim, so that a grouped product reads the matrices in place.
            yield BlockParameter(
                name=f"{self.name}.experts.{matrix}",
                shape=(arch.experts, rows, columns),
                decays=True,
                initial="residual" if matrix == "down_proj" else "normal",
                expert=True,
            )
        for matrix, (_, columns) in matrices.items() if self.matrix_bias else ():
            yield BlockParameter(
                name=f"{self.name}.experts.{matrix}_bias",
                shape=(arch.experts, columns),
                decays=False,
                initial="zeros",
                expert=True,
            )
        if self.input_norm:
            yield norm_weight(f"{self.name}.norm", arch.dim, "always")
        if arch.shared_experts:
            name, ffn = f"{self.name}.shared_experts", self.shared_width(arch)
            yield from swiglu_parameters(name, arch.dim, ffn, cut=False, activation=self.activation)
        if self.gated_ffn:
            yield from swiglu_parameters(f"{self.name}.shared_expert", arch.dim, self.gated_ffn, cut=False)
            name = f"{self.name}.shared_expert_gate.weight"
            yield BlockParameter(name=name, shape=(1, arch.dim), decays=True, initial="normal", partial="always")

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return {f"{self.name}.gate.e_score_correction_bias": [arch.experts]} if self.has_bias(arch) else {}

    def words(self, arch: Architecture) -> tuple[str, ...]:
        return (f"{arch.experts} experts of {arch.expert_ffn}, {arch.experts_per_token} a token",)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        """Record the layer from the normed residual stream to its summand."""
        spread = bool(on.axes.tensor) and not on.axes.sequence
        x = own_piece(on, x) if spread else x
        gate = f"{self.name}.gate"
        weights = _route(on, on.norm(x, f"{gate}.norm", on.local.routed) if self.router_norm else x, gate)
        if self.scale != 1:
            weights = on.ops.op(weights, makes=weights.size)
        if self.factors:
            weights = _times_factors(on, weights, f"{gate}.factors")
        module, ffn = f"{self.name}.experts", on.resolved.architecture.expert_ffn
        widths = {**dict.fromkeys(self.inner, ffn), "down_proj": on.local.dim}
        routed = on.norm(x, f"{self.name}.norm", on.local.routed) if self.input_norm else x
        hidden = _squared_product if self.activation in UNGATED else _swiglu_of(self.limit)
        experts = partial(trace_experts, on, module, widths, ffn, self.matrix_bias, hidden)
        shared: list[TracedTensor] = []
        if not on.resolved.shared_meanwhile:
            out = weigh(on, to_experts(on, routed, module, experts), weights)
            shared = self._shared(on, x)
        else:
            rows = to_experts(on, routed, module, experts, lambda: shared.extend(self._shared(on, x)))
            out = weigh(on, rows, weights)
        for each in shared:
            out = on.ops.add(out, each)
        return join_pieces(on, out) if spread else out

    def shares_experts(self, arch: Architecture) -> bool:
        return bool(arch.shared_experts or self.gated_ffn)

    def _shared(self, on: "Tracer", x: TracedTensor) -> list[TracedTensor]:
        """Return the outputs of the experts that every token is sent to."""
        found = []
        if on.resolved.architecture.shared_experts:
            name = f"{self.name}.shared_experts"
            found.append(trace_swiglu(on, x, name, on.local.routed, self.activation))
        if self.gated_ffn:
            more = trace_swiglu(on, x, f"{self.name}.shared_expert", on.local.routed)
            score = on.linear(x, f"{self.name}.shared_expert_gate", on.local.routed)
            score = on.ops.op(score, makes=score.size, keeps_output=True)
            found.append(on.ops.op(score, more, makes=more.size, keeps=(score, more)))
        return found


def own_piece(on: "Tracer", x: TracedTensor) -> TracedTensor:
    """Record padding, which copies, and the slice of positions of a rank."""
    ops, local = on.ops, on.local
    whole = ops.op(x, makes=local.whole)
    call = CollectiveCall("tp", "all_gather", TP, local.whole)
    return ops.op(whole, makes=local.routed * local.dim * local.width, scratch=(0, local.whole), back_calls=(call,))


def join_pieces(on: "Tracer", piece: TracedTensor) -> TracedTensor:
    size = on.local.whole
    call = CollectiveCall("tp", "all_gather", TP, size)
    return on.ops.op(piece, makes=size, scratch=(size, 0), calls=(call,))


def _route(on: "Tracer", x: TracedTensor, name: str) -> TracedTensor:
    """Record the router and return the weights of a token's experts; the router's losses are included."""
    ops, local = on.ops, on.local
    arch, tokens, exact = on.resolved.architecture, local.routed, local.exact
    names = [each for each in (f"{name}.weight", f"{name}.bias") if each in on.shapes]
    numbers = prod(on.shapes[names[0]])
    scores_size = tokens * arch.experts * exact
    if local.width != exact:
        x = ops.op(x, makes=tokens * local.dim * exact, extra=(numbers * exact,))  # the router's weight is cast too
    logits = ops.linear(x, scores_size, weight=on.bytes_of(*names), flops=2 * tokens * numbers, parameters=names)
    counts = CollectiveCall(on.axes.row, "all_reduce", on.axes.row_node, local.rows * (arch.experts + 1) * INDEX)
    scores = ops.op(logits, makes=scores_size, keeps_output=True, calls=(counts,) if on.axes.row else ())
    chosen = tokens * arch.experts_per_token * INDEX
    ops.choices = chosen
    size, one = tokens * arch.experts_per_token * exact, tokens * exact
    losses = [tokens]  # which positions are not real
    if arch.router_score == "sigmoid":
        losses += [one]
    if arch.router_z_loss:
        losses += [one]
    keeps = (scores, *((logits,) if arch.router_z_loss else ()))
    scratch = (2 * scores_size, 2 * scores_size)
    weights = ops.op(scores, makes=size, keeps=keeps, extra=(chosen, *losses), scratch=scratch)
    return ops.op(weights, makes=size, keeps=(weights,), extra=(one,)) if arch.router_normalise else weights


def _times_factors(on: "Tracer", weights: TracedTensor, name: str) -> TracedTensor:
    """Record the product of the weights with the factors of the chosen experts, whose gradient is first one for each
    token and expert."""
    size, scores = weights.size, on.local.routed * on.resolved.architecture.experts * on.local.exact
    scratch = (0, scores)
    factors = on.ops.op(makes=size, weights=on.bytes_of(name), parameters=(name,), scratch=scratch)
    return on.ops.op(weights, factors, makes=size, keeps=(weights, factors))


def to_experts(
    on: "Tracer",
    x: TracedTensor,
    module: str,
    experts: Callable[[TracedTensor, int], TracedTensor],
    meanwhile: Callable[[], None] | None = None,
) -> TracedTensor:
    """Record the path of every token to each of its experts and back into token order. module: with the experts.
    experts: records them for rows, and the number of rows. meanwhile: records what is computed while tokens travel to
    other ranks."""
    ops, local = on.ops, on.local
    arch, ep = on.resolved.architecture, on.axes.experts
    count = local.routed * arch.experts_per_token
    size, order = count * local.dim * local.width, count * INDEX
    back = _order(on, order)
    rows = ops.op(x, makes=size, extra=(order,), scratch=(order, size))
    call = CollectiveCall("ep", "all_to_all", EP, size)
    keys = here = None
    if any(each.drops_inputs for matrix, each in on.adapted.items() if matrix.startswith(f"{module}.")):
        keys = ops.op(makes=order, named=(ops.op(makes=order, scratch=(2 * order, 0)),))
    begin, sent_rows = len(ops.ops), rows
    if ep > 1:
        counts = CollectiveCall("ep", "all_to_all", EP, arch.experts * _tasks(module, on) * INDEX)
        rows = ops.op(rows, makes=size, saved=ALL_TO_ALL, calls=(counts, call), back_calls=(call,))
        if meanwhile is not None:
            sent, place = ops.ops[-1], len(ops.ops)
            meanwhile()
            flops = sum(op.flops for op in ops.ops[place:])
            backwards = sum(op.flops * (bool(op.receivers) + bool(op.weights)) for op in ops.ops[place:])
            sent.calls = (counts, evolve(call, meanwhile=flops))
            sent.back_calls = (evolve(call, meanwhile=backwards),)
        here = _order(on, order)
        rows = ops.op(rows, makes=size, extra=(order,), named=(rows,))
        if keys is not None:
            own = CollectiveCall("ep", "all_to_all", EP, order)
            received = ops.op(makes=order, saved=ALL_TO_ALL, calls=(own,))
            keys = ops.op(makes=order, named=(keys, received))
    if keys is not None:
        ops.op(makes=0, keeps=(keys,))
    ops.mark(opens=on.experts)
    with ops.scope():
        rows = experts(rows, count)
    ops.mark(closes=on.experts)
    if here is not None:
        # The received rows have a name until the experts return; the rows that were sent, and the experts' output,
        # until all rows are back.
        ops.scopes.append(range(begin + 1, len(ops.ops)))
        names = (sent_rows, rows)
        rows = ops.op(rows, here, makes=size, keeps=(here,))
        rows = ops.op(rows, makes=size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,), named=names)
        ops.scopes.append(range(begin, len(ops.ops)))
    return ops.op(rows, back, makes=size, keeps=(back,))


def _order(on: "Tracer", size: int) -> TracedTensor:
    """Record the order in which rows are restored; the gradient uses it in reverse."""
    order = on.ops.op(makes=size)
    order.gradient = 0
    return order


def _tasks(module: str, on: "Tracer") -> int:
    """Return how many tasks the rows of an expert are split by; 1 without adapters of tasks."""
    adapter = on.resolved.architecture.adapter
    if not isinstance(adapter, TaskAdapters) or not any(name.startswith(f"{module}.") for name in on.adapted):
        return 1
    return len(adapter.tasks)


Gate = Callable[["Tracer", int, Sequence[Callable[[], TracedTensor]]], TracedTensor]
"""(trace, bytes of hidden values, calls that record the products of rows) → hidden values."""


def trace_experts(
    on: "Tracer",
    module: str,
    matrices: Mapping[str, int],
    ffn: int,
    biased: bool,
    gate: Gate,
    rows: TracedTensor,
    count: int,
) -> TracedTensor:
    """Record experts: one kernel for all, or one after the other.

    module: with their stacks of matrices. matrices: name → width of its products; the last one gives the outputs. ffn:
    width of hidden values. biased: there is a bias on each. count: number of rows.
    """
    ops, local, name = on.ops, on.local, module
    *inner, last = matrices
    experts = on.shapes[f"{name}.{last}"][0]
    parts = 1 if local.grouped else min(experts, MOST_PARTS)
    share, width = rows.size // parts, count * local.width // parts
    added = None if local.grouped else 0

    def product(x: TracedTensor, matrix: str, makes: int) -> TracedTensor:
        out, adapted = plain(x, matrix, makes), on.adapted.get(f"{name}.{matrix}")
        return out if adapted is None else adapted.trace(on, x, out, count, parts=parts, added=added)

    def plain(x: TracedTensor, matrix: str, makes: int) -> TracedTensor:
        names = [f"{name}.{matrix}", *([f"{name}.{matrix}_bias"] if biased else [])]
        sizes = [on.bytes_of(each) // parts for each in names]
        numbers = prod(on.shapes[names[0]])
        unpacked = on.unpacked(names[0], numbers if local.grouped else numbers // experts)
        flops = 2 * count * prod(on.shapes[names[0]][1:]) // parts
        if len(names) == 1 or not local.grouped:
            return ops.linear(
                x, makes, weight=sum(sizes), flops=flops, parameters=names, added=added, unpacked=unpacked
            )
        out = ops.linear(x, makes, weight=sizes[0], flops=flops, parameters=names[:1], unpacked=unpacked)
        more = 2 * experts * (makes // local.width)
        return ops.op(out, makes=makes, fresh=False, weights=sizes[1], parameters=names[1:], saved=MATMUL, flops=more)

    adapters = [each for matrix, each in on.adapted.items() if matrix.startswith(f"{name}.")]
    for each in adapters:
        each.trace_beside(on)
    pieces = [rows]
    if not local.grouped:
        pieces = ops.views(rows, parts)
        names = [each for each in on.shapes if each.startswith(f"{name}.")]
        ops.slices(*(on.bytes_of(each) for each in names), parameters=names)
    elif biased or any(each.scales for each in adapters):  # which expert each row is of
        ops.op(makes=0, extra=(count * experts * local.width,))
    found = []
    for piece in pieces:
        products = [partial(product, piece, each, width * matrices[each]) for each in inner]
        hidden = gate(on, width * ffn, products)
        with ops.scope():
            found.append(product(hidden, last, share))
    return found[0] if local.grouped else ops.op(*found, makes=rows.size, fresh=False)


def _squared_product(on: "Tracer", inner: int, products: Sequence[Callable[[], TracedTensor]]) -> TracedTensor:
    (product,) = products
    return _squared(on, product())


def _swiglu_of(limit: float | None) -> Gate:
    """Return the gate of native experts. limit: see `ExpertsLayer`."""

    def gate_of(on: "Tracer", inner: int, products: Sequence[Callable[[], TracedTensor]]) -> TracedTensor:
        ops, (gate_product, up_product) = on.ops, products
        gate = gate_product()
        if limit is None:
            with ops.scope():
                active = ops.op(gate, makes=inner, keeps=(gate,))
            up = up_product()
            with ops.scope():
                return ops.op(active, up, makes=inner, keeps=(active, up))
        up = up_product()
        with ops.scope():
            return ops.op(gate, up, makes=inner, keeps=(gate, up), scratch=(2 * inner, 4 * inner))

    return gate_of


def weigh(on: "Tracer", out: TracedTensor, weights: TracedTensor) -> TracedTensor:
    """Record Σ weight · output in exact sums."""
    local = on.local
    exact, size = local.routed * local.dim * local.exact, local.routed * local.dim * local.width
    # Forward: a term of the sum, and the sum with the next term. Backward: both products of a term, of which that with
    # the weight becomes a gradient in the width of the layer. Gradients of terms are joined when `out` is free.
    scratch = (2 * exact, exact if exact == size else 2 * exact)
    total = on.ops.op(out, weights, makes=exact, keeps=(out, weights), scratch=scratch)
    return total if exact == size else on.ops.op(total, makes=size)
