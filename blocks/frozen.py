"""Op trace of a block with frozen parameters."""

from collections.abc import Mapping, Set
from math import prod

from attrs import evolve

from xtrain.blocks.memory_simulator import scratch_of
from xtrain.blocks.op_trace import MATMUL, OpTrace, PieceTrace, TracedOp, TracedTensor


def without_frozen(
    trace: OpTrace,
    shapes: Mapping[str, tuple[int, ...]],
    frozen: Set[str],
    *,
    below: bool,
    taken: Set[str] = frozenset(),
) -> OpTrace:
    """Return the trace with gradients only for trained parameters and the operations that lead to them, as in
    torch.autograd.

    shapes: name of a parameter → its shape. frozen: parameters without a gradient. below: the input has a gradient.
    taken: names of taken values that have one.
    """
    flows = {id(trace.input)} if below else set[int]()
    flows |= {id(value) for name in taken & trace.taken.keys() for value in trace.taken[name]}
    ops = [_pruned(op, shapes, frozen, flows) for op in trace.ops]
    opened: list[int] = []
    for place, op in enumerate(ops):  # the unit of experts has a backward if anything in it has
        if op.opens is not None:
            opened.append(place)
        elif op.closes is not None:
            first = opened.pop()
            back = any(each.runs_back for each in ops[first + 1 : place])
            ops[first], ops[place] = (evolve(ops[each], runs_back=back) for each in (first, place))
    return evolve(trace, ops=ops)


def _pruned(op: TracedOp, shapes: Mapping[str, tuple[int, ...]], frozen: Set[str], flows: set[int]) -> TracedOp:
    """Return an operation given `flows`, the values with gradients; add its outputs to `flows` if they have
    gradients."""
    if op.opens is not None or op.closes is not None:
        return op
    if op.piece is not None:
        return _of_pieces(op, op.piece, shapes, frozen, flows)
    trained = [name for name in op.parameters if name not in frozen]
    all_bytes, trained_bytes = (sum(prod(shapes[name]) for name in names) for names in (op.parameters, trained))
    receivers = tuple(value for value in op.receivers if id(value) in flows)
    if not receivers and not trained_bytes:
        forward, _ = op.scratch
        still = {
            "receivers": (),
            "keeps": (),
            "weights": 0,
            "added": 0,
            "scratch": (forward, 0),
            "back_calls": (),
            "weight_calls": (),
        }
        return evolve(op, runs_back=False, forgone=(*op.forgone, *op.keeps), **still)
    flows.update(id(value) for value in op.outputs)
    share = (trained_bytes, all_bytes or 1)
    weights, added = ((each * share[0] // share[1] if op.parameters else each) for each in (op.weights, op.added))
    keeps = op.keeps
    if op.saved == MATMUL and not op.masks_inputs and not any(len(shapes[name]) > 1 for name in trained):
        keeps = ()  # the input's gradient only needs the matrix
    elif keeps == tuple(value.storage for value in op.inputs) and len(keeps) == 2 and len(receivers) == 1:
        keeps = (_other(op.inputs, receivers[0]).storage,)  # each of two factors is kept for the gradient of the other
    calls = {"back_calls": op.back_calls if receivers else (), "weight_calls": op.weight_calls if trained else ()}
    return evolve(op, receivers=receivers, weights=weights, added=added, keeps=keeps, **calls)


def _of_pieces(
    op: TracedOp, piece: PieceTrace, shapes: Mapping[str, tuple[int, ...]], frozen: Set[str], flows: set[int]
) -> TracedOp:
    """Return an operation that is done in pieces in the same way; it keeps all its inputs for any gradient."""
    receivers = tuple(value for value in op.inputs if id(value) in flows)
    piece = evolve(piece, trace=without_frozen(piece.trace, shapes, frozen, below=bool(receivers)))
    weights, (forward, _) = sum(each.weights for each in piece.trace.ops), op.scratch
    if not receivers and not weights:
        still = {"keeps": (), "weights": 0, "added": 0, "scratch": (forward, 0)}
        return evolve(op, runs_back=False, receivers=(), forgone=op.keeps, piece=piece, **still)
    flows.update(id(value) for value in op.outputs)
    scratch = (forward, scratch_of(piece)[1])
    return evolve(op, receivers=receivers, weights=weights, added=weights, scratch=scratch, piece=piece)


def _other(pair: tuple[TracedTensor, ...], value: TracedTensor) -> TracedTensor:
    return pair[1] if pair[0] is value else pair[0]
