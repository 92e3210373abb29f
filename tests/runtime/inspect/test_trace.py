"""A trace sees what a rank holds and sends, and leaves no trace itself."""

import gc
import pkgutil
from functools import cache
from importlib import import_module
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from one_rank import one_rank
from topologies import BY_NAME, SCHEDULES, TOPOLOGIES, Topology
from traces import calls, is_as_planned, plan_of

from xtrain import components
from xtrain.planner.load import plan_from_path
from xtrain.runtime.base.ops import OPS, load_ops, op_of
from xtrain.runtime.inspect import trace
from xtrain.runtime.inspect import trace as program
from xtrain.runtime.inspect.trace import full_rows, trace_plan
from xtrain.runtime.loop.node_calls import topological
from xtrain.runtime.nn import pipeline as outline
from xtrain.runtime.nn.batch import ModelBatch

# Beside the layouts of tests/planner/test_agreement.py, of which the same is tested.
QUICK = ("replicate 2 · fsdp 2 (dense)",)
BATCH, SEQUENCE, DIM, LAYERS, VOCAB = 8, 64, 32, 2, 258
MICROBATCHES = 4  # of a pipeline, of two rows each


def check(plan):
    for traced in trace_plan(plan):
        is_as_planned(plan, traced)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By what recomputes its blocks (`activation.mode`): the plan of one rank, and its trace."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def trace_one(mode=""):
        sets = ("launch.device=cpu", *((f"activation.mode={mode}",) if mode else ()))
        plan = plan_of(folder, Topology(accumulate=1, sets=sets), params="fp32")
        return plan, *trace_plan(plan)

    return trace_one


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """The plan of two ranks that share parameters, and the trace of the first."""
    plan = plan_of(tmp_path_factory.mktemp("two"), Topology(fsdp=2), params="fp32")
    return plan, *trace_plan(plan)


@pytest.mark.matrix
@pytest.mark.parametrize("name", QUICK)
def test_a_rank_of_every_coordinate_holds_what_was_planned(tmp_path, name):
    check(plan_of(tmp_path, BY_NAME[name]))


def test_collators_and_hooks_of_the_users_own_are_not_called(plan_with_collator):
    """Rows of a trace are made up, and stages between the ends of a pipeline have no tokens of them."""
    check(plan_with_collator)


@pytest.fixture
def plan_with_collator(tmp_path):
    (tmp_path / "parts.py").write_text(
        "from xtrain import collator, hook\n\n\n"
        '@collator(takes="microbatch")\ndef refuse(batch):\n    raise RuntimeError\n'
        '@hook("after_step")\ndef late(context):\n    raise RuntimeError\n'
    )
    text = """
        use "parts.py"
        experiment traced { budget = 4 steps }
        model llama { dim = 32, layers = 3, heads = 4 }
        tokenizer bytes
        dataset code { source = python_stdlib() }
        batch { sequence = 64, rows = 4 }
        collate = to_tensor -> flatten -> shift_tokens -> pack -> refuse
        optimizer adamw { lr = 1e-3 }
        hook late
        parallel { pp 3 }
    """
    (tmp_path / "traced.xtrain").write_text(text)
    compiled = plan_from_path(tmp_path / "traced.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


@pytest.mark.parametrize(
    "more",
    [*(pytest.param(each, marks=pytest.mark.matrix) for each in (
        "log { tensorboard = true }", "", 'log { wandb { project = "p" } }')), "log { Quiet { } }"],
)  # fmt: skip
def test_records_and_counts_of_a_run_are_left_out(tmp_path, more):
    """Trackers of either kind get no records, and the data is not counted."""
    (tmp_path / "parts.py").write_text(
        "from xtrain import TrackerContext, tracker\n\n\n@tracker\nclass Quiet:\n"
        "    def open(self, context: TrackerContext):\n        raise RuntimeError\n"
        "    def event(self, record: dict):\n        raise RuntimeError\n"
    )
    text = f"""
        use "{tmp_path / "parts.py"}"
        experiment traced {{ budget = 2 epochs }}
        model llama {{ dim = 32, layers = 1, heads = 4 }}
        tokenizer bytes
        dataset code {{ source = python_stdlib() }}
        batch {{ sequence = 64, rows = 4 }}
        optimizer adamw {{ lr = 1e-3 }}
        {more}
    """
    (tmp_path / "traced.xtrain").write_text(text)
    compiled = plan_from_path(tmp_path / "traced.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    left_out = {node.op for node in compiled.plan.nodes if node.op.startswith(("setup.log.", "setup.horizon"))}
    assert len(left_out) == 1 + bool(more)
    check(compiled.plan)


def test_every_op_of_a_trace_finds_what_it_needs():
    """No parameter without a default is a resource that only the executor of a run has."""
    load_ops()
    for module in pkgutil.walk_packages(components.__path__, f"{components.__name__}."):
        if module.name.endswith("_run"):
            import_module(module.name)
    of_runs = {"records", "requests", "control", "notifier", "alert_actions", "beat", "store", "replica", "at_end",
               "trackers", "exit_process", "under_way", "due_ticks", "prepared"}  # fmt: skip
    wanting = {
        name: missing
        for name, op in OPS.items()
        if name.startswith(("setup.", "step."))
        and not name.startswith("setup.log.")
        and op.traced
        and "torchft" not in name
        for missing in [{n for n, p in signature(op.function).parameters.items() if p.default is p.empty} & of_runs]
        if missing
    }
    assert not wanting


@pytest.mark.matrix
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=[topology.name for topology in TOPOLOGIES])
def test_the_whole_table(tmp_path, topology):
    check(plan_of(tmp_path, topology, shallow=False))


def test_activations_are_what_autograd_keeps_in_a_real_forward(alone):
    """The forward of the same model with values, whose saved tensors are counted by their storages."""
    plan, traced = alone()
    load_ops()
    rank = one_rank(coordinates=plan.mesh.coordinates(0))
    resources = {"plan": plan, "rank": rank}
    for node in topological(plan):
        if node.op in ("setup.build_model", "setup.weights"):
            resources[op_of(node).gives] = op_of(node).bind(node, resources)()
    model = resources["model"].whole
    batch = ModelBatch.of(full_rows(BATCH, SEQUENCE), rank.device)
    saved: dict[int, int] = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        objective = model(None, batch)
    known = [*model.parameters(), batch.input_ids_BS, batch.labels_BS, batch.positions_BS]
    for tensor in known:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    # Beside these: the objective, the cross-entropy that is logged.
    assert traced.memory.activations - sum(saved.values()) in range(64)
    assert objective.shape == (1,)
    tokens = BATCH * SEQUENCE
    assert traced.memory.loss == 4 * (tokens * DIM + VOCAB * DIM)


@pytest.mark.matrix
def test_fsdp_gathers_each_block_for_the_forward_and_for_the_backward(on_two):
    """Two microbatches: gathered twice in each, exchanged in every one of them or in the last."""
    plan, traced = on_two
    blocks = calls(traced, "setup.parallel.fsdp")
    block = sum(t.size for t in plan.parameters.tensors if t.name.startswith("layers.0."))
    exchanges = 2 if plan.node("step.forward_backward").args["sync"] == "microbatch" else 1
    assert blocks["fsdp", "all_gather"] == (2 * 2 * LAYERS, 2 * 2 * LAYERS * block * 4)
    assert blocks["fsdp", "reduce_scatter"] == (exchanges * LAYERS, exchanges * LAYERS * block * 4)
    ends = sum(t.size for t in plan.parameters.tensors if not t.name.startswith("layers."))
    assert calls(traced, "setup.parallel.root_fsdp")["fsdp", "all_gather"] == (2, 2 * ends * 4)
    # The root is gathered all the time, and one block after the other, the next one before the last is let go.
    assert traced.memory.unsharded in (4 * (ends + block), 4 * (ends + 2 * block))


@pytest.mark.matrix  # tests/planner/test_agreement.py compares the same numbers with a plan
def test_tensor_parallel_sends_the_stream_around_every_half_of_a_block(tmp_path):
    (traced,) = trace_plan(plan_of(tmp_path, Topology(tp=2, accumulate=1), params="fp32"))
    sent = calls(traced, "setup.parallel.tp")
    stream = BATCH * SEQUENCE * DIM * 4
    halves = 2 * LAYERS
    # Forward: into each half and into the head; out of each half and of the embedding. Backward: the same, turned.
    assert sent["tp", "all_gather"] == (2 * (halves + 1), 2 * (halves + 1) * stream)
    assert sent["tp", "reduce_scatter"] == (2 * (halves + 1), 2 * (halves + 1) * stream)


@pytest.mark.matrix
def test_experts_get_an_even_share(tmp_path):
    """Counts, tokens there and back, and the gradients of both: five exchanges a block."""
    (traced,) = trace_plan(plan_of(tmp_path, Topology(fsdp=2, ep=2, model="moe", accumulate=1), params="fp32"))
    count, size = calls(traced, "setup.parallel.ep")["ep", "all_to_all"]
    rows = BATCH // 2 * SEQUENCE * 2  # of this rank, each to two experts
    assert count == 5 * LAYERS
    assert size == LAYERS * (4 * rows * DIM * 4 + 8 * 8)  # eight counts of eight bytes


@pytest.mark.matrix
def test_a_pipeline_passes_the_stream_on_and_its_gradient_back(tmp_path):
    plan = plan_of(tmp_path, BY_NAME["pp 2, 1f1b (dense)"])
    first, last = trace_plan(plan)
    every = (MICROBATCHES, BATCH * SEQUENCE * DIM * 8)
    for traced in (first, last):
        assert calls(traced, "setup.parallel.pp") == {("pp", "send"): every, ("pp", "recv"): every}
    assert (first.memory.loss, last.memory.loss > 0) == (0, True)
    # Two microbatches are under way on the first stage, and one on the last, which holds the head as well.
    assert first.memory.activations > last.memory.activations


@pytest.mark.matrix
def test_units_are_known_by_name_from_the_first_gather_on(tmp_path):
    """Schedules of several stages gather before the first forward."""
    first, last = trace_plan(plan_of(tmp_path, BY_NAME["pp 2 · fsdp 2, zero_bubble (dense)"]))
    for traced in (first, last):
        blocks = calls(traced, "setup.parallel.fsdp")
        assert blocks["fsdp", "all_gather"] == blocks["fsdp", "reduce_scatter"]
        assert blocks["fsdp", "all_gather"][0] == 2  # of four blocks, in two stages
        assert traced.memory.unreduced > 0


@pytest.mark.matrix
def test_gradients_wait_whole_for_the_last_microbatch_of_a_pipeline(tmp_path):
    """All forwards of gpipe come first: what waits is seen after backwards alone."""
    plan = plan_of(tmp_path, Topology(pp=2, fsdp=2, sets=SCHEDULES["gpipe"]), params="fp32")
    waiting = [(traced.memory.unreduced, 2 * traced.memory.gradients) for traced in trace_plan(plan)]
    assert len(waiting) == 2 and all(found == twice > 0 for found, twice in waiting), waiting


@pytest.mark.matrix
def test_stages_that_read_no_rows_hear_of_full_ones(tmp_path, monkeypatch):
    received = []
    decode = outline.decode_outline
    monkeypatch.setattr(outline, "decode_outline", lambda *args: received.extend(decode(*args)) or decode(*args))
    trace_plan(plan_of(tmp_path, BY_NAME["pp 2, zbv (dense)"]), ranks=[1])
    lengths = [batch.cumulative_lengths.tolist() for batch in received]
    assert lengths == [[0, SEQUENCE, 2 * SEQUENCE]] * MICROBATCHES


@pytest.mark.matrix
def test_recomputed_blocks_leave_what_they_were_given(alone):
    whole, full, selective = (alone(mode)[1].memory for mode in ("", "full", "selective"))
    stream = BATCH * SEQUENCE * DIM * 4
    assert full.activations < (LAYERS + 4) * stream
    assert full.activations < selective.activations < whole.activations


@pytest.mark.matrix
def test_one_kernel_for_all_experts_is_given_where_each_begins(tmp_path):
    """Hopper has it, and keeps a number of four bytes for each of eight experts; elsewhere they go one by one."""
    wide = ("model.dim=64", "model.expert_ffn=32", "precision.compute=bf16")
    hopper, ampere = (
        trace_plan(plan_of(tmp_path, Topology(model="moe", accumulate=1), *wide, params="fp32", more=f"cluster {name}"))
        for name in ("h100", "a100")
    )
    assert hopper[0].memory.activations - ampere[0].memory.activations == LAYERS * 8 * 4


def test_microbatches_that_are_alike_are_counted_without_being_run(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, Topology(fsdp=2, accumulate=5, rows=10), "model.layers=1", params="fp32")
    (some,) = trace_plan(plan)
    monkeypatch.setattr(trace, "ENOUGH", 5)
    (every,) = trace_plan(plan)
    assert set(some.traffic) == set(every.traffic)
    assert evolve(some.memory, activations=0) == evolve(every.memory, activations=0)
    assert abs(some.memory.activations - every.memory.activations) < 64  # the loss of each is kept


@pytest.mark.matrix
def test_what_is_offloaded_is_not_on_the_device(tmp_path, on_two):
    sets = ("parallel.fsdp.offload=true", "launch.device=cuda")
    _, here = on_two
    (there,) = trace_plan(plan_of(tmp_path, Topology(fsdp=2), *sets, params="fp32"))
    assert there.memory.offloaded and not here.memory.offloaded
    assert there.memory.states == here.memory.states
    assert there.memory.total_bytes < here.memory.total_bytes


@pytest.mark.matrix
def test_traces_do_not_disturb_each_other(tmp_path):
    """Groups of one world have the names of another's."""
    ours, other = (plan_of(tmp_path, BY_NAME[name]) for name in ("fsdp 2 · tp 2 (dense)", "tp 2, no clipping (qwen3)"))
    first, between, again = ([evolve(traced, seconds=0.0) for traced in trace_plan(p)] for p in (ours, other, ours))
    assert first == again != between


def test_a_trace_that_fails_leaves_no_process_group(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, Topology(fsdp=2), "model.layers=1", params="fp32")

    def fail(*_):
        raise KeyError("in the middle")

    with monkeypatch.context() as broken, pytest.raises(KeyError, match="in the middle"):
        broken.setattr(program.MemoryOwners, "forward_begins", fail)
        trace_plan(plan)
    assert not dist.is_initialized()
    assert torch.ones(2).sum() == 2  # tensors have values again
    check(plan)


def test_a_rank_of_a_run_cannot_trace(tmp_path):
    plan = plan_of(tmp_path, Topology(fsdp=2), params="fp32")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="not part of a process group"):
            trace_plan(plan)
    finally:
        dist.destroy_process_group()


# Averages of bf16 are of fp32, so that they do not follow from the formats of the others.
@pytest.mark.matrix
@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_averages_are_as_planned_and_change_nothing_else(tmp_path, params):
    topology = BY_NAME["tp 2, uneven vocabulary (dense)"]
    plan, without = (plan_of(tmp_path, topology, params=params, more=more) for more in ("ema { }", ""))
    pairs = zip(trace_plan(plan), trace_plan(without), plan.estimates.classes, strict=True)
    for ours, theirs, planned in pairs:
        is_as_planned(plan, ours)
        width = 1 if params == "fp32" else 2
        assert ours.memory.averages == planned.memory.averages == width * ours.memory.parameters
        assert evolve(ours.memory, averages=0) == theirs.memory
        assert ours.traffic == theirs.traffic


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_trace(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with program._cycles_kept():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
