"""`fault_tolerance.elastic`: which numbers of ranks a run may go on with, and what is recorded of them."""

import time

import pytest
from attrs import evolve

from xtrain.plan.serialise import PlanError, dumps, from_json, plan_id, to_json
from xtrain.planner.load import check_from_spec, plan_from_path, plan_from_text
from xtrain.planner.review.page import render

SPEC = """
experiment tiny {{ seed = 3, budget = 60 steps }}
model qwen3 {{ dim = 32, layers = 4, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer bytes
dataset lines {{ source = synthetic() }}
batch {{ sequence = 64, {batch} }}
parallel {{ {parallel} }}
optimizer adamw {{ lr = 3e-3 }}
fault_tolerance {{ restarts = {restarts}, elastic = {elastic} }}
"""


@pytest.fixture
def compiled(tmp_path):
    def run(*, world=None, sets=(), elastic="1..4", batch="rows = 8", parallel="fsdp auto", restarts=2, more=""):
        path = tmp_path / "tiny.xtrain"
        text = SPEC.format(elastic=elastic, batch=batch, parallel=parallel, restarts=restarts)
        path.write_text(text + more)
        return plan_from_path(path, sets, world)

    return run


@pytest.fixture
def make_plan(compiled):
    def run(**options):
        found = compiled(**options)
        assert found.plan is not None, found.diagnostics.render()
        return found.plan

    return run


def worlds(plan):
    return {each.world: each.accumulate for each in plan.elastic}


def test_every_world_takes_the_same_rows_and_the_largest_is_the_plan(make_plan):
    plan = make_plan()
    assert plan.mesh.world_size == 4
    assert worlds(plan) == {1: 8, 2: 4, 4: 2}
    (refused,) = plan.refused
    assert refused.worlds == "3" and "8 rows" in refused.reason


def test_the_words_of_a_refusal_are_not_part_of_the_id(make_plan):
    plan = make_plan()
    (refused,) = plan.refused
    reworded = evolve(plan, refused=(evolve(refused, reason="other words"),))
    assert plan_id(reworded) == plan.id
    assert plan_id(evolve(plan, refused=(evolve(refused, worlds="5"),))) != plan.id
    # A plan that was saved when they were is still read.
    earlier = evolve(plan, id=plan_id(plan, with_reasons=True))
    assert earlier.id != plan.id and from_json(to_json(earlier)) == earlier
    with pytest.raises(PlanError, match="does not match its id"):
        from_json(to_json(evolve(plan, id="0" * 16)))


def test_the_rows_are_those_of_the_largest_world_where_the_spec_gives_microbatches(make_plan):
    assert worlds(make_plan(batch="micro = 1, accumulate = 3", elastic="2..4")) == {2: 6, 3: 4, 4: 3}
    declared = make_plan(batch="micro = 1, accumulate = 2", sets=("launch.nodes=1", "launch.ranks_per_node=2"))
    assert declared.mesh.world_size == 2 and worlds(declared) == {1: 4, 2: 2, 4: 1}


def test_other_axes_stay_and_the_free_one_gives_way(make_plan):
    plan = make_plan(parallel="tp 2, pp 2, fsdp auto", elastic="4..16", batch="rows = 32")
    assert {each.world: each.axes["fsdp"] for each in plan.elastic} == {4: 1, 8: 2, 16: 4}
    assert all(each.axes["tp"] == each.axes["pp"] == 2 for each in plan.elastic)
    reasons = {each.reason: each.worlds for each in plan.refused}
    assert reasons["not divisible by pp 2 · tp 2 = 4"].startswith("5..7, 9..11, 13..15")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_plan_of_a_world_has_the_id_that_every_other_one_has_recorded(make_plan, compiled, world):
    base = make_plan()
    own = make_plan(world=world)
    recorded = {each.world: each.id for each in base.elastic}
    assert own.id == recorded[world]
    assert own.elastic == base.elastic and own.refused == base.refused and own.config_id == base.config_id
    again = plan_from_text(base.spec_text, "x", world=world).plan
    assert again is not None and again.id == recorded[world]
    stored = from_json(to_json(own))
    assert stored == own


def test_another_range_is_another_plan_and_the_same_experiment(make_plan):
    narrow, wide = make_plan(elastic="2..4"), make_plan(elastic="1..4")
    assert narrow.id != wide.id and narrow.config_id == wide.config_id
    assert make_plan(restarts=3).id != make_plan(restarts=2).id


def test_a_plan_that_names_another_id_for_a_world_is_still_the_plan_it_says_and_no_other_number_is(make_plan):
    content = to_json(make_plan())
    content["elastic"][0]["accumulate"] += 1
    with pytest.raises(Exception, match="does not match its id"):
        from_json(content)


def test_the_page_says_which_worlds_there_are_and_why_others_are_not(make_plan):
    page = render(make_plan(parallel="tp 2, fsdp auto", elastic="2..8"))
    part = page[page.index("RESTARTS") :].split("\n\n")[0]
    assert "up to 2" in part and "8 ranks" in part and "2 microbatches" in part and "this plan" in part
    assert "not 3, 5, 7: not divisible by tp 2" in part and "not 6: 8 rows" in part


@pytest.mark.parametrize(("options", "code", "words"), [
    ({"parallel": "fsdp 4"}, "X428", "no axis is `auto`"),
    ({"world": 8}, "X429", "--world says 8 ranks, and elastic is 1..4"),
    ({"sets": ("launch.nodes=2", "launch.ranks_per_node=4")}, "X429", "launch says 8 ranks"),
    ({"elastic": "5..7"}, "X430", "none of 5..7 ranks works"),
    ({"elastic": "3..5"}, "X430", "only one number of ranks works, 4"),
    ({"parallel": "cp 2, fsdp auto", "elastic": "5..5"}, "X430", "no number of ranks is divisible by cp 2"),
    ({"parallel": "fsdp auto { replicate = 2 }", "elastic": "5..5"}, "X430", "is divisible by replicate 2"),
    ({"elastic": "4..2"}, "X304", "is decreasing: 4 to 2"),
    ({"elastic": "0..2"}, "X304", "each end of `elastic` must be at least 1"),
    ({"elastic": "1.5..2"}, "X306", "whole number"),
    ({"elastic": "1 h..2 h"}, "X302", "plain number"),
    ({"elastic": "4"}, "X301", "must be a range or `none`, not the number 4"),
    ({"elastic": "[2, 4]"}, "X301", "must be a range or `none`, not a list"),
    ({"elastic": "n..4"}, "X202", "`n` is not defined"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_is_wrong_is_said_with_what_to_write(compiled, options, code, words):
    found = compiled(**options)
    assert found.plan is None
    error = next(each for each in found.diagnostics if each.code == code)
    assert words in error.message and (error.hint or "at least" in words)


def test_a_range_is_written_where_a_list_was(compiled):
    (error,) = compiled(elastic="[2, 4]").diagnostics.errors
    assert error.fix is not None and error.fix.text == "2..4"


def test_elastic_without_restarts_is_warned_of(compiled):
    found = compiled(restarts=0)
    assert found.plan is not None
    assert [each.code for each in found.diagnostics] == ["W431"]


def test_a_check_without_a_plan_says_the_same(compiled, tmp_path):
    compiled(elastic="3..5")
    assert [each.code for each in check_from_spec(tmp_path / "tiny.xtrain")] == ["X430"]


def test_a_wide_range_is_planned_at_once(make_plan):
    begin = time.process_time()
    plan = make_plan(elastic="1..4096", batch="rows = 4096")
    assert len(plan.elastic) == 13 and plan.mesh.world_size == 4096
    assert time.process_time() - begin < 20
    assert len(dumps(plan)) < 3_000_000


def test_most_numbers_of_a_wide_range_may_not_work(make_plan, compiled):
    """Rows that are declared say which numbers need no trial."""
    plan = make_plan(elastic="1..4096", batch="rows = 4")
    assert worlds(plan) == {1: 4, 2: 2, 4: 1} and plan.mesh.world_size == 4
    found = compiled(elastic="1..3000000")
    assert found.plan is None and "spans 3,000,000 numbers of ranks" in found.diagnostics.render()


def test_what_is_wrong_on_every_number_of_ranks_is_reported_once_and_where_it_stands(compiled):
    found = compiled(more='launch { stop_file = "." }').diagnostics
    assert [each.code for each in found] == ["X304"]
