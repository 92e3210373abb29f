"""Op trace of a block that torch.compile compiles.

Inductor fuses pointwise operations and reductions: a value that they alone use, before the next product, is never in
memory. AOTAutograd keeps what the backward of products and attention needs; of what the backward of other operations
needs, it keeps the fewest bytes from which the rest can be computed again (torch._functorch.partitioners,
`min_cut_rematerialization_partition`).
"""

from collections.abc import Mapping, Sequence, Set

from xtrain.blocks.memory_simulator import until_last_keeper
from xtrain.blocks.op_trace import OpTrace, TracedOp, TracedTensor


def compile_trace(trace: OpTrace, graphs: Sequence[range], saved: Set[str]) -> None:
    """Change a trace into the one of compiled code. graphs: numbers of the operations that are compiled together.
    saved: words of operations whose results selective recomputation keeps."""
    pieces = [trace.ops[graph.start : graph.stop] for graph in graphs]
    for ops in pieces:
        _keep_less(ops)
    trace.compiled = len(graphs) == 1 and len(graphs[0]) == len(trace.ops)
    if trace.compiled:  # and so is its recomputation
        _keep_used_results(trace, saved)
    for ops in pieces:
        own = {id(op) for op in ops}
        outside = {id(value.storage) for op in trace.ops if id(op) not in own for value in op.inputs}
        given = (value for values in trace.given.values() for value in values)
        _fuse(ops, outside | {id(value.storage) for value in (*trace.ops[-1].outputs, *given)})
        if not trace.compiled:  # selective recomputation of the block does not see results inside compiled parts
            for op in ops:
                op.saved, op.results = "", ()


def _keep_used_results(trace: OpTrace, saved: Set[str]) -> None:
    """Keep no results that a recomputation does not use."""
    needed = {id(value) for op in trace.ops for value in op.keeps}
    for op in reversed(until_last_keeper(trace)):
        if op.saved not in saved and any(id(value) in needed for value in (*op.outputs, *op.extra)):
            needed |= {number for value in op.inputs for number in (id(value), id(value.storage))}
    for op in trace.ops:
        op.results = tuple(value for value in op.results if id(value) in needed)


def _fuses(op: TracedOp) -> bool:
    """Return True for pointwise operations, reductions and views."""
    if op.saved or op.flops or op.calls or op.back_calls or op.piece is not None:
        return False
    return bool(op.inputs) and op.opens is None and op.closes is None


def _computes_again(op: TracedOp) -> bool:
    """Return True if what the backward needs may be computed again: products in fp8 take scaled copies."""
    return op.fp8 or _fuses(op)


def _keep_less(ops: Sequence[TracedOp]) -> None:
    """Keep the values that products need, and the least from which the others that are needed can be computed again."""
    makers = {id(value): op for op in ops if _fuses(op) for value in op.outputs}
    kept = {id(value): value for op in ops if not _computes_again(op) for value in op.keeps}
    for op in ops:
        if not _computes_again(op):
            continue
        needs = {id(value): value for value in op.keeps}
        for value in op.keeps:
            sources = _sources(value, kept, makers)
            if sum(source.size for source in sources.values()) < value.size:
                del needs[id(value)]
                needs |= sources
        kept |= needs
        op.keeps = tuple(needs.values())


def _sources(
    value: TracedTensor, kept: Mapping[int, TracedTensor], makers: Mapping[int, TracedOp]
) -> dict[int, TracedTensor]:
    """Return the values that have to be kept, in addition to `kept`, in order to compute `value` again."""
    found: dict[int, TracedTensor] = {}
    seen, left = set(kept), [value]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        maker = makers.get(id(each))
        if maker is None:
            found[id(each)] = each
        else:
            left += [source.storage for source in reversed(maker.inputs)]
    return found


def _fuse(ops: Sequence[TracedOp], outside: set[int]) -> None:
    """Join operations that one kernel computes: what one of them makes for the other is not in memory, and neither is
    what they make on the way. outside: values that other operations use."""
    kept = {id(value) for op in ops for value in op.keeps}
    parts: dict[int, int] = {}  # operation → number of products before it
    users: dict[int, list[TracedOp]] = {}
    number = 0
    for op in ops:
        number += not _fuses(op)
        parts[id(op)] = number
        for value in op.inputs:
            users.setdefault(id(value.storage), []).append(op)
    for op in ops:
        if not _fuses(op):
            continue
        op.scratch = (0, 0)
        op.forgone = ()  # compiled code has no names
        if len(op.outputs) != 1 or id(op.outputs[0]) in kept | outside:
            continue
        (value,) = op.outputs
        by = users.get(id(value), [])
        later = all(id(source.storage) in kept for source in op.inputs)  # its kernel may run where the value is used
        near = all(_fuses(user) and (later or parts[id(user)] == parts[id(op)]) for user in by)
        if len(by) == 1 and near and value.of is None:
            _join(op, by[0], value)


def _join(op: TracedOp, user: TracedOp, value: TracedTensor) -> None:
    """Let `user` compute what `op` computes, whose output is `value`."""
    user.inputs = (*(each for each in user.inputs if each is not value), *op.inputs)
    user.receivers = (*(each for each in user.receivers if each is not value), *op.receivers)
    user.extra, user.keeps = (*op.extra, *user.extra), (*op.keeps, *user.keeps)
    user.parameters = (*op.parameters, *user.parameters)
    user.weights, user.added = user.weights + op.weights, user.added + op.added
    user.fresh = user.fresh or op.fresh
    op.inputs = op.receivers = op.outputs = op.extra = op.keeps = op.parameters = ()
    op.weights = op.added = 0
    op.runs_back = False
