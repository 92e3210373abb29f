"""A mixture of experts as part of a trace: router → tokens to experts → experts → back → weighted sum, shared experts.

Tokens are taken as dealt out evenly: every expert gets tokens · experts_per_token / experts of them.
"""

from ..resolved import Resolved
from .local import INDEX, Local
from .op_trace import ALL_TO_ALL, CollectiveCall, FsdpUnit, OpTrace, TracedTensor

TP, EP = "setup.parallel.tp", "setup.parallel.ep"
MOST_PARTS = 8  # experts of a rank that are played one by one; of more, several count as one


def add_experts(
    trace: OpTrace, normed: TracedTensor, run: Resolved, local: Local, unit: FsdpUnit | None
) -> TracedTensor:
    """From the normed residual stream to what is added to it; `unit`: the experts' own FSDP unit."""
    tp, arch = run.size("tp"), run.architecture
    spread = tp > 1 and not run.spec.parallel.tp.sequence
    x = _own_piece(trace, normed, local) if spread else normed
    weights = _route(trace, x, run, local)
    out = _weigh(trace, _to_experts(trace, x, run, local, unit), weights, local)
    if arch.shared_experts:
        out = trace.add(out, add_swiglu(trace, x, local.routed, arch.shared_experts * arch.expert_ffn, local))
    return _join(trace, out, local) if spread else out


def add_swiglu(trace: OpTrace, x: TracedTensor, tokens: int, ffn: int, local: Local) -> TracedTensor:
    """down(silu(gate(x)) · up(x))"""
    inner, outer, weight = tokens * ffn * local.width, tokens * local.dim * local.width, ffn * local.dim * local.width
    flops = 2 * tokens * ffn * local.dim
    gate = trace.linear(x, inner, weight=weight, flops=flops)
    active = trace.op(gate, makes=inner, keeps=(gate,))
    up = trace.linear(x, inner, weight=weight, flops=flops)
    product = trace.op(active, up, makes=inner, keeps=(active, up))
    return trace.linear(product, outer, weight=weight, flops=flops)


def _own_piece(trace: OpTrace, x: TracedTensor, local: Local) -> TracedTensor:
    """Padding, which copies, and a rank's piece of the positions."""
    whole = trace.op(x, makes=local.whole)
    call = CollectiveCall("tp", "all_gather", TP, local.whole)
    return trace.op(whole, makes=local.routed * local.dim * local.width, scratch=(0, local.whole), back_calls=(call,))


def _join(trace: OpTrace, piece: TracedTensor, local: Local) -> TracedTensor:
    call = CollectiveCall("tp", "all_gather", TP, local.whole)
    return trace.op(piece, makes=local.whole, scratch=(local.whole, 0), calls=(call,))


def _route(trace: OpTrace, x: TracedTensor, run: Resolved, local: Local) -> TracedTensor:
    """The weights of what experts make of a token; the losses of the router are part of it."""
    arch, tokens, exact = run.architecture, local.routed, local.exact
    casts = local.width != exact
    weight = arch.experts * local.dim
    scores_size = tokens * arch.experts * exact
    if casts:
        x = trace.op(x, makes=tokens * local.dim * exact, extra=(weight * exact,))  # and the weight
    flops = 2 * tokens * weight
    logits = trace.linear(x, scores_size, weight=weight * local.width, flops=flops)
    row = run.wide("ring", "ulysses", "tp")
    node = "setup.parallel.cp" if run.context > 1 else TP
    counts = CollectiveCall(" · ".join(row), "all_reduce", node, local.rows * (arch.experts + 1) * INDEX)
    scores = trace.op(logits, makes=scores_size, keeps_output=True, calls=(counts,) if row else ())
    chosen = tokens * arch.experts_per_token * INDEX
    trace.choices = chosen
    size, one = tokens * arch.experts_per_token * exact, tokens * exact
    losses = [tokens]  # which positions are not real
    if arch.router_score == "sigmoid":
        losses += [one]
    if arch.router_z_loss:
        losses += [one]
    kept = (scores, *((logits,) if arch.router_z_loss else ()))
    scratch = (2 * scores_size, 2 * scores_size)
    weights = trace.op(scores, makes=size, keeps=kept, extra=(chosen, *losses), scratch=scratch)
    return trace.op(weights, makes=size, keeps=(weights,), extra=(one,)) if arch.router_normalise else weights


def _to_experts(trace: OpTrace, x: TracedTensor, run: Resolved, local: Local, unit: FsdpUnit | None) -> TracedTensor:
    """Every token once for each of its experts, through them, and back into the order of tokens."""
    arch, ep = run.architecture, run.layout.ep
    count = local.routed * arch.experts_per_token
    size, order = count * local.dim * local.width, count * INDEX
    rows = trace.op(x, makes=size, extra=(order, order), scratch=(order, size))
    call = CollectiveCall("ep", "all_to_all", EP, size)
    if ep > 1:
        counts = CollectiveCall("ep", "all_to_all", EP, arch.experts * INDEX)
        rows = trace.op(rows, makes=size, saved=ALL_TO_ALL, calls=(counts, call), back_calls=(call,))
        rows = trace.op(rows, makes=size, extra=(order, order))
    trace.mark(opens=unit)
    rows = _experts(trace, rows, count, arch.experts // ep, arch.expert_ffn, local)
    trace.mark(closes=unit)
    if ep > 1:
        rows = trace.op(rows, makes=size)
        # Names in the functions under way still hold what was sent first, and what the experts gave.
        held = (2 * size, 0)
        rows = trace.op(rows, makes=size, saved=ALL_TO_ALL, scratch=held, calls=(call,), back_calls=(call,))
    return trace.op(rows, makes=size)


def _experts(trace: OpTrace, rows: TracedTensor, count: int, experts: int, ffn: int, local: Local) -> TracedTensor:
    """SwiGLUs side by side: one kernel for all, or one after the other."""
    weight = experts * ffn * local.dim * local.width
    parts = 1 if local.grouped else min(experts, MOST_PARTS)
    share, inner, each = rows.size // parts, count * ffn * local.width // parts, weight // parts
    flops = 2 * count * ffn * local.dim // parts
    pieces = [rows] if local.grouped else trace.views(rows, parts, scratch=weight)  # slices of gradients, then whole
    found = []
    for piece in pieces:
        gate = trace.linear(piece, inner, weight=each, flops=flops)
        active = trace.op(gate, makes=inner, keeps=(gate,))
        up = trace.linear(piece, inner, weight=each, flops=flops)
        product = trace.op(active, up, makes=inner, keeps=(active, up))
        found.append(trace.linear(product, share, weight=each, flops=flops))
    return found[0] if local.grouped else trace.op(*found, makes=rows.size, fresh=False)


def _weigh(trace: OpTrace, out: TracedTensor, weights: TracedTensor, local: Local) -> TracedTensor:
    """Σ weight · output, in exact sums."""
    exact, size = local.routed * local.dim * local.exact, local.routed * local.dim * local.width
    scratch = (3 * exact, out.size + 2 * exact)
    return trace.op(out, weights, makes=size, keeps=(out, weights), scratch=scratch)
