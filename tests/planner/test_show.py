"""Questions to a plan: about one rank, one node, one value. What is not there is said, with what was probably meant."""

import re
from math import prod

import pytest
from attrs import evolve

from xtrain.plan.estimates import Memory, Traffic
from xtrain.planner.review.changes import changed_figures
from xtrain.planner.review.diff import node_changes
from xtrain.planner.review.show import NoSuchNode, NoSuchRank, find_nodes, members, show_nodes, show_rank
from xtrain.planner.review.why import NoSuchValue, find_slot, neighbours, replaced, show_why

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"
EVERY_AXIS = "parallel { pp 2, fsdp 2 { replicate = 2 }, tp 2, cp 4 { ring = 2, ulysses = 2 }, ep 4 }"


def words(text):
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def large(make_plan):
    """64 ranks on eight nodes, every axis at 2."""
    batch = "batch { sequence = 256, accumulate = 4, micro = 2 }"
    return make_plan(model=MOE, parallel=EVERY_AXIS, cluster="cluster h100 { devices = 8 }", batch=batch)


# ranks ----------------------------------------------------------------------------------------------------------------


def test_a_rank_says_where_it_stands(large):
    """Rank 45 = 32 + 8 + 4 + 1: pp 1, replicate 0, fsdp 1, ring 1, ulysses 0, tp 1."""
    text = words(show_rank(large, 45))
    assert "rank 45 of 64: node 5, its device 5" in text
    for line in (
        "pp 1 2 13, 45 network 50 GB/s pipeline of stages",
        "replicate 0 2 45, 61 network",
        "fsdp 1 2 37, 45 network",
        "ring 1 2 41, 45 link 450 GB/s",
        "ulysses 0 2 45, 47 link",
        "tp 1 2 44, 45 link",
        "ep_fsdp 3 4 33, 37, 41, 45 network",
        "ep 1 4 44, 45, 46, 47 link",
    ):
        assert line in text, line
    assert "LAYERS with last norm, head stage 1 of 2: layers 2 to 3, 2 blocks" in text


def test_every_rank_stands_in_the_groups_it_names(large):
    for axis in (*large.mesh.axes, *large.mesh.expert_axes):
        for rank in range(64):
            group = members(axis, rank)
            assert len(group) == axis.size and rank in group
            assert all(members(axis, other) == group for other in group)


def test_a_rank_says_what_it_holds(large, make_plan):
    text = words(show_rank(large, 45))
    found = re.search(r"PARAMETERS ([\d,]+) in (\d+) tensors", text)
    assert found is not None
    from xtrain.plan.mesh import local_shapes

    local = local_shapes(large, 45)
    assert int(found[1].replace(",", "")) == sum(map(prod, local.values()))
    assert int(found[2]) == len(local)
    assert "layers.2.mlp.experts.up_proj 8 · 64 · 192 2 · 16 · 192" in text
    pieces = words(show_rank(make_plan(parallel="parallel { fsdp 64 }", batch="batch { sequence = 256 }"), 63))
    assert "embed_tokens.weight 258 · 64 0 · 64: nothing" in pieces


def test_a_rank_says_what_it_reads(large):
    """Two copies of two data ranks, of which rank 45 is the second: rows 2 and 3 of each eight."""
    assert "data rank 1 of 4 of the 32 rows of a step, 2 to 3 in the first microbatch, then 8 further on" in words(
        show_rank(large, 45)
    )
    assert "of each row 64 of 256 positions the same rows as its neighbors along ring, ulysses, tp" in words(
        show_rank(large, 45)
    )


def test_a_rank_between_the_ends_reads_nothing(make_plan):
    plan = make_plan(parallel="parallel { pp 4 }")
    assert "reads no rows" in show_rank(plan, 1) and "reads no rows" not in show_rank(plan, 3)
    assert "blocks alone" in show_rank(plan, 1)


def test_a_rank_says_what_it_sends(large):
    sent = Traffic(
        axis="fsdp · ring", op="all_gather", node="setup.parallel.fsdp", count=4, bytes=2**20, exposed=True, seconds=0.5
    )
    memory = Memory(parameters=2**30, gradients=0, optimizer=0, activations=19 * 2**30)
    classes = tuple(evolve(one, traffic=(sent,), memory=memory) for one in large.estimates.classes)
    text = words(show_rank(evolve(large, estimates=evolve(large.estimates, classes=classes)), 0))
    assert "fsdp · ring all_gather 4 calls 1.00 MiB 500 ms exposed network" in text
    assert "20.0 GiB of 80.0 GiB (25%) at the peak of a step, the most of the 32 ranks of pp 0" in text
    assert "parameters 1.00 GiB · activations 19.0 GiB" in text


@pytest.mark.parametrize("rank", [-1, 64, 10**9])
def test_no_rank_outside_the_world(large, rank):
    with pytest.raises(NoSuchRank, match="the plan has 64 ranks, 0 to 63"):
        show_rank(large, rank)


def test_one_rank_alone(make_plan):
    text = show_rank(make_plan(), 0)
    assert "rank 0 of 1: node 0, its device 0" in text and "COMMUNICATION" not in text
    assert "at 0, alone, on pp, replicate, fsdp, ring, ulysses, tp" in text


# nodes ----------------------------------------------------------------------------------------------------------------


def test_a_node_says_what_it_does(large):
    text = words(show_nodes(large, "setup.parallel.tp"))
    assert text.startswith("setup.parallel.tp setup split 18 matrices over tp=2")
    assert "matches 18 modules of the whole model" in text and "axes tp 2" in text
    assert "rules pattern layers.*.self_attn.q_proj, style column, matches 4" in text
    assert "after setup.build_model: model before setup.parallel.cp: model" in text
    assert "matches 4 modules of the whole model; by pp 2, 2" in words(show_nodes(large, "setup.parallel.fsdp"))


def test_a_node_says_when_it_runs_and_what_it_costs(make_plan):
    plan = make_plan(parallel="parallel { fsdp 2 }", every="every 30 steps eval code", more="on finish eval code")
    assert "every 30 steps, 3 times" in words(show_nodes(plan, "tick.eval.code"))
    assert "on finish" in words(show_nodes(plan, "event.finish.eval.code"))
    sent = Traffic(axis="fsdp", op="all_gather", node="setup.parallel.fsdp", count=4, bytes=300, exposed=False)
    rest = evolve(sent, node="setup.parallel.root_fsdp", bytes=100)
    memory = Memory(parameters=10, gradients=20, optimizer=0, unsharded=30, activations=40)
    one = evolve(plan.estimates.classes[0], traffic=(sent, rest), memory=memory)
    full = evolve(plan, estimates=evolve(plan.estimates, classes=(one,)))
    text = words(show_nodes(full, "setup.parallel.fsdp"))
    assert "traffic 4 all_gather over fsdp, 300 B (75% of all), overlapped" in text
    assert "30 B of unsharded (30%), on every rank, together with setup.parallel.root_fsdp" in text
    step = words(show_nodes(full, "forward_backward"))
    assert "memory 20 B of gradients (20%), 40 B of activations (40%), on every rank" in step


@pytest.mark.parametrize(("name", "expected"), [
    ("setup.mesh", ["setup.mesh"]),
    ("mesh", ["setup.mesh"]),
    ("fsdp", ["setup.parallel.fsdp"]),
    ("parallel", ["setup.parallel.fsdp", "setup.parallel.root_fsdp"]),
    ("setup.parallel.*fsdp", ["setup.parallel.fsdp", "setup.parallel.root_fsdp"]),
    ("parallel.r*", ["setup.parallel.root_fsdp"]),
    ("checkpoint", ["setup.checkpoint", "tick.checkpoint"]),
    ("data", ["setup.data.code"]),
])  # fmt: skip
def test_ways_to_name_a_node(make_plan, name, expected):
    plan = make_plan(parallel="parallel { fsdp 2 }")
    assert [node.id for node in find_nodes(plan, name)] == expected


def test_many_nodes_are_listed(make_plan):
    text = show_nodes(make_plan(), "setup")
    assert len(text.splitlines()) < 40 and "setup.weights" in text
    assert not any(line.split()[:1] == ["after"] for line in text.splitlines())


@pytest.mark.parametrize(("name", "hint"), [
    ("fspd", "did you mean `setup.parallel.fsdp`?"),
    ("setup.paralel.fsdp", "did you mean `setup.parallel.fsdp`?"),
    ("step.optimiser", "did you mean `step.optimizer`?"),
    ("setup.parallel.fs", "did you mean `setup.parallel.fsdp`?"),
    ("zzz*", "--full` lists them"),
])  # fmt: skip
def test_a_node_that_is_not_there(make_plan, name, hint):
    with pytest.raises(NoSuchNode) as caught:
        find_nodes(make_plan(parallel="parallel { fsdp 2 }"), name)
    assert f"no node `{name}`" in str(caught.value) and hint in str(caught.value)


# values ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def why(load, compiled):
    """`why("optimizer.lr", **blocks)`: the page about a value of the small spec, blanks as one."""

    def ask(name, world=None, **blocks):
        plan = compiled(world, **blocks).plan
        return words(show_why(plan, load(**blocks), name, world=world))

    return ask


def test_a_value_that_was_written(why):
    text = why("optimizer.lr")
    assert text.startswith("optimizer.lr = 0.001 from text ")
    assert "what peak learning rate, reached after warm-up role changes what is learned" in text
    assert ":6 | optimizer adamw { lr = 1e-3 }" in text  # the line it stands in
    assert "with optimizer.lr = 0.002 setup.optimizer lr 0.001 → 0.002 setup.scheduler lr 0.001 → 0.002" in text
    assert "experiment different" in text


def test_a_value_that_came_through_a_name(why):
    text = why("optimizer.lr", more="let rate = 1e-3", optimizer="optimizer adamw { lr = rate }")
    assert "from let " in text and "| optimizer adamw { lr = rate }" in text and "| let rate = 1e-3" in text


def test_a_value_that_was_derived(why):
    text = why("model.ffn")
    assert "model.ffn = 192 from derived = 8/3 · dim 64, rounded up to a multiple of 64" in text
    assert "written auto: the planner derives it" in text
    assert "with model.ffn = 384" in text and "architecture.ffn 192 → 384" in text and "parameters 230k → 378k" in text


def test_rules_that_rest_on_a_value(why):
    text = why("parallel.tp", parallel="parallel { tp 2 }")
    assert "parallel.tp.size = 2" in text and "pass mesh.tp.heads heads 8 / tp 2 = 4" in text
    assert "mesh.tp.ffn" in text and "batch.sequence" in text
    assert "model.head_dim" not in text.partition("DEPENDS")[0] and "pass graph" not in text
    assert "parallel.tp 2 settings more parallel.tp.sequence true default" in text


def test_what_depends_on_it_is_found_by_planning_again(why):
    """Neighbours are tried until one has a plan: 4 heads of keys cannot be split over 8, so 2, on half the ranks."""
    text = why("parallel.tp", parallel="parallel { tp 4 }", launch="launch { nodes = 2 }")
    assert "with parallel.tp.size = 2 setup.bootstrap" in text
    assert "axes.tp 4 → 2" in text and "setup.parallel.tp size 4 → 2" in text and "mesh tp 4 → tp 2" in text
    gone = why("parallel.fsdp", parallel="parallel { fsdp 2 }")
    assert "with parallel.fsdp.size = 4" in gone
    assert "gone setup.parallel.fsdp gone setup.parallel.root_fsdp" in why("parallel.stack", 2)
    new = why("compile.mode")
    assert "with compile.mode = default new setup.compile" in new and "experiment the same" in new


def test_a_value_without_a_neighbour_that_has_a_plan(why):
    text = why("model.family")
    assert "DEPENDS ON IT" in text
    stuck = why("batch.sequence", parallel="parallel { tp 4 }", batch="batch { sequence = 4 }", budget="")
    assert "with batch.sequence = 8" in stuck
    none = why("parallel.pp.schedule", parallel="parallel { pp 2 }", batch="batch { sequence = 256, accumulate = 3 }")
    assert "with parallel.pp.schedule = gpipe" in none


def test_values_without_a_setting_of_their_own(why):
    assert "with experiment.budget = 8192 tokens" in why("steps", experiment="experiment tiny { budget = 4096 tokens }")
    assert "with batch.accumulate = 8" in why("tokens_per_step")
    assert "with --world 4" in why("world_size", 2, parallel="parallel { fsdp auto }")
    assert "no neighboring value to try" in why("on.finish")


def test_ticks_and_actions(why):
    text = why("every.0", every="every 20 steps eval code { batches = 2 }")
    assert (
        "every.0.every = 20 steps" in text and "with every.0.every = 40 steps ticks fire 5, 100, 4 → 2, 100, 4" in text
    )
    assert "every.0.actions.0.batches 2 text" in text
    inner = why("every.0.actions.0.batches", every="every 20 steps eval code { batches = 2 }")
    assert "tick.eval.code rows 8 → 16" in inner
    data = why("dataset.code.holdout")
    assert "with dataset.code.holdout = 2% setup.data.code holdout 0.01 → 0.02" in data


def test_prefixes_are_listed(why):
    text = why("model")
    assert text.startswith("model.family = llama") and re.search(r"model \d+ settings more model.dim 64 text", text)
    assert "parallel.cp.fold all default" in why("parallel")


@pytest.mark.parametrize(("name", "meant"), [
    ("lr", "optimizer.lr"),
    ("tp", "parallel.tp"),
    ("modl.dim", "model.dim"),
    ("optimizer.learning_rate", "optimizer.lr"),
    ("holdout", "dataset.code.holdout"),
])  # fmt: skip
def test_a_value_that_is_not_there(why, name, meant):
    with pytest.raises(NoSuchValue, match=re.escape(f"did you mean `{meant}`?")):
        why(name)
    with pytest.raises(NoSuchValue, match="--part values` lists them"):
        why("zzzzzzzzz")


def test_a_plan_without_its_spec(make_plan):
    text = words(show_why(make_plan(), None, "optimizer.lr"))
    assert "optimizer.lr = 0.001" in text and "needs the spec" in text


def test_every_value_can_be_asked_for(load, make_plan):
    """And every setting has a place in the spec, where another value can be put."""
    blocks = {"every": "every 10 steps eval code then checkpoint", "parallel": "parallel { tp 2, cp 2 }"}
    spec, plan = load(**blocks), make_plan(**blocks)
    asked = [entry.path for entry in plan.provenance]
    assert len(asked) > 90
    missing = {path for path in asked if find_slot(spec, path) is None}
    assert missing == {
        "world_size", "steps", "tokens_per_step", "every.log", "on.finish", "on.sigterm", "on.sigint", "on.sigusr1",
        "on.nan",
    } - ({"steps"} - set(asked))  # fmt: skip
    for path in asked:
        slot = find_slot(spec, path)
        if slot is None:
            continue
        assert slot.doc, path
        for value in neighbours(slot):
            other = replaced(spec, path, value)
            assert other != spec and find_slot(other, path).value == value
            assert replaced(other, path, slot.value) == spec


@pytest.mark.parametrize("axis", ["pp", "fsdp", "tp", "ep", "cp"])
def test_the_neighbours_of_an_axis_of_one_rank_are_larger(axis, load):
    slot = find_slot(load(), f"parallel.{axis}.size")
    assert slot is not None and list(neighbours(slot, "1")) == [2]


def test_equal_plans_have_no_changes(make_plan):
    plan = make_plan()
    assert not node_changes(plan, make_plan()) and not changed_figures(plan, make_plan())
    other = make_plan(optimizer="optimizer adamw { lr = 1e-3, clip = none }")
    changed = {change.id: (change.before is None, change.after is None) for change in node_changes(plan, other)}
    assert changed == {"step.clip": (False, True), "step.gradient_norm": (True, False)}
    assert not changed_figures(plan, other)


MIXED = {
    "dataset": "dataset web { source = synthetic() }\ndataset code { source = python_stdlib() }",
    "mixture": "mixture { web = 3, code = 1 }\nphase late { from = 80%, mix = { web: 0 }, lr_scale = 0.5 }",
}


@pytest.mark.parametrize(("name", "expected"), [
    ("mixture.web", ("mixture.web = 3", "phase train web 75%, code 25% from step 1 → web 85.7%, code 14.3%")),
    ("mixture.temperature", ("pass data.weights web 75.0%, code 25.0%", "→ web 63.4%, code 36.6% from step 1")),
    ("phase.late.from", ("from = 80%", "late begins at 80%, with step 81 of 100", "experiment different")),
    ("phase.late.mix", ("phase.late.mix = { web: 0.0 }", "→ web 50%, code 50%, learning rate × 0.5 from step 81")),
    ("phase.late.lr_scale", ("learning rate × 0.5 from step 81 → code 100% from step 81",)),
    ("batch.prefetch", ("steps to read ahead", "setup.loader prefetch 2 → 4", "experiment the same")),
    ("dataset.web.source", ("where the documents come from", "synthetic")),
])  # fmt: skip
def test_shares_and_phases_have_reasons_too(why, name, expected):
    text = why(name, **MIXED)
    for each in expected:
        assert each in text
