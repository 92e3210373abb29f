"""What blocks keep and take, against sums worked out by hand."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from xtrain.blocks.compiled import compile_trace
from xtrain.blocks.frozen import without_frozen
from xtrain.blocks.memory_simulator import (
    Handling,
    Recompute,
    backward,
    bytes_for_backward,
    forward,
    second_run,
    stored,
)
from xtrain.blocks.op_trace import MATMUL, CollectiveCall, FsdpUnit, OpTrace, TracedOp, TracedTensor
from xtrain.planner.costs.block_trace import TP, compiled_graphs
from xtrain.planner.costs.block_trace import _multiply_meanwhile as multiply_meanwhile

SHAPE = "model llama {{ dim = 64, layers = {layers}, heads = 8, kv_heads = 4, ffn = 192 }}"
TOKENS, DIM, HEADS, KEYS, FFN, VOCAB = 2 * 256, 64, 8, 4, 192, 258
ROWS = "batch { sequence = 256, micro = 2 }"


def memory(make_plan, layers=4, **blocks):
    (only,) = make_plan(model=SHAPE.format(layers=layers), batch=ROWS, **blocks).estimates.classes
    return only.memory


@pytest.mark.parametrize(("precision", "width"), [("", 4), ("precision { params = bf16 }", 2)])
def test_a_block_keeps_what_its_modules_keep(make_plan, precision, width):
    """Input, normed input, q, k, v, what attention gives, second input, normed; gate, its silu, up, their product; and
    in fp32 a number for each norm, and one for each head."""
    one = memory(make_plan, 3, precision=precision).activations - memory(make_plan, 2, precision=precision).activations
    numbers = 4 * DIM + 2 * DIM + 2 * KEYS * (DIM // HEADS) + 4 * FFN
    assert one == TOKENS * (numbers * width + (2 + HEADS) * 4)


def test_recomputed_blocks_keep_what_goes_in(make_plan):
    full = [memory(make_plan, n, activation="activation full {}").activations for n in (2, 3)]
    assert full[1] - full[0] == TOKENS * DIM * 4
    some = [memory(make_plan, n, activation="activation selective { save = [matmul] }").activations for n in (2, 3)]
    products = DIM + 2 * KEYS * (DIM // HEADS) + DIM + 2 * FFN + DIM
    assert some[1] - some[0] == TOKENS * (DIM + products) * 4


def test_every_second_block_recomputed_saves_half(make_plan):
    none, full = memory(make_plan).activations, memory(make_plan, activation="activation full {}").activations
    half = memory(make_plan, activation="activation full { every = 2 }").activations
    assert half == (none + full) / 2


def test_the_loss_leaves_two_gradients(make_plan):
    assert memory(make_plan).loss == 4 * (TOKENS * DIM + VOCAB * DIM)


def test_whole_gradients_wait_for_the_last_microbatch(make_plan):
    """fsdp over 2 ranks, two microbatches: gathered are the ends of the model and one block; gradients all of it."""
    text = "parallel { fsdp 2 }"
    plan = make_plan(model=SHAPE.format(layers=4), batch="batch { sequence = 256, accumulate = 2 }", parallel=text)
    (only,) = plan.estimates.classes
    sizes = {tensor.name: tensor.size for tensor in plan.parameters.tensors}
    block = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    ends = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    assert only.memory.unsharded == 4 * (ends + block)
    assert only.memory.unreduced == 4 * plan.parameters.total
    single = make_plan(model=SHAPE.format(layers=4), batch="batch { sequence = 256, accumulate = 1 }", parallel=text)
    assert single.estimates.classes[0].memory.unreduced == 0


@pytest.mark.parametrize(("stages", "blocks"), [(2, 4), (4, 3)])
def test_of_the_stages_of_a_rank_three_are_gathered_at_once(make_plan, stages, blocks):
    """pp 2 with 8 blocks: the first rank has 4 of them, the first of which is behind the embedding."""
    text = f"parallel {{ pp 2 {{ schedule = interleaved_1f1b, stages_per_rank = {stages} }}, fsdp 2 }}"
    batch = "batch { sequence = 256, micro = 1, accumulate = 4 }"
    plan = make_plan(model=SHAPE.format(layers=8), batch=batch, parallel=text)
    block = 2 * DIM * DIM + 2 * DIM * KEYS * (DIM // HEADS) + 3 * DIM * FFN + 2 * DIM
    assert plan.estimates.classes[0].memory.unsharded == 4 * (blocks * block + VOCAB * DIM)


def chain(*, call=None) -> OpTrace:
    """x → linear (10 → 20) → square (keeps 20) → linear (20 → 10)."""
    trace = OpTrace(TracedTensor(10, 10))
    hidden = trace.linear(trace.input, 20, weight=5, flops=100)
    active = trace.op(hidden, makes=20, keeps=(hidden,), calls=[call] if call else ())
    trace.linear(active, 10, weight=6, flops=100)
    return trace


OWN = Handling(sums="own", again=False)


def test_memory_of_a_trace_computed_by_hand():
    trace = chain()
    assert bytes_for_backward(trace, None) == 10 + 20 + 20
    ahead = forward(trace, None, None)
    assert (ahead.peak, ahead.net) == (20 + 20 + 10, 20 + 20 + 10)
    # The last product: 20 for the gradient of what it took and 6 of its weight, beside the 10 that came.
    back = backward(trace, None, None, OWN, behind=None, ahead=None)
    assert back.net == -50 + 5 + 6  # all that was kept goes, gradients of weights stay, that of x is in the place of 10
    assert back.peak == 26  # 20 and 6, later 20 + 20 + 6 - 10 - 20 = 16, then less


def test_names_of_a_frozen_layer_go_when_their_function_returns():
    """x → 20 in a function, which a function in it squares → 10: what a backward would keep has names meanwhile."""

    def peak(*, inner: bool, last: int) -> int:
        trace = OpTrace(TracedTensor(10, 10))
        with trace.scope():
            hidden = trace.linear(trace.input, 20, weight=5, flops=100, parameters=("w",))
            with trace.scope() if inner else nullcontext():
                active = trace.op(hidden, makes=20, keeps=(hidden,))
            out = trace.linear(active, 10, weight=6, flops=100, parameters=("v",))
        trace.op(out, makes=10, scratch=(last, 0))
        still = without_frozen(trace, {"w": (5,), "v": (6,)}, {"w", "v"}, below=False)
        assert still.scopes == trace.scopes
        return forward(still, None, None).peak

    assert peak(inner=False, last=0) == 20 + 20 + 10
    assert peak(inner=True, last=0) == 20 + 20  # what went into the square is gone before the product
    assert peak(inner=False, last=40) == 10 + 10 + 40  # and all of the layer behind it


def test_a_second_run_ends_where_nothing_more_is_kept():
    call = CollectiveCall("tp", "all_gather", "setup.parallel.tp", 7)
    trace, again = chain(call=call), Recompute()
    assert bytes_for_backward(trace, again) == 10
    assert [op.calls for op in second_run(trace, again)] == [(), (call,), ()]
    assert forward(trace, None, again).net == 10
    back = backward(trace, None, again, OWN, behind=None, ahead=None)
    assert back.peak == 20 + 20 + 26 and back.net == -10 + 5 + 6
    some = Recompute(saved=frozenset({MATMUL}))
    assert bytes_for_backward(trace, some) == 10 + 20 + 10 and [op.calls for op in second_run(trace, some)] == [(call,)]


def test_a_long_compiled_function_keeps_what_goes_in():
    """Each value is computed from the one before, in two ways."""
    first = value = TracedTensor(8, 8)
    ops: list[TracedOp] = []
    for _ in range(100):
        other, product = TracedTensor(9, 9), TracedTensor(9, 9)
        ops.append(TracedOp(inputs=(value,), outputs=(other,), keeps=(value,)))
        ops.append(TracedOp(inputs=(value, other), outputs=(product,), keeps=(value, other)))
        value = product
    ops.append(TracedOp(inputs=(value,), outputs=(TracedTensor(9, 9),), flops=1))
    compile_trace(OpTrace(first, ops, 0), [range(len(ops))], frozenset())
    assert {id(kept) for op in ops for kept in op.keeps} == {id(first)}


def kinds_of_ops():
    """A product, pointwise operations around an operation that is not compiled, another product."""
    trace = OpTrace(TracedTensor(8, 8))
    product = trace.op(trace.input, makes=8, keeps=(trace.input,), saved=MATMUL, flops=1)
    scaled = trace.op(product, makes=8, keeps=(product,))
    mixed = trace.op(scaled, makes=8, keeps=(scaled,), flops=1, apart=True)
    trace.op(trace.op(mixed, makes=8), makes=8, keeps=(mixed,), saved=MATMUL, flops=1)
    return trace


@pytest.mark.parametrize(("mode", "graphs"), [("none", [range(2), range(3, 5)]), ("selective", []), ("full", [])])
def test_what_is_compiled_around_an_operation_that_is_not(mode, graphs):
    """torch compiles nothing of a checkpoint in which it leaves compiled code."""
    resolved = SimpleNamespace(spec=SimpleNamespace(activation=SimpleNamespace(mode=mode)), tile=None)
    assert compiled_graphs(kinds_of_ops(), SimpleNamespace(layers=list), resolved) == graphs


def test_selective_recomputation_saves_no_results_of_compiled_parts():
    trace, some = kinds_of_ops(), Recompute(saved=frozenset({MATMUL}))
    last = trace.ops[-1].outputs[0]
    compile_trace(trace, [range(2)], some.saved)
    assert stored(trace, some) == [last]
    assert [op.flops for op in second_run(trace, some)] == [1, 0, 1, 0]


def test_a_value_that_is_used_through_a_view_elsewhere_is_in_memory():
    trace = OpTrace(TracedTensor(8, 8))
    value = trace.op(trace.input, makes=8)
    (view,) = trace.views(value)
    trace.op(view, makes=8, keeps=(view,), flops=1)
    compile_trace(trace, [range(2)], frozenset())
    assert trace.ops[0].outputs == (value,)


def test_a_unit_is_gathered_exchanged_and_let_go():
    unit = FsdpUnit(
        whole=11, gradients=11, summed=11, buffer=12, output=6, shard=6, largest=6, shards=2, copies=1, moved=False,
        reshards=True,
    )  # fmt: skip
    now = backward(chain(), unit, None, Handling(sums="exchange", again=False), behind=unit, ahead=unit)
    assert now.net == -50 + 6  # a shard in the place of 11
    later = backward(chain(), unit, None, Handling(sums="keep", again=False), behind=unit, ahead=unit)
    assert later.net == -50 + 11
    added = backward(chain(), unit, None, Handling(sums="keep", again=True), behind=unit, ahead=unit)
    assert added.net == -50


@pytest.mark.parametrize("gathers", [True, False])
def test_what_tp_sends_travels_beside_the_product_that_takes_or_makes_it(gathers: bool):
    """Of the operations behind a gather, and of those before a sum, the nearest that multiplies by parameters."""
    there, back = ("all_gather", "reduce_scatter") if gathers else ("reduce_scatter", "all_gather")
    sent = SimpleNamespace(
        calls=(CollectiveCall("tp", there, TP, 8),), back_calls=(CollectiveCall("tp", back, TP, 8),), flops=0,
        parameters=(),
    )  # fmt: skip
    alone = SimpleNamespace(calls=(CollectiveCall("tp", "all_reduce", TP, 8),), back_calls=(), flops=0, parameters=())

    def product(flops: int, parameters: tuple[str, ...] = ("w",)) -> SimpleNamespace:
        return SimpleNamespace(calls=(), back_calls=(), flops=flops, parameters=parameters)

    ops = [product(3), product(5), product(7, ()), sent, alone, product(11, ()), product(13), product(17)]
    multiply_meanwhile(SimpleNamespace(ops=ops))  # pyright: ignore[reportArgumentType]
    assert [call.meanwhile for call in (*sent.calls, *sent.back_calls)] == [13 if gathers else 5] * 2
    assert [call.meanwhile for call in alone.calls] == [0]
