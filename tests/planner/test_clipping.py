"""Clipping and cautious weight decay in a plan: nodes, words, and going on with other settings."""

from xtrain.planner.review.resumable import resumable

ALL = "optimizer adamw {{ lr = 1e-3, clip = {}, clip_spikes = 2.5, clip_value = 0.1, cautious_decay = true }}"


def test_every_way_of_clipping_is_in_the_plan(make_plan):
    plan = make_plan(optimizer=ALL.format("1.0"))
    chain = [node.id for node in plan.nodes if node.kind == "step"]
    place = chain.index("step.clip")
    assert chain[place + 1] == "step.clip_value" and chain[place + 2] == "step.check_finite"
    assert plan.node("step.clip").args == {"max_norm": 1.0, "deviations": 2.5, "decay": 0.97, "first": 25}
    assert "scaled down to 1; and scaled down if 2.5 standard deviations" in plan.node("step.clip").does
    assert plan.node("step.clip_value").args == {"largest": 0.1}
    optimizer = plan.node("setup.optimizer")
    assert (
        optimizer.args["cautious_decay"]
        and "weight decay 0.1 on matrices where the update shrinks them" in optimizer.does
    )
    alone = make_plan(optimizer=ALL.format("none"))
    assert alone.node("step.clip").args.keys() == {"deviations", "decay", "first"}


def test_scheduled_decay_is_in_the_node_of_the_schedule(make_plan):
    before, after = (
        make_plan(optimizer=f"optimizer sgd {{ lr = 1, weight_decay = 0.1{more} }}")
        for more in ("", ", scheduled_decay = true")
    )
    assert before.node("step.schedule").args == {} and after.node("step.schedule").args == {"decay": "lr"}
    assert "scheduled_decay" not in after.node("setup.optimizer").args and before.id != after.id
    (change,) = resumable(before, after).reasons
    assert (change.path, change.kind, change.effect) == ("optimizer.scheduled_decay", "safe", "learning")


def test_plans_without_them_are_those_of_before(make_plan):
    plan = make_plan()
    written = make_plan(
        optimizer="optimizer adamw { lr = 1e-3, clip_spikes = none, clip_value = none, cautious_decay = false }"
    )
    assert plan.id == written.id and plan.node("step.clip").args == {"max_norm": 1.0}
    assert "cautious_decay" not in plan.node("setup.optimizer").args


def test_a_run_goes_on_with_other_ways_of_clipping(make_plan):
    reasons = {each.path: each for each in resumable(make_plan(), make_plan(optimizer=ALL.format("2.0"))).reasons}
    assert reasons.keys() == {
        "optimizer.clip", "optimizer.clip_spikes", "optimizer.clip_value", "optimizer.cautious_decay",
    }  # fmt: skip
    assert {each.kind for each in reasons.values()} == {"safe"}
    assert "none → 2.5" in reasons["optimizer.clip_spikes"].text
