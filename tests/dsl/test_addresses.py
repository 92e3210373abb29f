"""`--set` on ticks and events: what they are called, and what is said of a name that means none or several."""

import pytest

from xtrain.dsl.checking.overrides import of_ticks
from xtrain.dsl.values import Quantity
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.show import show_nodes
from xtrain.planner.review.why import show_why

# Behind the good spec, which has `every 1 step log`, `every 200 steps eval stdlib … then generate …` and
# `every 300 steps checkpoint`, `on finish eval stdlib … then generate …` and `on sigterm checkpoint then stop`.
MORE = (
    "dataset web { source = synthetic(), holdout = 100% }\nevery 100 steps eval web\nevery 10 min log\non nan(3) skip"
)


def periods(spec):
    return {name: spec.ticks[of_ticks(spec).places(name)[0][0]].every for name in of_ticks(spec).all()}


def test_every_tick_has_a_name_of_its_own(good):
    assert of_ticks(good(MORE)).all() == ["log.1", "eval.stdlib", "generate", "checkpoint", "eval.web", "log.2"]
    assert of_ticks(good("")).all() == ["log", "eval.stdlib", "generate", "checkpoint"]


@pytest.mark.parametrize(("name", "changed"), [
    ("every.eval.web", ["eval.web"]),
    ("every.eval.stdlib", ["eval.stdlib", "generate"]),  # one tick
    ("every.generate", ["eval.stdlib", "generate"]),
    ("every.checkpoint", ["checkpoint"]),
    ("every.log.2", ["log.2"]),
])  # fmt: skip
def test_a_tick_is_given_another_period(good, name, changed):
    before, after = periods(good(MORE)), periods(good(MORE, f"{name}=7 steps"))
    assert after == before | dict.fromkeys(changed, Quantity(7, "steps"))


def test_the_label_may_be_left_out_where_one_tick_does_it(good):
    assert periods(good("", "every.eval=step"))["eval.stdlib"] == Quantity(1, "steps")


def test_ticks_by_default_have_a_name_too(load):
    from_base = load("").require()
    texts = [line for line in load("").sources[1].text.splitlines() if not line.startswith("every")]
    spec = load("\n".join(texts), "every.log=5 s", "every.checkpoint=10%", base=False).require()
    assert not [tick for tick in from_base.ticks if tick.every.unit == "seconds"]
    assert periods(spec) == {"log": Quantity(5, "seconds"), "checkpoint": Quantity(10, "%")}
    assert spec.origins["every.0.every"].kind == spec.origins["every.1.every"].kind == "set"


def test_settings_of_actions(good):
    sets = ["every.eval.web.batches=3", "every.generate.tokens=5", "on.finish.eval.batches=2", "on.nan=5"]
    spec = good(MORE, *sets)
    assert spec.ticks[3].actions[0].batches == 3 and spec.ticks[1].actions[1].tokens == 5
    assert spec.events[0].actions[0].batches == 2 and spec.events[2].count == 5
    assert spec.ticks[1].actions[0].batches == 8  # of another tick


def test_a_param_may_stand_in_a_set(good):
    spec = good("param often = 20 steps\nevery often health", "every.checkpoint=2 * often", "every.health=often")
    assert periods(spec)["checkpoint"] == Quantity(40, "steps")
    assert spec.origins["every.3.every"].kind == "set"


@pytest.mark.parametrize(("text", "message", "hint"), [
    ("every.eval=3 steps", "is ambiguous: 2", "`every.eval.stdlib` or `every.eval.web`"),
    ("every.log=3 steps", "is ambiguous: 2", "`every.log.1` or `every.log.2`"),
    ("every.log.3=3 steps", "no tick `every.log.3`", "`every.log.1`"),
    ("every.eval.batches=3", "is ambiguous: 2", "`every.eval.stdlib.batches` or `every.eval.web.batches`"),
    ("every.chekpoint=3 steps", "no tick", "did you mean `every.checkpoint`?"),
    ("every.eval.wbe=3 steps", "no tick", "did you mean `every.eval.web`?"),
    ("every.health=3 steps", "no tick", "every.eval.web"),
    ("every=3 steps", "needs the name", "every.generate"),
    ("every.generate.tokns=3", "no setting of `generate`", "`tokens`"),
    ("on=3", "needs the name", ""),
    ("on.finsh.generate.tokens=3", "no `on finsh`", "did you mean `finish`?"),
    ("on.finish=3", "not a setting", "`on.finish.eval.stdlib.SETTING`"),
    ("on.finish.generate=3", "not a setting", "`on.finish.generate.SETTING`"),
    ("evry.log=3 steps", "no block", "did you mean `every`?"),
])  # fmt: skip
def test_a_name_that_means_none_or_several(load, text, message, hint):
    (diagnostic,) = load(MORE, text).diagnostics
    assert diagnostic.code == "X217" and message in diagnostic.message, diagnostic
    assert hint in (diagnostic.hint or ""), diagnostic


def test_the_choices_are_shown_where_they_stand(load):
    (diagnostic,) = load(MORE, "every.log=3 steps").diagnostics
    assert [(name, span.text) for name, span in diagnostic.notes] == [
        ("`every.log.1`", "every 1 step log"), ("`every.log.2`", "every 10 min log")
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "code"), [("every.log=3", "X302"), ("every.log=(3", "X103"), ("on.nan=x", "X202")])
def test_a_wrong_value_is_reported_at_the_set(load, text, code):
    more = "on nan(3) skip"
    errors = [each for each in load(more, text).diagnostics if each.severity == "error"]
    assert [each.code for each in errors] == [code] and errors[0].span.source.path == "--set"


def test_pages_say_the_name_and_who_set_it(good):
    spec = good(MORE, "every.eval.web=50 steps")
    plan = compile_plan(spec, world=1).plan
    assert plan is not None
    line = next(each for each in show_nodes(plan, "tick.eval.web").splitlines() if "--set" in each)
    assert line.split() == ["--set", "every.eval.web"]
    assert "every.log.1, every.log.2" in show_nodes(plan, "tick.log")
    page = show_why(plan, spec, "every.eval.web", world=1)
    assert "= 50 steps" in page and "from  set --set:1:" in page
    entry = next(each for each in plan.provenance if each.path == "every.3.every")
    assert (entry.value, entry.origin) == ("50 steps", "set")
