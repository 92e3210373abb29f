"""The grid of ranks: coordinates, groups, machines, and how free sizes are chosen."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan.mesh import AXES, build_mesh, groups, own_group
from xtrain.planner.derive.layout import choose_ulysses

SMALL = st.fixed_dictionaries({axis: st.sampled_from((1, 2, 3, 4)) for axis in AXES}).filter(
    lambda sizes: prod(sizes.values()) <= 96
)


@st.composite
def meshes(draw):
    sizes = draw(SMALL)
    world = prod(sizes.values())
    group = prod(sizes[axis] for axis in ("fsdp", "ring", "ulysses", "tp"))
    ep = draw(st.sampled_from([d for d in range(1, group + 1) if group % d == 0]))
    per_node = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    return build_mesh(sizes, ep=ep, ranks_per_node=per_node)


@given(meshes())
def test_ranks_and_coordinates_are_one_to_one(mesh):
    places = {tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)}
    assert len(places) == mesh.world_size
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert sum(place[axis.name] * axis.stride for axis in mesh.axes) == rank
        assert all(0 <= place[axis.name] < axis.size for axis in mesh.axes)


@given(meshes())
def test_groups_of_an_axis_are_the_ranks_that_differ_in_it_alone(mesh):
    for axis in mesh.axes:
        seen = []
        for group in groups(mesh, axis.name):
            assert [mesh.coordinates(rank)[axis.name] for rank in group] == list(range(axis.size))
            others = [{**mesh.coordinates(rank), axis.name: 0} for rank in group]
            assert all(place == others[0] for place in others)
            assert all(own_group(mesh, axis.name, rank) == group for rank in group)
            seen += group
        assert sorted(seen) == list(range(mesh.world_size))


@given(meshes())
def test_an_axis_crosses_nodes_exactly_if_one_of_its_groups_does(mesh):
    for axis in (*mesh.axes, *mesh.expert_axes):
        crossing = any(len({rank // mesh.ranks_per_node for rank in group}) > 1 for group in groups(mesh, axis.name))
        assert axis.crosses_nodes == crossing, axis


@given(meshes())
def test_expert_view_covers_the_same_ranks(mesh):
    sizes = {axis.name: axis.size for axis in mesh.expert_axes}
    assert prod(sizes.values()) == mesh.world_size
    assert sizes["ep"] * sizes["ep_fsdp"] == prod(mesh.size(axis) for axis in ("fsdp", "ring", "ulysses", "tp"))
    assert mesh.expert_axes[-1].stride == 1


def test_vector_of_sixteen_ranks():
    sizes = {"pp": 2, "replicate": 1, "fsdp": 2, "ring": 1, "ulysses": 2, "tp": 2}
    mesh = build_mesh(sizes, ep=4, ranks_per_node=8)
    assert mesh.coordinates(13) == {"pp": 1, "replicate": 0, "fsdp": 1, "ring": 0, "ulysses": 0, "tp": 1}
    assert [(axis.name, axis.size, axis.stride) for axis in mesh.expert_axes] == [
        ("pp", 2, 8),
        ("ep_replicate", 1, 8),
        ("ep_fsdp", 2, 4),
        ("ep", 4, 1),
    ]
    assert [axis.name for axis in mesh.axes if axis.crosses_nodes] == ["pp"]
    assert groups(mesh, "ulysses")[:2] == [[0, 2], [1, 3]]
    assert mesh.data_ranks == 2 and mesh.data_rank(13) == 1


@pytest.mark.parametrize(("cp", "heads", "kv_heads", "ulysses"), [
    (4, 32, 8, 4),
    (16, 32, 8, 8),
    (6, 32, 8, 2),
    (4, 16, 1, 4),
    (3, 16, 4, 1),
    (3, 12, 4, 1),
    (1, 8, 8, 1),
    (8, 4, 1, 4),
])  # fmt: skip
def test_ulysses_takes_what_heads_allow(cp, heads, kv_heads, ulysses):
    chosen, why = choose_ulysses(cp, heads, kv_heads)
    assert chosen == ulysses
    assert why


def sizes_of(plan):
    return {axis.name: axis.size for axis in plan.mesh.axes if axis.size > 1}


def test_world_defaults_to_what_the_axes_need(make_plan):
    assert make_plan().mesh.world_size == 1
    plan = make_plan(parallel="parallel { tp 2, pp 2 }")
    assert plan.mesh.world_size == 4 and sizes_of(plan) == {"pp": 2, "tp": 2}


def test_launch_gives_the_world_and_fsdp_takes_the_rest(make_plan):
    plan = make_plan(launch="launch { nodes = 4, ranks_per_node = 8 }", parallel="parallel { tp 2, fsdp auto }")
    assert sizes_of(plan) == {"fsdp": 16, "tp": 2}
    assert [axis.name for axis in plan.mesh.axes if axis.crosses_nodes] == ["fsdp"]
    how = next(entry.how for entry in plan.provenance if entry.path == "parallel.fsdp.size")
    assert how == "32 ranks / (tp 2)"


def test_world_on_the_command_line_wins_over_launch(make_plan):
    launch = "launch { nodes = 4, ranks_per_node = 8 }"
    assert make_plan(64, launch=launch).launch == {**make_plan(launch=launch).launch, "world_size": 64, "nodes": 8}
    small = make_plan(2, launch=launch)
    assert (small.launch["nodes"], small.launch["ranks_per_node"]) == (1, 2)


def test_axes_are_spread_evenly_over_nodes_that_are_only_counted(make_plan):
    plan = make_plan(launch="launch { nodes = 2 }", parallel="parallel { tp 4 }")
    assert plan.mesh.world_size == 4 and plan.mesh.ranks_per_node == 2
    assert make_plan(launch="launch { nodes = 2 }").mesh.world_size == 2


def test_copies_take_what_is_left_over(make_plan):
    """With the stack ddp all data ranks are copies, however many there are."""
    for world, parallel in (
        (4, "stack = ddp"),
        (4, "stack = ddp, fsdp auto { replicate = 2 }"),
        (None, "stack = ddp, fsdp auto { replicate = 4 }"),
        (None, "stack = ddp, fsdp 1 { replicate = 4 }"),
    ):
        plan = make_plan(world, parallel=f"parallel {{ {parallel} }}")
        assert sizes_of(plan) == {"replicate": 4} and plan.mesh.data_ranks == 4
    how = {
        entry.path: (entry.value, entry.how) for entry in make_plan(4, parallel="parallel { stack = ddp }").provenance
    }
    assert how["parallel.fsdp.replicate"] == ("4", "all 4 ranks: ddp keeps a whole copy on each")
    assert how["parallel.fsdp.size"] == ("1", "ddp shards nothing")


def test_what_follows_from_axes_has_a_reason(make_plan):
    plan = make_plan(
        parallel="parallel { pp 2 { schedule = interleaved_1f1b }, cp 2 { ring = 2 }, fsdp 2 }",
        activation="activation selective",
    )
    how = {entry.path: (entry.value, entry.how) for entry in plan.provenance}
    assert how["parallel.pp.stages_per_rank"] == ("2", "schedule interleaved_1f1b runs two stages on a rank")
    assert how["parallel.pp.layers"][0] == "[1, 1, 1, 1]"
    # 258 · 64 weights of the head; a block has q and o of 64 · 64, k and v of 32 · 64, three of 64 · 192.
    assert how["parallel.pp.head_cost"] == ("0.34", "vocab · dim = 16,512 / 49,152 weights of a block")
    assert how["parallel.fsdp.reshard"][0] == "false"
    assert how["collate.pack.align"] == ("4", "2 · ring 2 chunks of each document")
    assert how["collate"][0].endswith("pack -> shard")
    assert how["activation.save"][0] == '["matmul", "attention"]'  # its heads are too narrow for flex


def test_context_is_split_with_a_reason(make_plan):
    plan = make_plan(parallel="parallel { cp 8, tp 2 }")
    # 2 key/value heads are left to a tp rank.
    assert (plan.mesh.size("ulysses"), plan.mesh.size("ring")) == (2, 4)
    how = {entry.path: entry.how for entry in plan.provenance}
    assert "2 key/value heads" in how["parallel.cp.ulysses"]
    assert how["parallel.cp.ring"] == "cp 8 / ulysses 2"
    half = make_plan(parallel="parallel { cp 8 { ring = 2 } }", model="model llama { dim = 64, layers = 2, heads = 8 }")
    assert half.mesh.size("ulysses") == 4
