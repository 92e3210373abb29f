"""Phases with other weights of router losses, and another speed of biases, in every layout."""

import json

import numpy as np
import pytest
from attrs import evolve
from topologies import Topology
from trials import TOLERANCE, Laboratory, gaps

from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.resumable import resumable

BIAS = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2")
LATE = "phase late { from = 1 steps, router_aux_loss = 0.9, router_z_loss = 0.5, router_bias_speed = 0.05 }"
FIRST = "phase first { from = 0 steps, router_aux_loss = 0.1, router_z_loss = 0.01, router_bias_speed = 1e-2 }"
LAYOUTS = [Topology(fsdp=2, ep=2, model="moe"), Topology(pp=2, model="moe"), Topology(tp=2, model="moe")]


@pytest.mark.matrix
@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda each: each.name)
def test_a_layout_follows_the_phases_of_routers(lab: Laboratory, topology: Topology):
    trial = evolve(topology.trial("fp64"), more=LATE, settings=(*BIAS, *topology.trial("fp64").settings))
    alone = lab.alone(trial)
    assert not gaps(lab.run(trial, topology.layout, saves=False), alone).beyond(TOLERANCE["fp64"])
    # The phase changes what is learned, from its first step on; one with the model's values changes nothing.
    plain, same = lab.alone(evolve(trial, more="")), lab.alone(evolve(trial, more=FIRST))
    assert alone.curve[0] == plain.curve[0] and alone.curve[1][2] != plain.curve[1][2]
    assert same.curve == plain.curve


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "value"), [("aux_loss", 0.9), ("z_loss", 0.5), ("bias_speed", 0.05)])
def test_a_phase_of_all_steps_is_a_setting_of_the_model(lab: Laboratory, name: str, value: float):
    trial = Topology(model="moe").trial("fp64", shallow=True)
    trial = evolve(trial, settings=(*BIAS, *trial.settings))
    phase = evolve(trial, more=f"phase all {{ from = 0 steps, router_{name} = {value} }}")
    model = evolve(trial, settings=(*trial.settings, f"model.router.{name}={value}"))
    ours, theirs, plain = (lab.alone(each) for each in (phase, model, trial))
    assert ours.curve == theirs.curve
    same = [np.array_equal(ours.tensors[key], theirs.tensors[key]) for key in theirs.tensors]
    assert all(same) and not all(np.array_equal(plain.tensors[key], theirs.tensors[key]) for key in theirs.tensors)


SPEC = """
experiment routed {{ seed = 1, budget = 8 steps }}
model {family} {{ dim = 32, layers = 1, heads = 2, ffn = 32 {more} }}
tokenizer bytes
dataset made {{ source = synthetic() }}
batch {{ sequence = 32, rows = 2 }}
optimizer adamw {{ lr = 1e-3 }}
{phase}
"""


def compiled(phase: str, family: str = "qwen3_moe", more: str = ", experts = 4, experts_per_token = 2"):
    return plan_from_text(SPEC.format(family=family, more=more, phase=phase), "s.xtrain")


def test_the_plan_shows_the_settings_of_each_phase():
    found = compiled("phase late { from = 4 steps, router_aux_loss = 0.5 }")
    plan, plain = found.plan, compiled("phase late { from = 4 steps, lr_scale = 0.5 }").plan
    assert plan is not None and plain is not None and not list(found.diagnostics)
    node = plan.node("step.router_weights")
    assert node.args == {"router_aux_loss": 0.001} and "0.001 in train and 0.5 in late" in node.does
    assert from_json(json.loads(dumps(plan))) == plan and "step.router_weights" not in {n.op for n in plain.nodes}
    other = compiled("phase late { from = 4 steps, router_aux_loss = 0.25 }").plan
    assert other is not None and other.config_id != plan.config_id
    (reason,) = resumable(plan, other).reasons
    assert reason.path == "phase.late" and "router_aux_loss 0.5 → 0.25" in reason.text


@pytest.mark.parametrize(("phase", "family", "more", "why"), [
    ("router_aux_loss = 0.5", "qwen3", "", "the model has no routers"),
    ("router_bias_speed = 0.1", "qwen3_moe", ", experts = 4, experts_per_token = 2", "the routers have no biases"),
])  # fmt: skip
def test_settings_without_effect_are_warned_of(phase, family, more, why):
    warnings = compiled(f"phase late {{ from = 4 steps, {phase} }}", family, more).diagnostics.warnings
    assert [each.code for each in warnings if why in each.message] == ["W401"]
