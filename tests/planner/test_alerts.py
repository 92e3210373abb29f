"""Alerts and who is told: what becomes of them in the plan, and what is refused."""

from pathlib import Path

import pytest

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render

SPECS = Path(__file__).parents[2] / "specs"
OFF = "alerts { loss_spike = none, slow = none, starvation = none, memory = none, disk = none, stalled = none }"


def thresholds(plan: Plan) -> dict:
    return plan.node("setup.alerts").args


def triggers(plan: Plan, event: str):
    return [each for each in plan.timeline.triggers if each.event == event]


def test_what_is_raised_unless_the_spec_says_otherwise(make_plan):
    plan = make_plan(launch="launch { device = cuda }")
    args = thresholds(plan)
    assert args == {
        "window": 100, "loss_spike": 6.0, "slow": 2.0, "starvation": 0.3, "memory": 1.05, "disk_share": 0.05,
        "disk_most_bytes": 100 * 2**30, "disk_bytes": None,
        "checkpoint_bytes": plan.estimates.checkpoint_bytes, "stalled_seconds": 60.0,
    }  # fmt: skip
    does = plan.node("setup.alerts").does
    for words in ("6 deviations above the median of 100 steps", "30% of steps", "105% of the planned memory", "60"):
        assert words in does


def test_each_can_be_left_out(make_plan):
    plan = make_plan(more=OFF)
    assert {value for name, value in thresholds(plan).items() if name != "window"} == {None}
    assert plan.node("setup.alerts").does == "alert on a loss or norm that is not finite"


@pytest.mark.parametrize(("written", "name", "value"), [
    ("loss_spike = 8", "loss_spike", 8.0),
    ("slow = 3", "slow", 3.0),
    ("starvation = 50%", "starvation", 0.5),
    ("memory = 90%", "memory", 0.9),
    ("disk = 10%", "disk_share", 0.1),
    ("disk = 10 GiB", "disk_most_bytes", None),
    ("disk = 10 GiB", "disk_bytes", 10 * 2**30),
    ("stalled = 2 min", "stalled_seconds", 120.0),
])  # fmt: skip
def test_thresholds_are_those_of_the_spec(make_plan, written, name, value):
    assert thresholds(make_plan(more=f"alerts {{ {written} }}"))[name] == value


def test_a_loss_that_stays_high(make_plan):
    written = "alerts { loss_above = 8, loss_patience = 2 }\non loss_above checkpoint then stop"
    plan = make_plan(more=written)
    args = thresholds(plan)
    assert (args["loss_above"], args["loss_steps"]) == (8.0, 2)
    assert "2 steps in a row with a loss above 8" in plan.node("setup.alerts").does
    assert triggers(plan, "loss_above")[0].stop
    assert "loss_above" not in thresholds(make_plan())
    idle = make_plan(more="alerts { loss_patience = 2 }")
    assert any(check.evidence.startswith("loss_patience has no effect") for check in idle.checks)


def test_a_share_of_the_disk_asks_for_no_more_than_some_checkpoints(make_plan):
    plan = make_plan()
    assert thresholds(plan)["disk_most_bytes"] == 100 * 2**30 > 10 * plan.estimates.checkpoint_bytes
    assert "less than 5% of the disk free, or 100 GiB if that is less" in plan.node("setup.alerts").does
    large = plan_from_spec(str(SPECS / "llama_405b_16k.xtrain")).plan
    assert large is not None
    assert thresholds(large)["disk_most_bytes"] == 10 * large.estimates.checkpoint_bytes > 2**40


def test_on_a_cpu_memory_is_not_held_against_the_plan(make_plan):
    assert thresholds(make_plan(launch="launch { device = cpu }"))["memory"] is None
    assert thresholds(make_plan(launch="launch { device = auto }"))["memory"] == 1.05


def test_nothing_is_said_of_checkpoints_that_are_not_saved(make_plan):
    assert thresholds(make_plan(more="checkpoint { enabled = false }"))["checkpoint_bytes"] is None


@pytest.mark.parametrize(
    ("stuck", "seconds"), [("10 min", 60.0), ("2 min", 60.0), ("90 s", 45.0), ("4 s", 2.0), ("none", 60.0)]
)
def test_ranks_are_named_before_they_are_given_up(make_plan, stuck, seconds):
    plan = make_plan(more=f"fault_tolerance {{ stuck = {stuck} }}")
    assert thresholds(plan)["stalled_seconds"] == seconds
    (entry,) = [each for each in plan.provenance if each.path == "alerts.stalled"]
    assert entry.origin == "derived" and entry.how


def test_an_alert_that_never_comes_is_a_warning(compiled):
    result = compiled(more="fault_tolerance { stuck = 5 min }\nalerts { stalled = 5 min }")
    assert [each.code for each in result.diagnostics] == ["W607"] and result.plan is not None


def test_a_command_is_a_node_with_its_limit(make_plan):
    plan = make_plan(more='on loss_spike notify("./page.sh") then checkpoint')
    (found,) = triggers(plan, "loss_spike")
    assert found.nodes == ("event.loss_spike.notify", "event.loss_spike.checkpoint") and not found.stop
    node = plan.node("event.loss_spike.notify")
    assert (node.op, node.args) == ("tick.notify", {"command": "./page.sh", "limit_seconds": 30.0})
    assert plan.node("event.loss_spike.checkpoint").args["must"] is False, "the run goes on behind it"
    assert "on loss_spike" in render(plan)


def test_two_commands_are_two_nodes(make_plan):
    plan = make_plan(more='on disk notify("a") then notify("b")\non disk notify("a")')
    (found,) = triggers(plan, "disk")
    assert [plan.node(node).args["command"] for node in found.nodes] == ["a", "b", "a"]


@pytest.mark.parametrize("event", ["sigterm", "sigint", "sigusr1"])
def test_a_notification_replaces_no_default_action(make_plan, event):
    plan = make_plan(more=f'on {event} notify("a")')
    (found,) = triggers(plan, event)
    assert found.nodes == (f"event.{event}.notify", f"event.{event}.checkpoint") and found.stop


def test_at_the_end_a_notification_comes_after_the_save(make_plan):
    (found,) = triggers(make_plan(more='on finish notify("a")'), "finish")
    assert found.nodes[:2] == ("event.finish.checkpoint", "event.finish.notify")


@pytest.mark.parametrize(("written", "expected"), [
    ('on nan notify("a")', [(1, ("event.nan.notify",), True)]),
    ('on nan(3) skip\non nan notify("a")', [(3, (), True), (1, ("event.nan.notify",), False)]),
    ('on nan(3) skip then notify("a")', [(3, ("event.nan.notify",), True)]),
    ('on nan skip then notify("a")', [(10, ("event.nan.notify",), True)]),
    ('on nan(2) notify("a")\non nan(2) rollback', [(2, ("event.nan.notify", "event.nan.rollback"), False)]),
    ('on nan(2) notify("a")\non nan(4) stop', [(4, (), True), (2, ("event.nan.notify",), False)]),
])  # fmt: skip
def test_notifications_after_a_number_of_bad_steps(make_plan, written, expected):
    plan = make_plan(more=written, every="every 10 steps checkpoint")
    assert [(each.count, each.nodes, each.stop) for each in triggers(plan, "nan")] == expected
    assert plan.node("step.check_finite").args["limit"] == expected[0][0]


@pytest.mark.parametrize(("written", "code"), [
    ("on stalled checkpoint", "X617"),
    ('on stalled notify("a") then stop', "X617"),
    ('alerts { disk = none }\non disk notify("a")', "X610"),
    ('launch { device = cpu }\non memory notify("a")', "X610"),
    ("on disk checkpoint then requeue then stop", "X611"),
    ("on loss_spike rollback", "X612"),
    ('on nan(3) notify("a")', "X612"),
    ('on nan(5) notify("a")\non nan(4) skip', "X612"),
])  # fmt: skip
def test_what_cannot_be(compiled, written, code):
    result = compiled(more=written)
    assert [each.code for each in result.diagnostics if each.severity == "error"] == [code]
    assert result.plan is None


@pytest.mark.parametrize(("written", "more"), [('on disk notify("a")', 0), ("on disk checkpoint then stop", 1)])
def test_ranks_exchange_a_number_only_where_they_act(make_plan, written, more):
    def bytes_of(plan: Plan) -> int:
        return sum(each.bytes for each in plan.estimates.classes[0].traffic if each.node == "step.agree")

    two = {"parallel": "parallel { fsdp 2 }"}
    assert bytes_of(make_plan(more=written, **two)) - bytes_of(make_plan(**two)) == 8 * more
