"""Nothing a plan can say is forgotten where checkpoints are judged, and values are sorted by what they are about."""

from pathlib import Path

import pytest
from attrs import evolve

from xtrain.plan.checkpoints import checkpoint_contents, mismatches, tensor_difference
from xtrain.plan.estimates import Memory, Traffic
from xtrain.plan.plan import Plan
from xtrain.plan.views import GROUPS, changed_values, group_of, recurring
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.diff import compare_plans, render_diff, to_json
from xtrain.planner.review.resumable import OUTSIDE, resumable, rules_of

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))
# Layouts and settings that bring in the nodes which the examples do not have.
MORE = {
    "everything of experts": {
        "model": "model qwen3_moe { dim = 64, layers = 8, heads = 8, kv_heads = 4, experts = 8, tie_embeddings = true\n"
        "  router { score = sigmoid, bias_speed = 1e-3 } }",
        "parallel": "parallel { tp 2, pp 2 { schedule = interleaved_1f1b }, cp 4 { ring = 2, fold = none }, ep 2, "
        "fsdp 2 { offload = true } }",
        "activation": "activation selective",
        "compile": "compile { mode = default }",
        "scheduler": "scheduler wsd { warmup = 5 steps }",
        "launch": "launch { device = cuda }",
    },
    "copies": {"parallel": "parallel { stack = ddp, fsdp auto { replicate = 2 } }"},
    "tp alone": {"parallel": "parallel { tp 2, fsdp 1 }", "optimizer": "optimizer adamw { lr = 1e-3, clip = none }"},
    "context not folded": {"parallel": "parallel { cp 2 { ulysses = 2, fold = none } }"},
}


def every_argument_has_a_row(plan: Plan) -> None:
    for node in plan.nodes:
        if not node.op.startswith(OUTSIDE):
            where = "declare above the function that adds the node what"
            rules = rules_of(node.op, node.args)
            assert rules is not None, f"{where} {node.op} means for a checkpoint"
            missing = node.args.keys() - rules.keys()
            assert not missing, f"{where} {missing} of {node.op} mean for a checkpoint"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_argument_of_the_examples_has_a_row(path):
    plan = plan_from_spec(path).plan
    assert plan is not None
    every_argument_has_a_row(plan)


@pytest.mark.parametrize("blocks", MORE.values(), ids=MORE.keys())
def test_every_argument_of_other_layouts_has_a_row(make_plan, blocks):
    every_argument_has_a_row(make_plan(**blocks))


def test_an_argument_without_a_row_makes_a_checkpoint_incompatible(make_plan):
    a = make_plan()
    nodes = tuple(evolve(n, args={**n.args, "new": 1}) if n.id == "step.clip" else n for n in a.nodes)
    verdict = resumable(a, evolve(a, nodes=nodes, id="other"))
    assert verdict.kind == "incompatible" and verdict.reasons[0].path == "step.clip.new"
    more = (*a.nodes, evolve(a.node("step.clip"), id="step.magic", op="step.magic"))
    assert resumable(a, evolve(a, nodes=more, id="other")).kind == "incompatible"


def test_another_optimizer_cannot_use_the_state(make_plan):
    a = make_plan()
    nodes = tuple(evolve(n, args={**n.args, "kind": "lion"}) if n.op == "setup.optimizer" else n for n in a.nodes)
    (reason,) = resumable(a, evolve(a, nodes=nodes, id="other")).reasons
    assert (reason.kind, reason.path) == ("incompatible", "optimizer.kind")


def test_an_old_checkpoint_is_not_blamed_for_what_it_does_not_say(make_plan):
    planned = checkpoint_contents(make_plan())
    assert mismatches(planned, planned) == []
    old = {"tensors": planned["tensors"], "loader": {**planned["loader"], "content": "abc", "step": 3}}
    assert mismatches(old, planned) == []
    gone = dict(list(planned["tensors"].items())[1:])
    (found,) = mismatches({**old, "tensors": gone}, planned)
    assert "embed_tokens.weight is not in the checkpoint" in str(found)


def test_differences_of_tensors_name_two_of_each_kind():
    saved = {"a": [2, 3], "b": [4], "gone 1": [1], "gone 2": [1], "gone 3": [1]}
    planned = {"a": [2, 4], "b": [5], "new": [1]}
    words = tensor_difference(saved, planned)
    assert words == (
        "new is not in the checkpoint; gone 1, gone 2 and 1 more are in the checkpoint only; "
        "a is 2 × 3 there and 2 × 4 here, and 1 more differs"
    )


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_value_belongs_to_a_group(path):
    plan = plan_from_spec(path).plan
    assert plan is not None
    absent = {"budget", "cadence"} if plan.serves else set()
    assert {group_of(entry.path) for entry in plan.provenance} == set(GROUPS) - absent


@pytest.mark.parametrize(("path", "group"), [
    ("optimizer.lr", "experiment"),
    ("model.router.aux_loss", "experiment"),
    ("dataset.web.holdout", "experiment"),
    ("mixture.web", "experiment"),
    ("mixture.temperature", "experiment"),
    ("phase.late.from", "experiment"),
    ("phase.late.mix", "experiment"),
    ("batch.prefetch", "execution"),
    ("batch.workers", "execution"),
    ("tokenizer", "experiment"),
    ("collate.pack.align", "experiment"),
    ("experiment.budget", "budget"),
    ("steps", "budget"),
    ("checkpoint.keep", "cadence"),
    ("every eval code", "cadence"),
    ("parallel.fsdp.size", "mesh"),
    ("batch.micro", "mesh"),
    ("world_size", "mesh"),
    ("activation.mode", "execution"),
    ("loss.chunk", "execution"),
    ("workspace.root", "paths"),
    ("cluster.memory", "cluster"),
])  # fmt: skip
def test_groups(path, group):
    assert group_of(path) == group


def test_values_come_with_where_they_came_from(make_plan):
    a = make_plan(optimizer="optimizer adamw { lr = 1e-3 }")
    b = make_plan(
        2, optimizer="let rate = 2e-3\noptimizer adamw { lr = rate }", batch="batch { sequence = 256, rows = 4 }"
    )
    changes = {change.path: change for change in changed_values(a, b)}
    lr = changes["optimizer.lr"]
    assert lr.before is not None and lr.after is not None
    assert (lr.before.value, lr.before.origin, lr.after.value, lr.after.origin) == ("0.001", "text", "0.002", "let")
    after = changes["batch.accumulate"].after
    assert after is not None and after.how == "rows 4 / (micro 1 · data ranks 2)"
    order = [GROUPS.index(change.group) for change in changed_values(a, b)]
    assert order == sorted(order)


def test_a_tick_more_does_not_move_the_others(make_plan):
    a = make_plan(every="every 10 steps log\nevery 50 steps checkpoint")
    b = make_plan(every="every 5 steps eval code then log\nevery 10 steps log\nevery 20 steps checkpoint then stop")
    assert recurring(b)["every eval code then log"] == "5 steps"
    changed = {change.path for change in changed_values(a, b)}
    assert changed == {"every eval code then log", "every checkpoint", "every checkpoint then stop"}


def test_memory_traffic_and_amounts_stand_side_by_side(make_plan):
    """With the parts of an estimate filled in by hand, so that the numbers can be followed."""

    def with_costs(one: Plan, activations: int, count: int) -> Plan:
        traffic = Traffic(axis="fsdp", op="all_gather", node="x", count=count, bytes=count * 10, exposed=False)
        memory = Memory(parameters=1, gradients=1, optimizer=2, activations=activations)
        classes = tuple(evolve(each, memory=memory, traffic=(traffic, traffic)) for each in one.estimates.classes)
        return evolve(one, estimates=evolve(one.estimates, classes=classes))

    a, b = with_costs(make_plan(), 100, 3), with_costs(make_plan(parallel="parallel { pp 2 }"), 50, 5)
    found = compare_plans(a, b)
    content = to_json(found)
    assert [row["ranks"] for row in content["memory"]] == ["fullest rank", "pp 0", "pp 1"]
    assert content["memory"][0]["before"]["activations"] == 100
    assert content["memory"][0]["after"]["total_bytes"] == 54
    assert content["memory"][2]["before"] is None
    (row,) = content["traffic"]
    assert (row["before"], row["after"]) == ({"count": 6, "bytes": 60}, {"count": 10, "bytes": 100})
    page = render_diff(found, ("a", "b"))
    assert "activations  100 B  50 B  −50 B (×0.5)" in page
    assert "fsdp  all_gather  6  60 B  10  100 B  +40 B (×1.67)" in page
    nodes = {row["id"]: row for row in content["nodes"]}
    assert nodes["setup.parallel.pp"]["change"] == "added"
    assert nodes["setup.mesh"]["arguments"]["axes.pp"] == [1, 2]
