"""The graph of a plan: which nodes there are, in which order, and that it can be executed."""

from itertools import pairwise

import networkx
import pytest

from xtrain.planner.builder import GraphError, check_graph
from xtrain.planner.plan import Edge, Node

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"


def ids(plan, kind):
    return [node.id for node in plan.of_kind(kind)]


def parallel_nodes(plan):
    return [node.id.removeprefix("setup.parallel.") for node in plan.nodes if node.id.startswith("setup.parallel.")]


def test_one_rank_in_one_format_has_nothing_parallel(plan):
    assert parallel_nodes(plan()) == []


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({"parallel": "parallel { fsdp 2 }"}, ["fsdp", "root_fsdp"]),
        ({"parallel": "parallel { fsdp 1 { replicate = 2 } }"}, ["fsdp", "root_fsdp"]),
        ({"precision": "precision { compute = bf16 }"}, ["fsdp", "root_fsdp"]),
        ({"precision": "precision { params = bf16 }"}, []),
        ({"parallel": "parallel { tp 2 }"}, ["tp"]),
        ({"parallel": "parallel { cp 2 }"}, ["fsdp", "root_fsdp"]),
        ({"parallel": "parallel { cp 2 { fold = none } }"}, []),
        ({"parallel": "parallel { pp 2 }"}, ["pp"]),
        ({"model": MOE}, []),
        ({"model": MOE, "parallel": "parallel { fsdp 2 }"}, ["expert_fsdp", "fsdp", "root_fsdp"]),
        ({"model": MOE, "parallel": "parallel { fsdp 2, ep 2 }"}, ["ep", "fsdp", "root_fsdp"]),
        (
            {"model": MOE, "parallel": "parallel { fsdp 2, ep 2, tp 2, pp 2 }"},
            ["tp", "ep", "expert_fsdp", "fsdp", "root_fsdp", "pp"],
        ),
    ],
)
def test_only_what_is_used_has_a_node(plan, blocks, expected):
    assert parallel_nodes(plan(**blocks)) == expected


def test_setup_follows_the_architecture(plan):
    made = plan(model=MOE, parallel="parallel { fsdp 2, ep 2, tp 2, pp 2 }")
    order = [
        "setup.bootstrap",
        "setup.build_model",
        "setup.parallel.tp",
        "setup.parallel.ep",
        "setup.parallel.expert_fsdp",
        "setup.parallel.fsdp",
        "setup.parallel.root_fsdp",
        "setup.parallel.pp",
        "setup.weights",
        "setup.optimizer",
        "setup.scheduler",
        "setup.resume",
        "step.fetch",
    ]
    graph = networkx.DiGraph([(edge.before, edge.after) for edge in made.edges])
    for before, after in pairwise(order):
        assert networkx.has_path(graph, before, after), (before, after)
    for before in ("setup.tokenizer", "setup.data.code", "collate.pack", "setup.loader", "setup.observe"):
        assert networkx.has_path(graph, before, "setup.resume")
    assert networkx.is_directed_acyclic_graph(graph)


def test_the_step_in_its_order(plan):
    expected = [
        "step.fetch",
        "step.agree",
        "step.zero_gradients",
        "step.forward_backward",
        "step.clip",
        "step.check_finite",
        "step.schedule",
        "step.optimizer",
        "step.measure",
    ]
    assert ids(plan(), "step") == expected
    unclipped = ids(plan(optimizer="optimizer adamw { lr = 1e-3, clip = none }"), "step")
    assert "step.gradient_norm" in unclipped and "step.clip" not in unclipped


@pytest.mark.parametrize(
    ("fold", "axes"),
    [("all", None), ("ring_only", ["ulysses"]), ("ulysses_only", ["ring"]), ("none", ["ring", "ulysses"])],
)
def test_gradients_are_summed_over_context_ranks_that_fsdp_does_not_cover(plan, fold, axes):
    made = plan(parallel=f"parallel {{ cp 4 {{ ring = 2, ulysses = 2, fold = {fold} }} }}")
    steps = ids(made, "step")
    if axes is None:
        assert "step.context_grad_sync" not in steps
        return
    assert made.node("step.context_grad_sync").args == {"axes": axes}
    assert steps.index("step.forward_backward") + 1 == steps.index("step.context_grad_sync")


def test_data_of_evaluations_is_prepared_too(plan):
    made = plan(
        dataset="dataset code { source = python_stdlib() }\n"
        "dataset other { source = python_stdlib(), holdout = 100% }\n"
        'dataset idle { source = text("a"), holdout = 100% }',
        every="every 10 steps eval other",
    )
    data = [node.id for node in made.nodes if node.op == "setup.data"]
    assert data == ["setup.data.code", "setup.data.other"]
    assert Edge(before="setup.data.other", after="tick.eval.other", data="held-out rows") in made.edges
    assert made.node("setup.loader").args["dataset"] == "code"


def test_rules_say_how_many_modules_they_match(plan):
    made = plan(parallel="parallel { fsdp 2, tp 2 }")
    assert made.node("setup.parallel.fsdp").args["matches"] == 4
    assert made.node("setup.parallel.tp").args["matches"] == 4 * 7 + 2


def test_fsdp_says_what_it_does_with_numbers(plan):
    made = plan(parallel="parallel { fsdp 2 { reduce = fp64 } }")
    does = made.node("setup.parallel.fsdp").does
    assert "4 blocks over fsdp=2" in does and "→" in does and "summed in fp64" in does
    assert made.node("setup.parallel.fsdp").axes == ("fsdp",)


def test_arguments_of_bootstrap(plan):
    args = plan(launch="launch { device = cpu, threads = 2, stop_deadline = 2 min }").node("setup.bootstrap").args
    assert args["axes"] == [[name, 1] for name in ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")]
    assert (args["device"], args["threads"], args["stop_deadline_seconds"]) == ("cpu", 2, 120)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("auto", {"cpu": "documents", "cuda": "flex"}), ("mask", {"cpu": "mask", "cuda": "mask"})],
)
def test_attention_kernel_by_device(plan, kernel, expected):
    made = plan(model=f"model llama {{ dim = 64, layers = 2, heads = 4, attention = {kernel} }}")
    assert made.node("setup.build_model").args["attention"] == expected


def node(name):
    return Node(id=name, kind="setup", op=name)


def edge(before, after):
    return Edge(before=before, after=after)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (("a", "a"), (), "same id"),
        (("a", "b"), (("a", "c"), ("a", "b")), "not there"),
        (("a", "b", "c"), (("a", "b"), ("b", "c"), ("c", "b")), "circle"),
        (("a", "b", "c"), (("a", "b"),), "nothing leads from a to c"),
    ],
)
def test_a_graph_that_cannot_be_executed_is_refused(nodes, edges, message):
    with pytest.raises(GraphError, match=message):
        check_graph(tuple(map(node, nodes)), tuple(edge(*pair) for pair in edges), "a")
