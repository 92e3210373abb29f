"""`on nan(n) …`: what becomes of it in the plan, and what is refused."""

import pytest

from xtrain.plan.plan import Plan
from xtrain.planner.review.page import render

SAVED = "every 10 steps checkpoint"


def trigger(plan: Plan):
    return next(each for each in plan.timeline.triggers if each.event == "nan")


def limit(plan: Plan) -> int:
    return plan.node("step.check_finite").args["limit"]


@pytest.mark.parametrize(("written", "count", "nodes", "stop"), [
    ("", 1, (), True),
    ("on nan stop", 1, (), True),
    ("on nan(4) stop", 4, (), True),
    ("on nan skip", 10, (), True),
    ("on nan(3) skip", 3, (), True),
    ("on nan rollback", 1, ("event.nan.rollback",), False),
    ("let n = 2\non nan(n + 1) rollback", 3, ("event.nan.rollback",), False),
])  # fmt: skip
def test_so_many_in_a_row(make_plan, written, count, nodes, stop):
    plan = make_plan(every=SAVED, more=written)
    found = trigger(plan)
    assert (found.count, found.nodes, found.stop) == (count, nodes, stop)
    assert limit(plan) == count and found.name == ("nan" if count == 1 else f"nan({count})")
    # A save that is due behind a step that is left out is made later: only where there can be such a step.
    assert any(node.op == "step.put_off_save" for node in plan.nodes) == (count > 1)


def test_how_often_it_goes_back(make_plan):
    assert make_plan(every=SAVED, more="on nan rollback").node("event.nan.rollback").args == {"times": 3}
    plan = make_plan(every=SAVED, more="on nan(2) rollback { times = 7 }")
    assert plan.node("event.nan.rollback").args == {"times": 7}
    assert "at most 7 times" in plan.node("event.nan.rollback").does
    assert "the 2nd in a row rolls back to a checkpoint" in plan.node("step.check_finite").does


def test_it_shows_on_the_page(make_plan):
    page = render(make_plan(every=SAVED, more="on nan(3) rollback"))
    assert any(line.split()[:3] == ["on", "nan(3)", "rollback"] for line in page.splitlines())
    page = render(make_plan(every=SAVED))
    assert any(line.split() == ["on", "nan", "stop", "default"] for line in page.splitlines())


@pytest.mark.parametrize(("written", "part"), [
    ("on nan checkpoint then stop", "`latest` would name them"),
    ("on nan log", "lacks skip, rollback or stop"),
    ("on nan log then stop", "on nan has `log`, which does nothing about a bad step"),
    ("on nan skip then stop", "exactly one of"),
    ("on nan skip\non nan(3) rollback", "exactly one of"),
    ("on nan(1) skip", "no step would be skipped"),
    ("on sigterm skip then stop", "only allowed after `on nan`"),
    ("every 5 steps rollback", "only allowed after `on nan`"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(compiled, written, part):
    found = [error for error in compiled(every=SAVED, more=written).diagnostics.errors if error.code == "X612"]
    assert len(found) == 1 and part in found[0].message and found[0].hint


def test_who_goes_back_needs_something_to_go_back_to(compiled):
    off = compiled(checkpoint="checkpoint { enabled = false }", more="on nan rollback")
    assert [error.code for error in off.diagnostics.errors] == ["X613"]
    in_tokens = "experiment tiny { budget = 102_400 tokens }"  # 100 steps
    for given in (
        {"every": "every 100 steps checkpoint"},
        {"every": "every 101377 tokens checkpoint"},
        {"every": "every 100% checkpoint", "experiment": in_tokens},
        {"checkpoint": "checkpoint { keep = 1 }"},
    ):
        found = compiled(**given, more="on nan rollback")
        assert found.plan is not None and [w.code for w in found.diagnostics.warnings] == ["W604"]
    assert not compiled(every=SAVED, more="on nan rollback").diagnostics
    assert not compiled(every="every 101376 tokens checkpoint", more="on nan rollback").diagnostics
    # By default a twentieth of the steps.
    assert not compiled(more="on nan rollback").diagnostics


def test_a_scale_of_the_loss_in_fp16(make_plan, compiled):
    half = "precision { compute = fp16 { scale = 1024, interval = 7 } }"
    plan = make_plan(precision=half)
    ops = [node.op for node in plan.nodes]
    assert plan.args("step.loss_scale") == {"scale": 1024} and plan.args("step.check_overflow") == {"interval": 7}
    order = ("loss_scale", "forward_backward", "unscale", "gradient_norm", "check_overflow", "check_finite")
    places = [ops.index(f"step.{name}") for name in order if f"step.{name}" in ops]
    assert places == sorted(places) and len(places) >= 5
    others = [make_plan(precision=f"precision {{ compute = {each} }}") for each in ("fp16", "bf16")]
    assert len({each.config_id for each in (plan, *others)}) == 3
    assert "step.unscale" not in [node.op for node in others[1].nodes]
    for params in ("bf16", "fp64"):
        found = compiled(1, precision=f"precision {{ params = {params}, compute = fp16 }}")
        (error,) = found.diagnostics.errors
        assert error.code == "X443" and error.hint == "use params fp32"
