"""`norms` in a plan: its nodes, what it allocates, and what is idle."""

import pytest
from attrs import evolve

from xtrain.components.actions.norms import Norms, group_of


@pytest.mark.parametrize(
    ("name", "groups"),
    [("layers.3.self_attn.q_proj.weight", ("layers.3", "layers.3.self_attn")),
        ("layers.0.mlp.experts.gate_proj", ("layers.0", "layers.0.mlp")),
        ("embed_tokens.weight", ("embed_tokens", "embed_tokens"))],
)  # fmt: skip
def test_the_groups_of_a_parameter(name: str, groups: tuple[str, str]):
    assert (group_of(name, "layer"), group_of(name, "module")) == groups
    assert group_of(name, "parameter") == name and group_of(name, "model") == "model"


def test_the_copy_of_updates_is_a_node_of_the_step(compiled):
    plan = compiled(every="every 5 steps norms { by = module }").plan
    order = [node.id for node in plan.nodes if node.kind == "step"]
    assert order.index("step.norms") + 1 == order.index("step.optimizer")
    assert plan.node("tick.norms").args == {"by": "module", "of": ["parameters", "gradients", "updates"]}
    without = compiled(every="every 5 steps norms { of = [gradients] }").plan
    assert not [node for node in without.nodes if node.id == "step.norms"]
    at_the_end = compiled(every="on finish norms").plan
    assert not [node for node in at_the_end.nodes if node.id == "step.norms"]
    assert at_the_end.node("event.finish.norms").args["of"] == ["parameters", "gradients"]


def test_it_is_another_plan_of_the_same_experiment(compiled):
    plan, other = compiled(every="every 5 steps norms").plan, compiled().plan
    assert plan.id != other.id and plan.config_id == other.config_id


def test_nothing_to_measure_is_said(compiled):
    (found,) = compiled(every="every 5 steps norms { of = [] }").diagnostics
    assert found.code == "W401" and "names nothing" in found.message


def test_the_copy_counts_as_memory():
    assert Norms().allocates(None, 1000) == 1000 and evolve(Norms(), of=("gradients",)).allocates(None, 1000) == 0
