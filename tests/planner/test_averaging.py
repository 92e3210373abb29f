"""What `ema { … }` puts into a plan: nodes, memory, what is saved, who looks at it, and what a change of it means."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.plan import Plan
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.resumable import resumable

QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.xtrain"
LOOKED_AT = 'every 10 steps eval code\non finish generate { prompts = ["a"] }'


@pytest.fixture
def make_plan(load):
    def make(ema: str = "", **blocks: str) -> Plan:
        plan = compile_plan(load(every=LOOKED_AT, ema=ema, **blocks)).plan
        assert plan is not None
        return plan

    return make


def ids(plan: Plan) -> set[str]:
    return {node.id for node in plan.nodes}


def looks(plan: Plan) -> set[bool]:
    """Whether evaluations and texts are of averages."""
    found = [bool(node.args.get("averaged")) for node in plan.nodes if node.op in ("tick.eval", "tick.generate")]
    assert len(found) >= 2
    return set(found)


def test_without_the_block_there_is_no_trace_of_it(make_plan):
    plan = make_plan()
    assert not any("ema" in id for id in ids(plan)) and looks(plan) == {False}
    assert not any(entry.path.startswith("ema") for entry in plan.provenance)
    assert "ema" not in plan.spec_text and plan.estimates.classes[0].memory.averages == 0


def test_the_average_has_nodes_memory_and_a_place_in_checkpoints(make_plan):
    without, averaged = make_plan(), make_plan("ema { }")
    assert ids(averaged) - ids(without) == {"setup.ema", "step.ema"}
    order = [node.id for node in averaged.nodes]
    assert order.index("step.optimizer") < order.index("step.ema") < order.index("step.measure")
    assert ("setup.ema", "setup.resume") in {(edge.before, edge.after) for edge in averaged.edges}
    size = 4 * averaged.parameters.total
    ours, theirs = (each.estimates.classes[0].memory for each in (averaged, without))
    assert ours.averages == size and ours.total_bytes == theirs.total_bytes + size
    assert averaged.estimates.checkpoint_bytes == without.estimates.checkpoint_bytes + size
    assert looks(averaged) == {True}


def test_in_bf16_the_average_is_kept_in_finer_numbers(make_plan):
    plan = make_plan("ema { }", precision="precision { params = bf16 }")
    assert plan.node("setup.ema").args["format"] == "fp32"
    assert "bf16 would round updates away" in plan.node("setup.ema").does
    assert plan.estimates.classes[0].memory.averages == 4 * plan.parameters.total
    assert plan.estimates.checkpoint_bytes == (3 * 2 + 4) * plan.parameters.total


def test_who_looks_at_averages_is_no_part_of_the_experiment_and_what_they_are_is(make_plan):
    plan = make_plan("ema { }")
    for settings, another in (
        ("eval = false", False),
        ("publish = false", False),
        ("decay = 0.99", True),
        ("every = 2", True),
    ):
        other = make_plan(f"ema {{ {settings} }}")
        assert other.id != plan.id and (other.config_id != plan.config_id) is another, settings
    assert make_plan().config_id != plan.config_id
    assert looks(make_plan("ema { eval = false }")) == {False}
    published = [node.does for node in plan.nodes if node.op == "tick.model"]
    assert published and all("averaged weights" in does for does in published)


def test_what_a_change_means_for_a_checkpoint(make_plan):
    without, averaged = make_plan(), make_plan("ema { }")

    def said(before: Plan, after: Plan) -> tuple[str, dict[str, str]]:
        verdict = resumable(before, after)
        return verdict.kind, {reason.path: reason.text for reason in verdict.reasons}

    kind, reasons = said(without, averaged)
    assert kind == "safe" and reasons["ema"] == "none → ema: the average starts from the weights of the checkpoint"
    kind, reasons = said(averaged, without)
    assert kind == "safe" and reasons["ema"] == "ema → none: the averaged weights of the checkpoint are dropped"
    kind, reasons = said(averaged, make_plan("ema { decay = 0.9, every = 4, publish = false, eval = false }"))
    assert kind == "safe" and {"ema.decay", "ema.every", "ema.publish", "ema.eval"} <= reasons.keys()


WRONG = {
    "decay = 1": ("X304", "`decay` must be above 0 and below 1"),
    "decay = 0": ("X304", "`decay` must be above 0 and below 1"),
    "every = 0": ("X304", "`every` must be at least 1"),
    'eval = "yes"': ("X301", "`eval` must be `true` or `false`, not a string"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_values_are_reported_where_they_are(wrong, tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(f'include "{QUICKSTART}"\nema {{ {wrong} }}\n')
    loaded = load_spec(path)
    (error,) = loaded.diagnostics.errors
    assert loaded.spec is None and "spec.xtrain:2:" in loaded.diagnostics.render()
    assert (error.code, error.message) == WRONG[wrong]


def test_an_average_that_never_takes_in_anything_is_reported(load):
    steps = "experiment tiny { seed = 1, budget = 100 steps }"
    for every, codes in ((100, []), (101, ["W605"])):
        found = compile_plan(load(experiment=steps, ema=f"ema {{ every = {every} }}"))
        assert [d.code for d in found.diagnostics.warnings] == codes
        assert found.plan is not None
    assert "use 100 or fewer" in found.diagnostics.render()
