"""What holds of every plan, whatever the topology: drawn at random, valid by construction, up to 65,536 ranks."""

from collections import Counter
from math import prod

import attrs
import numpy as np
import pytest
from examples import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.model import FAMILIES, expert_families
from xtrain.dsl.schema.parallel import STACKS, Cp, Ep, Fsdp, Parallel, Pp, Tp
from xtrain.dsl.values import Quantity
from xtrain.plan.estimates import Memory
from xtrain.plan.mesh import fits, groups, local_shapes
from xtrain.plan.serialise import dumps, from_json, plan_id, to_json
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.page import render
from xtrain.planner.review.show import show_rank
from xtrain.text.page import LONGEST
from xtrain.text.units import WIDTH

POWERS = (1, 2, 4, 8)
LARGEST = (1, 8, 64, 64, 512, 4096, 65536)  # ranks of a world; most are small, as each rank of those is looked at
ROUNDS = ("interleaved_1f1b", "zero_bubble")
SPLIT_BACKWARD = ("zero_bubble", "zbv")
TEXT = """
experiment tiny { budget = 100 steps }
model llama { dim = 64, layers = 4, heads = 8 }
tokenizer bytes
dataset code { source = python_stdlib(), holdout = 1% }
batch { sequence = 256 }
optimizer adamw { lr = 1e-3 }
every 10 steps eval code then checkpoint
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "tiny.xtrain"
    path.write_text(TEXT)
    return load_spec(path).require()


@pytest.fixture(scope="module")
def known_ops():
    from xtrain.runtime.base.ops import CALLED_AFTER, COMPONENTS, load_ops, op_named

    for name, kind in ACTIONS.items():
        if not (kind.stops or kind.skips):  # which have no node
            op_named(f"tick.{name}")
    for stack in STACKS.values():
        op_named(stack.node())
    for before, registry in CALLED_AFTER.items():
        for name in registry:
            op_named(f"{before}.{name}")
    return set(load_ops()) | set(COMPONENTS)


@st.composite
def topologies(draw):
    """Blocks of a spec by name. Every number is drawn so that all rules hold: nothing has to be thrown away."""
    rest = draw(st.sampled_from(LARGEST))

    def size(*options):
        nonlocal rest
        chosen = draw(st.sampled_from([each for each in options if each <= rest]))
        rest //= chosen
        return chosen

    family = draw(st.sampled_from(("llama", "qwen3", "qwen3_moe", "mixtral")))
    if draw(st.integers(0, 9)) == 0:
        return _copies(draw, family, size(1, 2, 3, 8, 64, 512))
    moe = family in expert_families()
    tp, ulysses, ring = size(*POWERS), size(*POWERS), size(1, 1, 2, 3, 4)
    pp = size(1, 1, 2, 3, 4, 8, 16)
    fsdp, replicate = size(1, 2, 3, 4, 8, 16, 64, 512, 8192), size(1, 1, 2, 3, 16)
    group = tp * ulysses * ring * fsdp
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16, 64) if group % n == 0])) if moe else 1
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"))) if pp > 1 else "1f1b"
    each = {"interleaved_1f1b": draw(st.integers(2, 3)), "zbv": 2}.get(schedule, 1)
    pieces = draw(st.sampled_from([k for k in POWERS if k >= ulysses or ulysses % k == 0]))
    kv_heads = tp * pieces
    heads = kv_heads * draw(st.integers(1, 2)) * max(ulysses // pieces, 1)
    accumulate = pp * draw(st.integers(1, 3)) + (0 if schedule in ROUNDS else draw(st.integers(0, 2)))
    split = schedule in SPLIT_BACKWARD
    params = draw(st.sampled_from(("fp32", "bf16", "fp64")))
    world = tp * ulysses * ring * pp * fsdp * replicate
    return {
        "model": {"family": family, "dim": draw(st.integers(8, 96)), "layers": pp * each + draw(st.integers(0, 5)),
            "heads": heads, "kv_heads": kv_heads, "head_dim": 2 * draw(st.integers(1, 4)),
            "ffn": tp * draw(st.integers(1, 30)), "vocab": -(-draw(st.integers(258, 400)) // tp) * tp,
            "tie_embeddings": schedule != "zbv" and draw(st.booleans()), **(_experts(draw, ep) if moe else {})},
        "batch": {"sequence": 2 * ring * ulysses * tp * draw(st.integers(1, 8)), "micro": draw(st.integers(1, 3)),
            "accumulate": accumulate},
        "parallel": Parallel(
            tp=Tp(size=tp, sequence=draw(st.booleans()), loss=draw(st.booleans())),
            ep=Ep(size=ep),
            fsdp=Fsdp(size=fsdp, replicate=replicate, reduce=draw(st.sampled_from(("auto", "fp32"))),
                **({} if split else {"reshard": draw(st.booleans())})),
            pp=Pp(size=pp, schedule=schedule, **({"stages_per_rank": each} if pp > 1 else {})),
            cp=Cp(size=ring * ulysses, ring=ring, ulysses=ulysses,
                fold=draw(st.sampled_from(("all", "ring_only", "ulysses_only", "none")))),
        ),
        "precision": {"params": params, "compute": draw(st.sampled_from(("auto", "bf16")))},
        **_common(draw, world, compiles=not split),
    }  # fmt: skip


def _experts(draw, ep):
    experts = ep * draw(st.integers(1, 3))
    experts = max(experts, 2 * ep if ep == 1 else experts)
    return {
        "experts": experts,
        "experts_per_token": draw(st.integers(1, min(experts, 4))),
        "expert_ffn": draw(st.integers(1, 40)),
        "shared_experts": draw(st.integers(0, 1)),
    }


def _copies(draw, family, replicate):
    """The stack ddp: whole copies, nothing cut."""
    model = {"family": family, "dim": draw(st.integers(8, 96)), "head_dim": 4, "kv_heads": 2, "heads": 4}
    return {
        "model": {**model, **(_experts(draw, 1) if family in expert_families() else {})},
        "batch": {"sequence": draw(st.integers(2, 300)), "accumulate": draw(st.integers(1, 3))},
        "parallel": Parallel(stack="ddp", fsdp=Fsdp(size=1, replicate=replicate)),
        "precision": {},
        **_common(draw, replicate, compiles=True),
    }


def _common(draw, world, *, compiles):
    per_node = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16, 72) if world % n == 0]))
    preset = draw(st.sampled_from(("none", "h100", "b200", "cpu", "other")))
    memory = Quantity(2 ** draw(st.integers(24, 36)), "bytes")
    return {
        "launch": {"nodes": world // per_node, "ranks_per_node": per_node},
        "cluster": CLUSTERS[preset](**({"memory": memory} if preset in ("cpu", "other") else {})),
        "activation": {"mode": draw(st.sampled_from(("none", "full", "selective")))},
        "compile": {"mode": draw(st.sampled_from(("none", "default"))) if compiles else "none"},
        "optimizer": {"clip": draw(st.sampled_from((None, 1.0)))},
    }


def changed_block(base, settings):
    """A block with other settings; a model of another family keeps those that both families have."""
    family = FAMILIES[settings["family"]] if "family" in settings else type(base)
    given = {each.name: getattr(base, each.name) for each in attrs.fields(family) if hasattr(base, each.name)}
    return family(**{**given, **settings})


def planned(base, blocks):
    """The plan of a drawn spec, which must have one."""
    changed = {
        name: changed_block(getattr(base, name), block) if isinstance(block, dict) else block
        for name, block in blocks.items()
    }
    compiled = compile_plan(attrs.evolve(base, **changed))
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


# What holds of every plan ---------------------------------------------------------------------------------------------


def ranks_and_groups_are_partitions(plan):
    """Coordinates name each rank once, in both views; the groups of an axis hold each rank once."""
    mesh, ranks = plan.mesh, np.arange(plan.mesh.world_size)
    for axes in (mesh.axes, mesh.expert_axes):
        places = np.stack([ranks // axis.stride % axis.size for axis in axes])
        assert np.array_equal(sum(row * axis.stride for row, axis in zip(places, axes, strict=True)), ranks)
        assert prod(axis.size for axis in axes) == mesh.world_size
        for number, axis in enumerate(axes):
            of_axis = np.array(groups(mesh, axis.name))
            assert of_axis.shape == (mesh.world_size // axis.size, axis.size)
            assert np.array_equal(np.sort(of_axis, axis=None), ranks)
            inside = places[:, of_axis]  # [axes, groups, size]: only the own coordinate differs in a group
            assert np.array_equal(inside[number], np.tile(np.arange(axis.size), (len(of_axis), 1)))
            others = np.delete(inside, number, axis=0)
            assert (others == others[:, :, :1]).all()
    sizes = {axis.name: axis.size for axis in (*mesh.axes, *mesh.expert_axes)}
    assert sizes["ep"] * sizes["ep_fsdp"] == sizes["fsdp"] * sizes["ring"] * sizes["ulysses"] * sizes["tp"]
    assert sizes["ep_replicate"] == sizes["replicate"]
    last = mesh.world_size - 1
    assert tuple(mesh.coordinates(last).values()) == tuple(axis.size - 1 for axis in mesh.axes)


def stages_are_partitions(plan):
    args = plan.node("setup.build_model").args
    layers = [layer for first, last in args["stages"] for layer in range(first, last + 1)]
    assert layers == list(range(plan.architecture.layers))
    assert sorted(stage for stages in args["owners"] for stage in stages) == list(range(len(args["stages"])))
    assert len(args["owners"]) == plan.mesh.size("pp")
    assert sum(one.ranks for one in plan.estimates.classes) == plan.mesh.world_size
    assert [one.pp for one in plan.estimates.classes] == list(range(plan.mesh.size("pp")))


def pieces_make_up_the_whole(plan):
    """Over the ranks of one copy, what each owns of a tensor adds up to it, as often as it is not cut."""
    mesh = plan.mesh
    if mesh.world_size > 64:
        return
    one_copy = [rank for rank in range(mesh.world_size) if mesh.coordinates(rank)["replicate"] == 0]
    owned = Counter()
    for rank in one_copy:
        for name, shape in local_shapes(plan, rank).items():
            owned[name] += prod(shape)
    stage_ranks = len(one_copy) // mesh.size("pp")
    for tensor in plan.parameters.tensors:
        assert owned[tensor.name] == tensor.size * _times(plan, tensor, stage_ranks), tensor.name


def _times(plan, tensor, stage_ranks):
    """How many ranks of a copy hold the same piece of a tensor: none of the nodes has cut it between them."""
    ids = {node.id: node.args for node in plan.nodes}
    ends = 1
    if tensor.name == "embed_tokens.weight" and plan.architecture.tie_embeddings:
        owners = ids["setup.build_model"]["owners"]
        last = len(ids["setup.build_model"]["stages"]) - 1
        ends = len({pp for pp, stages in enumerate(owners) if 0 in stages or last in stages})
    if "setup.parallel.ddp" in ids:
        return stage_ranks
    if tensor.expert:
        cut = ids.get("setup.parallel.ep", {}).get("size", 1)
        sharded = "setup.parallel.expert_fsdp" in ids
        size = next(axis.size for axis in plan.mesh.expert_axes if axis.name == "ep_fsdp")
        return stage_ranks // (cut * (size if sharded else 1))
    owner = tensor.name.rpartition(".")[0]
    rules = ids.get("setup.parallel.tp", {"rules": ()})["rules"]
    tp = plan.mesh.size("tp") if any(fits(owner, rule["pattern"]) for rule in rules) else 1
    axes = ids["setup.mesh"]["shard_axes"] if "setup.parallel.fsdp" in ids else ()
    return stage_ranks // (tp * prod(plan.mesh.size(axis) for axis in axes)) * ends


def the_graph_can_be_executed(plan, known_ops):
    before = {node.id: 0 for node in plan.nodes}
    assert len(before) == len(plan.nodes)
    for edge in plan.edges:
        before[edge.after] += 1
        assert edge.before in before
    ready, seen = [id for id, count in before.items() if count == 0], 0
    assert ready == ["setup.bootstrap"]
    while ready:
        id = ready.pop()
        seen += 1
        for edge in plan.edges:
            if edge.before == id:
                before[edge.after] -= 1
                if before[edge.after] == 0:
                    ready.append(edge.after)
    assert seen == len(plan.nodes), "the graph has a cycle"
    assert {node.op for node in plan.nodes} <= known_ops
    sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    assert all(sizes[axis] > 1 for node in plan.nodes for axis in node.axes)
    timeline = plan.timeline
    ticking = {id for each in (*timeline.ticks, *timeline.triggers, *timeline.commands) for id in each.nodes}
    for command in timeline.commands:
        if dataset := command.name.partition("eval ")[2]:
            assert [plan.node(node).args["dataset"] for node in command.nodes] == [dataset]
    assert ticking == {node.id for node in plan.nodes if node.kind in ("tick", "event")}


def estimates_are_possible(plan):
    sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    ids = {node.id for node in plan.nodes}
    for one in plan.estimates.classes:
        for field in attrs.fields(Memory):
            assert getattr(one.memory, field.name) >= 0, field.name
        assert one.memory.parameters > 0 and one.memory.total_bytes > 0
        for each in one.traffic:
            assert all(sizes[axis] > 1 for axis in each.axis.split(" · ")), each
            assert each.node in ids and each.count > 0 and each.bytes > 0, each
            assert each.seconds is None or each.seconds >= 0, each
        assert 0 <= one.flops <= one.hardware_flops
    largest = max(sum(prod(shape) for shape in local_shapes(plan, rank).values()) for rank in _first_ranks(plan))
    assert max(one.memory.optimizer for one in plan.estimates.classes) % largest == 0
    if (times := plan.estimates.times) is not None:
        assert 0 < times.fast <= times.step * (1 + 1e-9) <= times.slow * (1 + 2e-9)
        assert 0 <= plan.estimates.bubble < 1 and 0 < times.mfu <= 1 and times.exposed >= 0 and times.computing > 0


def _first_ranks(plan):
    each = plan.mesh.world_size // plan.mesh.size("pp")
    return range(0, plan.mesh.world_size, each)


def it_can_be_shown_and_stored(plan):
    lines = render(plan).splitlines()
    assert len(lines) <= LONGEST and max(map(len, lines)) <= WIDTH, [line for line in lines if len(line) > WIDTH]
    for rank in {0, plan.mesh.world_size // 2, plan.mesh.world_size - 1}:
        assert not [line for line in show_rank(plan, rank).splitlines() if len(line) > WIDTH]
    assert plan.id == plan_id(plan)
    if plan.mesh.world_size <= 512:
        assert from_json(to_json(plan)) == plan
        assert dumps(from_json(to_json(plan))) == dumps(plan)


def all_hold(plan, known_ops):
    ranks_and_groups_are_partitions(plan)
    stages_are_partitions(plan)
    pieces_make_up_the_whole(plan)
    the_graph_can_be_executed(plan, known_ops)
    estimates_are_possible(plan)
    it_can_be_shown_and_stored(plan)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@drawn(30, 5000, suppress_health_check=QUIET)
@given(blocks=topologies())
def test_what_holds_of_every_topology(base, known_ops, blocks):
    all_hold(planned(base, blocks), known_ops)


def test_the_largest_world(base, known_ops):
    """65,536 ranks, every axis there is."""
    parallel = Parallel(
        tp=Tp(size=8),
        ep=Ep(size=64),
        fsdp=Fsdp(size=64, replicate=4),
        pp=Pp(size=4, schedule="zbv", stages_per_rank=2),
        cp=Cp(size=8, ring=4, ulysses=2, fold="all"),
    )
    model = {"family": "qwen3_moe", "layers": 9, "heads": 32, "kv_heads": 16, "vocab": 264, "experts": 128}
    batch = {"sequence": 256, "accumulate": 8}
    plan = planned(
        base, {"model": model, "batch": batch, "parallel": parallel, "launch": {"nodes": 8192, "ranks_per_node": 8}}
    )
    assert plan.mesh.world_size == 65536
    all_hold(plan, known_ops)
