"""`fault_tolerance.stuck` and `health` in a plan: when ranks are given up, and which of them come last."""

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text


def text_of(plan) -> str:
    return " ".join(render(plan).split())


def test_ranks_are_watched_from_the_beginning_and_by_default_for_ten_minutes(make_plan):
    plan = make_plan()
    assert [node.id for node in plan.nodes][:2] == ["setup.bootstrap", "setup.watch"]
    node = plan.node("setup.watch")
    assert node.args == {"stuck_seconds": 600} and "10 min" in node.does
    assert "no progress for 10.0 min report stuck ranks, then end default" in text_of(plan)


def test_another_limit_or_none(make_plan):
    plan = make_plan(more="fault_tolerance { stuck = 90 s }")
    assert plan.node("setup.watch").args == {"stuck_seconds": 90}
    assert "no progress for 90.0 s report stuck ranks, then end" in text_of(plan)
    plan = make_plan(more="fault_tolerance { stuck = none }")
    assert plan.node("setup.watch").args == {"stuck_seconds": None}
    assert "no progress for" not in text_of(plan) and "end" not in plan.node("setup.watch").does


def test_the_limit_is_no_part_of_the_experiment_and_may_change_while_it_runs(make_plan):
    base, other = make_plan(), make_plan(more="fault_tolerance { stuck = 5 min }\nevery 7 steps health { limit = 5 s }")
    assert base.id != other.id and base.config_id == other.config_id
    verdict = resumable(base, other)
    assert verdict.kind == "safe" and verdict.effect == "none"
    assert "fault_tolerance.stuck" in {reason.path for reason in verdict.reasons}


def test_a_probe_is_a_node_of_its_tick(make_plan):
    plan = make_plan(
        every="every 20 steps health { limit = 30 s } then log\non sigterm health then checkpoint then stop"
    )
    assert plan.node("tick.health").args == {"limit_seconds": 30}
    assert plan.node("event.sigterm.health").args == {"limit_seconds": 60}
    assert "30.0 s" in plan.node("tick.health").does
    assert any(tick.nodes == ("tick.health", "tick.log") and tick.steps == 20 for tick in plan.timeline.ticks)
    assert "every 20 steps health then log" in text_of(plan)


@pytest.mark.parametrize(("text", "code", "says"), [
    ("fault_tolerance { stuck = 0 s }", "X304", "must be above 0"),
    ("fault_tolerance { stuck = 5 steps }", "X302", "time"),
    ("fault_tolerance { stick = 5 s }", "X203", "stuck"),
    ("every 5 steps health { limit = 0 s }", "X304", "must be above 0"),
    ("every 5 steps health { limit = none }", "X301", "time"),
])  # fmt: skip
def test_what_cannot_be_is_reported_with_its_place(tmp_path, text, code, says):
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(more=text))
    (found,) = load_spec(path).diagnostics
    assert found.code == code and says in found.message + (found.hint or "") and found.span is not None
