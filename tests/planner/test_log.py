"""Who takes the records of a run: nodes of the plan, names that W&B takes, and settings that say nothing."""

import pytest

from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

TENSORBOARD, WANDB = "setup.log.tensorboard", "setup.log.wandb"


def ops(plan) -> list[str]:
    return [node.op for node in plan.nodes]


def test_what_is_off_has_no_node_and_what_is_on_stands_before_the_first_step(make_plan):
    assert not {TENSORBOARD, WANDB} & set(ops(make_plan()))
    both = make_plan(log='log { tensorboard = true, wandb { project = "p", mode = offline, tags = ["a"] } }')
    at = ops(both)
    assert at.index("setup.checkpoint") < at.index(TENSORBOARD) < at.index(WANDB) < at.index("step.fetch")
    assert both.node(TENSORBOARD).args == {"folder": "tensorboard"}
    names = ("project", "entity", "name", "group", "tags", "notes", "mode")
    values = ("p", None, None, None, ["a"], None, "offline")
    assert both.node(WANDB).args == dict(zip(names, values, strict=True))
    assert "keeps records for W&B, project p, in wandb/" in both.node(WANDB).does


def test_the_page_says_who_takes_the_records(make_plan):
    page = render(make_plan(log='log { tensorboard = true, wandb { project = "p", mode = offline } }'))
    assert "records         also to TensorBoard in tensorboard/ and W&B, project p, offline" in page
    assert "also to" not in render(make_plan())


@pytest.mark.parametrize(("settings", "words"), [
    ('project = "team/llama"', "project has a `/`"),
    ('project = " "', "project is empty"),
    (f'project = "{"x" * 129}"', "project has 129 characters, more than 128"),
    (f'project = "p", group = "{"x" * 129}"', "group has 129 characters"),
    (f'project = "p", tags = ["{"x" * 65}"]', "a tag has 65 characters"),
    ('project = "p", tags = ["a", ""]', "a tag has 0 characters"),
])  # fmt: skip
def test_a_name_that_wandb_does_not_take_is_a_mistake(compiled, settings: str, words: str):
    found = compiled(log=f"log {{ wandb {{ {settings} }} }}")
    assert found.plan is None and [d.code for d in found.diagnostics] == ["X622"]
    assert words in found.diagnostics.render()


def test_names_that_wandb_takes_are_none(compiled):
    long = 'wandb { project = "a-b_c.d", entity = "team", name = "a/b: 1", group = "g", tags = ["x"], notes = "why?" }'
    assert list(compiled(log=f"log {{ {long} }}").diagnostics) == []


def test_settings_of_wandb_without_a_project_say_nothing(compiled):
    found = compiled(log='log { wandb { mode = offline, tags = ["a"] } }')
    assert found.plan is not None and [d.code for d in found.diagnostics] == ["W401", "W401"]


def test_a_run_goes_on_with_other_writers(make_plan):
    without, others = make_plan(), make_plan(log='log { tensorboard = true, wandb { project = "p" } }')
    assert without.config_id == others.config_id
    for before, after in ((without, others), (others, without)):
        verdict = resumable(before, after)
        assert (verdict.kind, verdict.effect) == ("safe", "none")
        assert {reason.path for reason in verdict.reasons} == {"log.tensorboard", "log.wandb"}
    (reason,) = resumable(others, make_plan(log='log { tensorboard = true, wandb { project = "q" } }')).reasons
    assert (reason.path, reason.text.split(":")[0]) == ("log.wandb", "p → q")
