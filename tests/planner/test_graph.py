"""The graph of a plan: which nodes there are, in which order, and that it can be executed."""

from itertools import pairwise

import networkx
import pytest

from xtrain.plan.graph import GraphError, check_graph
from xtrain.plan.hardware import FLASH, kernel_on
from xtrain.plan.plan import Edge, Node
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.base import packages
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.packages import package_faults
from xtrain.runtime.loop.preflight import check_device

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"
TIED = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, tie_embeddings = true }"


def ids(plan, kind):
    return [node.id for node in plan.of_kind(kind)]


def parallel_nodes(plan):
    return [node.id.removeprefix("setup.parallel.") for node in plan.nodes if node.id.startswith("setup.parallel.")]


def test_one_rank_in_one_format_has_nothing_parallel(make_plan):
    assert parallel_nodes(make_plan()) == []


@pytest.mark.parametrize(("blocks", "expected"), [
    ({"parallel": "parallel { fsdp 2 }"}, ["fsdp", "root_fsdp"]),
    ({"parallel": "parallel { fsdp 2 { prefetch = true } }"}, ["fsdp", "root_fsdp", "prefetch"]),
    ({"model": MOE, "parallel": "parallel { fsdp 2 { prefetch = false } }"}, ["expert_fsdp", "fsdp", "root_fsdp"]),
    ({"parallel": "parallel { fsdp 1 { replicate = 2 } }"}, ["fsdp", "root_fsdp"]),
    ({"precision": "precision { compute = bf16 }"}, ["fsdp", "root_fsdp"]),
    ({"precision": "precision { params = bf16 }"}, []),
    ({"parallel": "parallel { tp 2 }"}, ["tp"]),
    ({"parallel": "parallel { cp 2 }"}, ["cp", "fsdp", "root_fsdp"]),
    ({"parallel": "parallel { cp 2 { fold = none } }"}, ["cp"]),
    ({"parallel": "parallel { pp 2 }"}, ["pp"]),
    ({"parallel": "parallel { stack = ddp, fsdp auto { replicate = 2 } }"}, ["ddp"]),
    ({"parallel": "parallel { fsdp 1 { offload = true } }"}, ["fsdp", "root_fsdp"]),
    # Experts are not cut by tp, so its ranks share their state; what is around them are units as well.
    ({"model": MOE, "parallel": "parallel { tp 2 }"}, ["tp", "expert_fsdp", "fsdp", "root_fsdp", "prefetch"]),
    ({"model": MOE}, []),
    ({"model": MOE, "parallel": "parallel { fsdp 2 }"}, ["expert_fsdp", "fsdp", "root_fsdp", "prefetch"]),
    ({"model": MOE, "parallel": "parallel { fsdp 2, ep 2 }"}, ["ep", "fsdp", "root_fsdp", "prefetch"]),
    ({"model": MOE, "parallel": "parallel { fsdp 2, ep 2, tp 2, pp 2 }"},
        ["tp", "ep", "expert_fsdp", "fsdp", "root_fsdp", "prefetch", "pp"]),
])  # fmt: skip
def test_only_what_is_used_has_a_node(make_plan, blocks, expected):
    assert parallel_nodes(make_plan(**blocks)) == expected


def test_setup_follows_the_architecture(make_plan):
    plan = make_plan(model=MOE, parallel="parallel { fsdp 2, ep 2, tp 2, pp 2 }")
    order = [
        "setup.bootstrap", "setup.mesh", "setup.build_model", "setup.parallel.tp", "setup.parallel.ep",
        "setup.parallel.expert_fsdp", "setup.parallel.fsdp", "setup.parallel.root_fsdp", "setup.parallel.pp",
        "setup.weights", "setup.optimizer", "setup.scheduler", "setup.resume", "step.fetch",
    ]  # fmt: skip
    graph = networkx.DiGraph([(edge.before, edge.after) for edge in plan.edges])
    for before, after in pairwise(order):
        assert networkx.has_path(graph, before, after), (before, after)
    for before in ("setup.tokenizer", "setup.data.code", "collate.pack", "setup.loader", "setup.observe"):
        assert networkx.has_path(graph, before, "setup.resume")
    assert networkx.is_directed_acyclic_graph(graph)


def test_the_step_in_its_order(make_plan):
    expected = [
        "step.fetch", "step.agree", "step.zero_gradients", "step.forward_backward", "step.clip", "step.check_finite",
        "step.schedule", "step.optimizer", "step.measure",
    ]  # fmt: skip
    assert ids(make_plan(), "step") == expected
    unclipped = ids(make_plan(optimizer="optimizer adamw { lr = 1e-3, clip = none }"), "step")
    assert "step.gradient_norm" in unclipped and "step.clip" not in unclipped


@pytest.mark.parametrize(
    ("fold", "axes"),
    [("all", None), ("ring_only", ["ulysses"]), ("ulysses_only", ["ring"]), ("none", ["ring", "ulysses"])],
)
def test_gradients_are_summed_over_context_ranks_that_fsdp_does_not_cover(make_plan, fold, axes):
    plan = make_plan(parallel=f"parallel {{ cp 4 {{ ring = 2, ulysses = 2, fold = {fold} }} }}")
    steps = ids(plan, "step")
    if axes is None:
        assert "step.context_grad_sync" not in steps
        return
    assert plan.node("step.context_grad_sync").args == {"axes": axes}
    assert steps.index("step.forward_backward") + 1 == steps.index("step.context_grad_sync")


def test_data_of_evaluations_is_prepared_too(make_plan):
    plan = make_plan(
        dataset="dataset code { source = python_stdlib() }\n"
        "dataset other { source = python_stdlib(), holdout = 100% }\n"
        'dataset idle { source = text("a"), holdout = 100% }',
        every="every 10 steps eval other",
    )
    data = [node.id for node in plan.nodes if node.op == "setup.data"]
    assert data == ["setup.data.code", "setup.data.other"]
    assert Edge(before="setup.data.other", after="tick.eval.other", data="held-out rows") in plan.edges
    assert plan.node("setup.loader").args["datasets"] == ["code"]


def test_rules_say_how_many_modules_they_match(make_plan):
    """A number for each pipeline coordinate: of blocks there, or of modules that own a matrix."""
    plan = make_plan(parallel="parallel { fsdp 2, tp 2 }")
    assert plan.node("setup.parallel.fsdp").args["matches"] == [4]
    rules = {rule["pattern"]: rule for rule in plan.node("setup.parallel.tp").args["rules"]}
    assert len(rules) == 9 and sum(sum(rule["matches"]) for rule in rules.values()) == 4 * 7 + 2
    assert rules["layers.*.mlp.down_proj"] == {"pattern": "layers.*.mlp.down_proj", "style": "row", "matches": [4]}
    assert {name: rules[name]["style"] for name in ("embed_tokens", "lm_head")} == {
        "embed_tokens": "embedding",
        "lm_head": "column",
    }


def test_rules_of_a_pipeline(make_plan):
    plan = make_plan(parallel="parallel { pp 3, tp 2, fsdp 2 }", model=TIED.replace("layers = 4", "layers = 5"))
    assert plan.node("setup.build_model").args["stages"] == [[0, 1], [2, 3], [4, 4]]
    assert plan.node("setup.build_model").args["owners"] == [[0], [1], [2]]
    assert plan.node("setup.parallel.fsdp").args["matches"] == [2, 2, 1]
    rules = {rule["pattern"]: rule["matches"] for rule in plan.node("setup.parallel.tp").args["rules"]}
    assert rules["layers.*.self_attn.q_proj"] == [2, 2, 1]
    assert rules["embed_tokens"] == [1, 0, 1] and "lm_head" not in rules
    loose = make_plan(parallel="parallel { pp 2, tp 2 }")
    rules = {rule["pattern"]: rule["matches"] for rule in loose.node("setup.parallel.tp").args["rules"]}
    assert (rules["embed_tokens"], rules["lm_head"]) == ([1, 0], [0, 1])


def test_the_mesh_has_a_node_of_its_own(make_plan):
    plan = make_plan(model=MOE, parallel="parallel { fsdp 2, cp 2 { ring = 2, fold = ring_only }, tp 2, ep 4 }")
    node = plan.node("setup.mesh")
    assert node.args == {
        "axes": [["pp", 1], ["replicate", 1], ["fsdp", 2], ["ring", 2], ["ulysses", 1], ["tp", 2]],
        "expert_axes": [["pp", 1], ["ep_replicate", 1], ["ep_fsdp", 2], ["ep", 4]],
        "shard_axes": ["fsdp", "ring"],
    }
    assert Edge(before="setup.mesh", after="setup.build_model", data="meshes") in plan.edges
    assert make_plan().node("setup.mesh").args["shard_axes"] == ["fsdp"]
    assert make_plan(4, parallel="parallel { stack = ddp }").node("setup.mesh").args["axes"][1:3] == [
        ["replicate", 4],
        ["fsdp", 1],
    ]


def test_arguments_of_experts(make_plan):
    plan = make_plan(model=MOE, parallel="parallel { fsdp 4, ep 2 }", batch="batch { sequence = 256, accumulate = 4 }")
    assert plan.node("setup.build_model").args["rows"] == 16
    assert "rows" not in make_plan().node("setup.build_model").args
    assert plan.node("setup.parallel.ep").args == {"size": 2, "pattern": "layers.*.mlp.experts", "matches": [4]}
    assert plan.node("setup.parallel.expert_fsdp").args == {
        "pattern": "layers.*.mlp.experts",
        "matches": [4],
        "dimension": 1,
        "compute": "fp32",
        "reduce": "fp32",
        "reshard": True,
        "offload": False,
    }


def test_policies_of_fsdp(make_plan):
    plan = make_plan(
        parallel="parallel { fsdp 2 { offload = true, reduce = fp64 } }", precision="precision { compute = bf16 }"
    )
    policy = {"compute": "bf16", "reduce": "fp64", "reshard": True, "offload": True}
    assert plan.node("setup.parallel.fsdp").args == {"pattern": "layers.*", "matches": [4], **policy}
    # The root lets go of nothing: its backward follows its forward at once.
    assert plan.node("setup.parallel.root_fsdp").args == {**policy, "reshard": False}
    piped = make_plan(parallel="parallel { pp 2, fsdp 2 }")
    assert piped.node("setup.parallel.fsdp").args["reshard"] is False
    asked = make_plan(parallel="parallel { pp 2, fsdp 2 { reshard = true } }")
    assert asked.node("setup.parallel.fsdp").args["reshard"] is True


def test_recomputation(make_plan):
    """Of five blocks every second one: 1 and 3."""
    model = MOE.replace("layers = 4", "layers = 5, head_dim = 16")
    chosen = "activation selective { every = 2 }"
    plan = make_plan(model=model, activation=chosen, parallel="parallel { fsdp 2, ep 2 }")
    assert plan.node("setup.activation").args == {
        "mode": "selective",
        "every": 2,
        "save": ["matmul", "all_to_all"],
        "pattern": "layers.*",
        "matches": [2],
    }
    assert plan.node("setup.routing_replay").args == {"matches": [2]}
    on_cpu = make_plan(activation="activation selective", launch="launch { device = cpu }")
    assert on_cpu.node("setup.activation").args["save"] == ["matmul", "attention"]
    compiled = make_plan(activation="activation selective", compile="compile { mode = default }")
    assert compiled.node("setup.activation").args["save"] == ["matmul", "attention"]
    tensor = {"parallel": "parallel { tp 2, fsdp 2 }", "launch": "launch { device = cpu }"}
    cut = make_plan(activation="activation selective", **tensor)
    assert cut.node("setup.activation").args["save"] == ["matmul", "attention", "reduce_scatter"]
    fewer = make_plan(activation="activation selective { save = [matmul, attention] }", **tensor)
    sums = [
        next(t.count for t in plan.estimates.classes[0].traffic if (t.axis, t.op) == ("tp", "reduce_scatter"))
        for plan in (cut, fewer)
    ]
    layers = cut.architecture.layers
    assert sums[1] - sums[0] == layers * cut.node("setup.loader").args["accumulate"]  # one more in each second run
    whole = make_plan(model=model, activation="activation full")
    assert whole.node("setup.activation").args["save"] == [] and whole.node("setup.activation").args["matches"] == [5]
    assert "setup.routing_replay" not in ids(whole, "setup")  # nothing travels, so nothing can travel elsewhere
    two = make_plan(model=model, activation=chosen, parallel="parallel { pp 2 }").node("setup.activation").args
    assert two["matches"] == [1, 1] and two["save"] == ["matmul"]


def test_blocks_without_experts_have_no_routing_to_repeat(make_plan):
    """Blocks 1 and 3 are computed again, and block 2 alone has experts."""
    model = """model qwen3_moe { dim = 64, layers = 4, heads = 4, ffn = 64, experts = 4, experts_per_token = 2,
        expert_ffn = 16, expert_every = 3 }"""
    activation = "activation full { every = 2 }"
    plan = make_plan(model=model, parallel="parallel { fsdp 2, ep 2 }", activation=activation)
    assert plan.node("setup.activation").args["matches"] == [2]
    assert "setup.routing_replay" not in ids(plan, "setup")


def test_feed_forward_layers_in_pieces(make_plan):
    """Of 256 positions a rank has 128, in pieces of at most 64, as wide as the model."""
    model = """model qwen3_moe { dim = 64, layers = 4, heads = 4, ffn = 64, experts = 4, experts_per_token = 2,
        expert_ffn = 16, expert_every = 3 }"""
    rows = {"model": model, "batch": "batch { sequence = 256 }", "parallel": "parallel { cp 2 { ring = 2 } }"}
    plan = make_plan(**rows, activation="activation { tile_mlp = auto }")
    node = plan.node("setup.tile_mlp")
    assert node.args == {"positions": 64, "pattern": "layers.*", "matches": [3]}
    assert node.does.startswith("compute the feed-forward layers of 3 blocks in 2 pieces of 64 positions")
    (pieces,) = [each for each in plan.provenance if each.path == "activation.tile_mlp"]
    assert pieces.value == "2" and "dim 64" in pieces.how
    assert make_plan(**rows, activation="activation { tile_mlp = 5 }").node("setup.tile_mlp").args["positions"] == 26
    # Every piece is computed a second time, and not a third time where the block is.
    work = plan.estimates.classes[0]
    plain, full, both = (
        make_plan(**rows, activation=f"activation {text}").estimates.classes[0]
        for text in ("none", "full", "full { tile_mlp = auto }")
    )
    layer = 2 * 3 * 64 * 64 * 128 * 3
    assert plain.flops == work.flops and work.hardware_flops == plain.hardware_flops + layer
    assert both.hardware_flops == full.hardware_flops
    (reason,) = resumable(make_plan(**rows), plan).reasons
    assert (reason.path, reason.effect) == ("activation.tile_mlp", "rounding")


def test_compilation(make_plan):
    node = {"mode": "default", "pattern": "layers.*", "matches": [4]}
    assert make_plan(compile="compile").node("setup.compile").args == {**node, "cuda": ["loss"]}
    cpu = make_plan(compile="compile", launch="launch { device = cpu }").node("setup.compile")
    assert cpu.args == node and "on cuda" not in cpu.does
    experts = make_plan(compile="compile", model=MOE, parallel="parallel { tp 2 }").node("setup.compile")
    assert experts.args["cuda"] == ["experts"] and "sum of experts" in experts.does  # logits are cut over tp
    tuned = make_plan(compile="compile { mode = max_autotune }").node("setup.compile").args["mode"]
    assert tuned == "max-autotune-no-cudagraphs"
    assert "setup.compile" not in ids(make_plan(), "setup")


def test_packing(make_plan):
    chain = "collate = to_tensor -> flatten -> shift_tokens -> "
    plan = make_plan(2, collate=f"{chain}pack(best_fit)", parallel="parallel { fsdp 2 }")
    packed = {"method": "best_fit", "group": 100_000}
    assert plan.node("collate.pack").args == {"capacity": 256, "align": 1, **packed}
    assert packed.items() <= plan.node("setup.data.code").args.items()
    assert plan.node("setup.loader").args["balance"] is True
    how = {entry.path: (entry.value, entry.origin) for entry in plan.provenance}
    assert how["collate.pack.group"] == ("100000", "derived")
    smaller = make_plan(collate=f"{chain}pack(multipack, group = 5k)")
    assert smaller.node("setup.data.code").args["group"] == 5000
    assert "balance" not in smaller.node("setup.loader").args
    in_order = make_plan()
    assert not {"method", "group"} & in_order.node("setup.data.code").args.keys()


def test_context_parallel(make_plan):
    plan = make_plan(parallel="parallel { cp 4 { ring = 2, ulysses = 2 } }")
    assert plan.node("setup.parallel.cp").args == {"ring": 2, "ulysses": 2, "matches": [4]}
    assert plan.node("collate.pack").args == {"method": "sequential", "capacity": 256, "align": 4}
    assert plan.node("setup.data.code").args["align"] == 4
    assert plan.node("collate.shard").args == {"ring": 2, "ulysses": 2}
    chain = [node.id for node in plan.of_kind("collate")]
    assert chain[-3:] == ["collate.pack", "collate.shard", "collate.microbatches"]
    ulysses = make_plan(parallel="parallel { cp 2 }")  # which cuts rows, not documents
    assert ulysses.node("collate.pack").args["align"] == 1
    written = make_plan(collate="collate = to_tensor -> flatten -> shift_tokens -> pack(align = 8) -> shard")
    assert "collate.shard" not in ids(written, "collate") and written.node("collate.pack").args["align"] == 8


def test_pipelines_in_the_step(make_plan):
    plan = make_plan(parallel="parallel { pp 4, fsdp 2 }", model=TIED)
    assert plan.node("setup.parallel.pp").args == {"size": 4, "schedule": "1f1b", "stages_per_rank": 1}
    assert plan.node("setup.schedule_cache").args == {"counts": [4]}
    assert Edge(before="setup.schedule_cache", after="setup.resume", data="") in plan.edges
    assert plan.node("step.fetch").args == {"readers": [0, 3]}
    assert plan.node("step.forward_backward").op == "step.pipeline"
    assert ids(plan, "step")[:6] == [
        "step.fetch", "step.share_outline", "step.agree", "step.zero_gradients", "step.forward_backward",
        "step.tied_grad_sync",
    ]  # fmt: skip
    # 3 / (4 + 3) = 43 % where all ranks cost the same; the busiest one, which has the head, waits less.
    assert "bubble 38%" in plan.node("step.forward_backward").does
    both = make_plan(parallel="parallel { pp 2 }")
    assert both.node("step.fetch").args == {"readers": [0, 1]} and "step.share_outline" not in ids(both, "step")
    there_and_back = make_plan(parallel="parallel { pp 2 { schedule = zbv } }")
    assert there_and_back.node("setup.build_model").args["owners"] == [[0, 3], [1, 2]]
    assert there_and_back.node("step.fetch").args == {"readers": [0]}
    assert there_and_back.node("step.share_outline").args == {"source": 0}


def test_gradients_of_what_tp_does_not_cut_are_summed_where_fsdp_does_not(make_plan):
    plan = make_plan(parallel="parallel { tp 2, cp 2 { fold = none } }")
    steps = ids(plan, "step")
    at = steps.index("step.forward_backward")
    assert steps[at + 1 : at + 3] == ["step.tensor_grad_sync", "step.context_grad_sync"]
    assert plan.node("step.tensor_grad_sync").args == {"axes": ["tp"]}
    assert "step.tensor_grad_sync" not in ids(make_plan(parallel="parallel { tp 2, fsdp 2 }"), "step")


def test_biases_of_routers(make_plan):
    model = MOE.replace("}", ", router { bias_speed = 0.001, score = sigmoid, normalise = false } }")
    plan = make_plan(model=model)
    steps = ids(plan, "step")
    assert steps[steps.index("step.optimizer") + 1] == "step.router_bias"
    assert plan.node("step.router_bias").args == {"speed": 0.001}
    arch = plan.architecture
    assert (arch.router_score, arch.router_normalise, arch.router_bias_speed) == ("sigmoid", False, 0.001)
    assert "step.router_bias" not in ids(make_plan(model=MOE), "step")


def test_a_rule_that_matches_nothing_is_a_mistake_of_the_planner(make_plan, monkeypatch):
    from xtrain.plan.resolved import Resolved

    monkeypatch.setattr(Resolved, "recomputed", property(lambda run: [0]))
    with pytest.raises(GraphError, match=r"`layers\.\*` of setup.activation matches nothing"):
        make_plan(activation="activation full")


def test_fsdp_says_what_it_does_with_numbers(make_plan):
    plan = make_plan(parallel="parallel { fsdp 2 { reduce = fp64 } }")
    does = plan.node("setup.parallel.fsdp").does
    assert "4 blocks over fsdp=2" in does and "→" in does and "summed in fp64" in does
    assert plan.node("setup.parallel.fsdp").axes == ("fsdp",)


def test_arguments_of_bootstrap(make_plan):
    args = make_plan(launch="launch { device = cpu, threads = 2, stop_deadline = 2 min }").node("setup.bootstrap").args
    assert args["axes"] == [[name, 1] for name in ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")]
    assert (args["device"], args["threads"], args["stop_deadline_seconds"]) == ("cpu", 2, 120)


# 4 Mi multiply-adds, from which products are not small, are 256 positions of a matrix of 64 by 256.
WIDE = {"model": "model llama { dim = 64, layers = 2, heads = 4, ffn = 256 }"}
NARROW = {"model": "model llama { dim = 64, layers = 2, heads = 4, ffn = 252 }"}
# 64 Mi multiply-adds, from which a head's product is not small, are 128 positions of a head of 64 by 8,192.
HEAD = "model llama { dim = 64, layers = 2, heads = 4, ffn = 256, vocab = 8192 }"
EXPERTS = "model mixtral {{ dim = 64, layers = 2, heads = 4, experts = 4, experts_per_token = {} }}"


@pytest.mark.parametrize(("blocks", "positions", "small"), [
    (WIDE, 256, False),
    (WIDE, 255, True),
    (NARROW, 256, True),
    (NARROW, 512, False),
    ({**WIDE, "launch": "launch { device = cpu }"}, 255, True),
    ({**WIDE, "launch": "launch { device = cuda }"}, 255, False),
    ({**WIDE, "precision": "precision { matmul = medium }"}, 255, False),
    ({**WIDE, "precision": "precision { compute = bf16 }"}, 255, False),
    ({**WIDE, "parallel": "parallel { tp 2 }"}, 510, True),  # each rank has half of the matrix
    ({**WIDE, "parallel": "parallel { tp 2 }"}, 512, False),
    ({**WIDE, "parallel": "parallel { cp 2 { ulysses = 2 } }"}, 510, True),  # each rank has half of the positions
    ({"model": HEAD}, 127, True),
    ({"model": HEAD}, 128, False),
    ({"model": HEAD, "parallel": "parallel { tp 2 }"}, 254, True),  # each rank has half of the head
    ({"model": HEAD, "parallel": "parallel { tp 2 }"}, 256, False),
    ({"model": EXPERTS.format("2, expert_ffn = 256")}, 511, True),  # each expert gets half of them
    ({"model": EXPERTS.format("2, expert_ffn = 256")}, 512, False),
    ({"model": EXPERTS.format("1, expert_ffn = 256")}, 1023, True),
])  # fmt: skip
def test_small_fp32_products_keep_their_highest_precision(make_plan, blocks, positions, small):
    plan = make_plan(**blocks, batch=f"batch {{ sequence = {positions}, micro = 1 }}")
    node = plan.node("setup.bootstrap")
    assert node.args.get("small_products", False) == small
    assert ("fp32 ones are computed as `highest`" in node.does) == small
    chosen = next(each for each in plan.provenance if each.path == "precision.matmul")
    assert (chosen.value == "highest") == ("fewer than 4,194,304" in chosen.how) == small


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("auto", {"cpu": "blocks", "cpu, highest": "documents", "cuda": "flex"}),
        ("mask", {"cpu": "mask", "cuda": "mask"})],
)  # fmt: skip
def test_attention_kernel_by_device(make_plan, kernel, expected):
    model = f"model llama {{ dim = 64, layers = 2, heads = 4, attention = {kernel} }}"
    plan = make_plan(model=model, batch="batch { sequence = 256, micro = 2 }")
    assert plan.node("setup.build_model").args["attention"] == expected


@pytest.mark.parametrize(("more", "kernel"), [
    ({"batch": "batch { sequence = 128, micro = 4 }"}, "blocks"),
    ({"batch": "batch { sequence = 512, micro = 2 }"}, "blocks"),
    ({"batch": "batch { sequence = 127, micro = 4 }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 1 }"}, "documents"),  # products are small
    ({"batch": "batch { sequence = 513, micro = 2 }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 2 }", "precision": "precision { compute = bf16 }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 2 }", "parallel": "parallel { cp 2 { ring = 2 } }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 4 }", "parallel": "parallel { cp 2 { ulysses = 2 } }"}, "blocks"),
    ({"batch": "batch { sequence = 256, micro = 2 }", "compile": "compile { mode = default }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 2 }", "precision": "precision { matmul = highest }"}, "documents"),
    ({"batch": "batch { sequence = 256, micro = 2 }", "precision": "precision { matmul = high }"}, "blocks"),
])  # fmt: skip
def test_short_rows_in_exact_formats_are_attended_to_in_blocks_on_a_cpu(make_plan, more, kernel):
    kernels = make_plan(**more).node("setup.build_model").args["attention"]
    assert kernels["cpu"] == kernel
    # what is in force decides where nobody has: products at their highest precision make blocks slow
    undecided = kernel == "blocks" and "matmul" not in more.get("precision", "")
    assert kernel_on("cpu", "highest", kernels) == ("documents" if undecided else kernel)
    assert kernel_on("cpu", "medium", kernels) == kernel


def test_heads_that_flex_has_no_kernel_for_are_attended_to_document_by_document(make_plan):
    for heads, width, kernel in ((4, 16, "flex"), (8, 8, "documents")):
        model = f"model llama {{ dim = 64, layers = 2, heads = {heads} }}"
        plan = make_plan(model=model, activation="activation selective", launch="launch { device = cuda }")
        assert plan.architecture.head_dim == width
        assert plan.node("setup.build_model").args["attention"]["cuda"] == kernel
        # what flex has computed cannot be kept, and what torch's own kernel has can
        assert ("attention" in plan.node("setup.activation").args["save"]) == (kernel == "documents")


@pytest.mark.parametrize(("blocks", "kernel"), [
    ({}, "cudnn"),
    ({"cluster": "cluster b200"}, "cudnn"),
    ({"cluster": "cluster a100"}, "flex"),
    ({"cluster": "cluster other { memory = 80 GiB, flops = 400T }"}, "flex"),
    ({"precision": "precision { params = fp32 }"}, "flex"),
    ({"model": "model llama { dim = 512, layers = 2, heads = 2 }"}, "flex"),  # heads 256 wide
    ({"parallel": "parallel { cp 2 { ring = 2 } }"}, "flex"),
    ({"launch": "launch { device = cpu }", "cluster": "cluster cpu { memory = 8 GiB, flops = 1T }"}, "flex"),
])  # fmt: skip
def test_rows_of_one_document_are_cudnns_where_it_is_faster(make_plan, blocks, kernel):
    given = {"cluster": "cluster h200", "precision": "precision { params = bf16 }",
             "model": "model llama { dim = 512, layers = 2, heads = 4 }"} | blocks  # fmt: skip
    built = make_plan(2, **given, batch="batch { sequence = 256, micro = 1, rows = 2 }").node("setup.build_model")
    assert built.args["attention"]["cuda"] == kernel
    assert ("is cuDNN's, of others flex" in built.does) == (kernel == "cudnn")


@pytest.mark.parametrize(("kernel", "title"), [("flash3", "FlashAttention 3"), ("flash4", "FlashAttention 4")])
def test_a_package_of_attention_is_named_in_the_plan_and_looked_for(make_plan, monkeypatch, kernel, title):
    model = f"model gemma3 {{ dim = 512, layers = 2, heads = 4, window = 64, attention = {kernel} }}"
    given = {"model": model, "cluster": "cluster h200", "precision": "precision { params = bf16 }"}
    plan = make_plan(**given, launch="launch { device = cuda }", activation="activation selective")
    built = plan.node("setup.build_model")
    assert built.args["attention"]["cuda"] == kernel and f"attention is {title}'s, of all documents" in built.does
    assert "attention" in plan.node("setup.activation").args["save"]  # torch has an operator of it, unlike of flex
    (fault,) = package_faults(plan)
    assert fault.code == "X715" and f"attention {kernel} needs {title}" in str(fault)
    monkeypatch.setattr(packages, "is_installed", lambda module: module == FLASH[kernel].module)
    assert not [*package_faults(plan)]
    with pytest.raises(EnvironmentFault, match=f"attention {kernel} needs cuda"):
        check_device(plan, "cpu")


def node(name):
    return Node(id=name, kind="setup", op=name)


def edge(before, after):
    return Edge(before=before, after=after)


@pytest.mark.parametrize(("nodes", "edges", "message"), [
    (("a", "a"), (), "same id"),
    (("a", "b"), (("a", "c"), ("a", "b")), "missing node"),
    (("a", "b", "c"), (("a", "b"), ("b", "c"), ("c", "b")), "cycle"),
    (("a", "b", "c"), (("a", "b"),), "nothing leads from a to c"),
])  # fmt: skip
def test_a_graph_that_cannot_be_executed_is_refused(nodes, edges, message):
    with pytest.raises(GraphError, match=message):
        check_graph(tuple(map(node, nodes)), tuple(edge(*pair) for pair in edges), "a")


def test_when_gradients_are_summed(make_plan):
    """Whole gradients are kept until the last microbatch only where that is cheap, or a pipeline wants it."""

    def sync(**blocks):
        plan = make_plan(**blocks)
        how = {entry.path: entry.how for entry in plan.provenance}.get("parallel.fsdp.sync", "")
        return plan.node("step.forward_backward").args.get("sync"), how

    large = "model llama { dim = 2Ki, layers = 8, heads = 8, kv_heads = 4, ffn = 8Ki, vocab = 32Ki }"
    two = "parallel { fsdp 2 }"
    assert sync(parallel=two) == ("step", "899 KiB of whole gradients are cheap to keep")
    assert sync(parallel=two, model=large)[0] == "microbatch"
    assert sync(parallel=two, model=large, batch="batch { sequence = 256 }") == ("step", "a step has one microbatch")
    assert sync(parallel="parallel { fsdp 2 { sync = step } }", model=large) == ("step", "")
    assert sync(parallel="parallel { pp 2, fsdp 2 }", model=large)[0] is None


def test_noise_on_embeddings_is_a_node_that_runs_without_it_lack(make_plan):
    from xtrain.planner.review.resumable import resumable

    plain = make_plan()
    noisy = make_plan(batch="batch { sequence = 256, accumulate = 4, neftune = 5 }")
    node = noisy.node("setup.embedding_noise")
    assert node.args == {"seed": noisy.seed, "most": 5 / (256 * noisy.architecture.dim) ** 0.5}
    assert "setup.embedding_noise" not in {each.id for each in plain.nodes}
    assert plain.config_id != noisy.config_id
    other = make_plan(batch="batch { sequence = 256, accumulate = 4, neftune = 2 }")
    assert "noise of another size" in " ".join(reason.text for reason in resumable(noisy, other).reasons)
    silent = make_plan(batch="batch { sequence = 256, accumulate = 4, neftune = 0 }")
    assert silent.config_id == make_plan(batch="batch { sequence = 256, accumulate = 4 }").config_id
