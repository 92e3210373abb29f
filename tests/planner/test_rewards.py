"""Plans of models that give rewards: the head, what it costs, and what is said of it."""

import pytest
from attrs import evolve

from xtrain.plan.architecture import Architecture
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.resumable import resumable

SPEC = """experiment small {{ seed = 1, budget = 40 steps }}
model {model}
tokenizer bytes
dataset prefs {{ source = jsonl("prefs.jsonl"), chosen = "chosen", rejected = "rejected", holdout = 10% }}
batch {{ sequence = 128, rows = 4 }}
optimizer adamw {{ lr = 1e-3 }}
every 10 steps eval prefs
{more}
"""
LLAMA = "llama { dim = 32, layers = 2, heads = 4, ffn = 48 }"


def plan_of(more: str = "loss bradley_terry", model: str = LLAMA) -> Plan:
    compiled = plan_from_text(SPEC.format(model=model, more=more), "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def test_the_head_is_one_row():
    plan, other = plan_of(), plan_of("loss cpo")
    *_, norm, head = plan.parameters.tensors
    assert (norm.name, head.name, head.shape) == ("norm.weight", "score.weight", (1, 32))
    assert other.parameters.total - plan.parameters.total == 257 * 32
    build, before = plan.node("setup.build_model"), other.node("setup.build_model")
    assert build.args["architecture"] == {**before.args["architecture"], "head": "reward"}
    assert not {"z_loss", "chunk_bytes"} & build.args.keys() and "with a reward head" in build.does
    assert Architecture.from_values(build.args["architecture"]) == plan.architecture
    assert plan.node("setup.data.prefs").args["reads"]["ended"] is True
    assert "ended" not in other.node("setup.data.prefs").args["reads"]
    assert plan.node("tick.eval.prefs").args["objective"] == "pair"


def test_a_token_is_not_multiplied_with_it():
    plan, other = plan_of(), plan_of("loss orpo")
    assert other.estimates.work.position - plan.estimates.work.position == 6 * 258 * 32
    (mine,), (its,) = plan.estimates.classes, other.estimates.classes
    assert mine.memory.loss == 0 < its.memory.loss
    assert mine.hardware_flops == mine.flops < its.flops


def test_tensor_parallel_leaves_it_whole():
    plan = plan_of("loss bradley_terry\nparallel { tp 2 }")
    patterns = [rule["pattern"] for rule in plan.node("setup.parallel.tp").args["rules"]]
    assert "embed_tokens" in patterns and not {"score", "lm_head"} & set(patterns)
    sums = [t for t in plan.estimates.classes[0].traffic if t.axis == "tp" and t.op == "all_reduce"]
    assert sum(each.count for each in sums if each.bytes == each.count * 8) == 4  # a number a row, in each microbatch


def test_costs_of_a_pipeline_leave_the_head_out():
    plan = plan_of("loss bradley_terry\nparallel { pp 2 }")
    (cost,) = (each for each in plan.provenance if each.path == "parallel.pp.head_cost")
    assert cost.value == "0" and "last token of each sequence" in cost.how


@pytest.mark.parametrize(("before", "after"), [("loss cpo", "loss bradley_terry"), ("loss bradley_terry", "loss cpo")])
def test_a_run_does_not_go_on_with_another_head(before: str, after: str):
    verdict = resumable(plan_of(before), plan_of(after))
    assert verdict.kind == "incompatible"
    reasons = {reason.path: reason.text for reason in verdict.reasons if reason.kind == "incompatible"}
    assert "score.weight" in reasons["loss"] and "lm_head.weight" in reasons["loss"]


def test_settings_of_the_loss_may_change():
    verdict = resumable(plan_of(), plan_of("loss bradley_terry { centre = 0.1 }"))
    assert verdict.kind == "safe" and verdict.effect == "learning"


def test_tied_embeddings_leave_the_head_alone():
    plan = plan_of(model=LLAMA.replace("48 }", "48, tie_embeddings = true }"))
    assert plan.architecture.head_module == "score" and not plan.architecture.tie_embeddings
    assert plan.parameters.tensors[-1].name == "score.weight"
    assert evolve(plan.architecture, head="vocabulary", tie_embeddings=True).head_module == "embed_tokens"


def test_rewards_have_no_losses_of_rows():
    compiled = plan_from_text(
        SPEC.format(model=LLAMA, more="loss bradley_terry\nevery 5 steps row_losses"), "small.xtrain"
    )
    (found,) = compiled.diagnostics.errors
    assert found.code == "X442" and "reward head" in found.message
