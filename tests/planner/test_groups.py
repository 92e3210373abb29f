"""`group NAME { … }` in a plan: who updates what, what that costs, and what is said of groups that do not fit."""

import attrs
import pytest
from agreement import hold_against_the_trace
from every_setting import alternatives
from topologies import Topology
from traces import plan_of

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.checkpoints import checkpoint_contents, mismatches
from xtrain.plan.findings import Findings
from xtrain.plan.groups import ParameterGroups
from xtrain.plan.serialise import from_json, to_json
from xtrain.planner.compile import resolve
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable
from xtrain.planner.rules.validate import validate

SHAPE = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, ffn = 192 }"
TABLE, BLOCK = 258 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
GROUPS = """
group "embed_tokens" { lr_scale = 0.1, weight_decay = 0.2 }
group "layers.0-1" { lr_scale = 0.5, optimizer sgd { lr = 1e-2 } }
group "layers.*.mlp.up_proj" { optimizer lion { lr = 1e-4 } }
"""
APART = GROUPS.replace("layers.0-1", "layers.0-1.self_attn")


def test_a_plan_says_who_updates_what(make_plan):
    plan = make_plan(model=SHAPE, group=APART)
    args = {node.id: node.args for node in plan.nodes if node.op == "setup.group"}
    assert args["setup.group.embed_tokens"] == {"pattern": "embed_tokens", "lr_scale": 0.1, "weight_decay": 0.2}
    attention = args["setup.group.layers.0-1.self_attn"]
    assert attention["lr_scale"] == pytest.approx(5.0) and attention["own"]["kind"] == "sgd"
    assert "clip" not in attention["own"]
    text = " ".join(render(plan).split())
    assert "group.embed_tokens 1 tensor, 16.5k parameters: learning rate × 0.1; weight decay 0.2 on all" in text
    assert "8 tensors, 24.6k parameters: sgd, momentum 0.9 in fp32" in text
    assert "adamw and sgd and lion update the parameters a rank owns" in str(plan.node("step.optimizer").does)
    assert from_json(to_json(plan)) == plan
    groups = ParameterGroups.of(plan)
    kept = {
        name: [each.name for each in groups.state(f"{name}.weight")]
        for name in ("embed_tokens", "layers.1.self_attn.q_proj", "layers.3.mlp.up_proj")
    }
    assert [*kept.values()] == [["exp_avg", "exp_avg_sq"], ["momentum_buffer"], ["exp_avg"]]
    assert groups.scalars("layers.3.mlp.up_proj.weight") == () != groups.scalars("norm.weight")


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "user"])
def test_optimizers_with_other_state_have_other_titles(load, kind):
    """Checkpoints are compared by the title: no setting may change what is stored unless the title changes too."""
    experts = "experts = 4, experts_per_token = 2, expert_ffn = 64"
    model = f"model qwen3_moe {{ dim = 128, layers = 1, heads = 2, kv_heads = 2, ffn = 128, {experts} }}"
    spec = load(model=model, optimizer=f"optimizer {kind} {{ lr = 1e-3 }}")
    valid = validate(spec, None, Findings(spec))
    assert valid is not None
    run = resolve(valid.elastic.spec, valid)

    def stored(optimizer: PlannedOptimizer) -> tuple[str, object]:
        args = optimizer.arguments(run)
        names = [each.name for each in run.inventory.tensors]
        return optimizer.title(args), [(optimizer.state(args, name), optimizer.scalars(args, name)) for name in names]

    chosen = planned(spec.optimizer, PlannedOptimizer)
    title, states = stored(chosen)
    for name, (attribute, _) in settings_of(type(chosen)).items():
        value = getattr(chosen, attribute.name)
        for new in alternatives(value, attribute.type) if name != "kind" else ():
            other, changed = stored(attrs.evolve(chosen, **{attribute.name: new}))
            assert (other == title) == (changed == states), f"{name} = {new}: {other}"


def test_state_is_that_of_the_optimizer_of_each_parameter(make_plan):
    plan = make_plan(model=SHAPE, group=APART)
    total, attention, up = plan.parameters.total, 2 * (2 * 64 * 64 + 2 * 64 * 32), 4 * 64 * 192
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 4 * (2 * total - attention - up)
    assert plan.estimates.checkpoint_bytes == 4 * (3 * total - attention - up)


def test_no_group_is_the_plan_of_before(make_plan):
    before, after = make_plan(model=SHAPE), make_plan(model=SHAPE, group=APART)
    assert "groups" not in before.config and before.config_id != after.config_id
    assert not [node for node in before.nodes if node.op == "setup.group"]


def test_a_resolved_spec_is_the_same_plan(load, make_plan, tmp_path):
    from xtrain.dsl.spec_text import resolved_text

    spec = load(model=SHAPE, group=APART)
    text = resolved_text(spec)
    assert "clip" not in text.partition('group "embed_tokens"')[2].partition("scheduler")[0]
    path = tmp_path / "again.xtrain"
    path.write_text(text)
    from xtrain.dsl.load import load_spec

    assert load_spec(path).require() == spec


@pytest.mark.parametrize(("group", "message", "hint"), [
    ('group "layers.7" { lr_scale = 2 }', "no parameter of the model is in `layers.7`", "the blocks are 0 to 3"),
    ('group "**.mlp.up_prj" { lr_scale = 2 }', "is in `**.mlp.up_prj`", "did you mean `up_proj`?"),
    ("group embed_token { lr_scale = 2 }", "no parameter of the model is in", "did you mean `embed_tokens`?"),
    (GROUPS, "both have layers.0.mlp.up_proj.weight and 1 more", "no parameter is in two"),
    ('group "layers.3" { lr_scale = 2 }', "every parameter in `layers.3` is frozen", "train some of it"),
    ('group "*" { optimizer sgd { lr = 1 } }', "`adamw` updates nothing", "use a group's optimizer"),
])  # fmt: skip
def test_groups_that_do_not_fit(compiled, group, message, hint):
    model = SHAPE.replace(" }", ', frozen = ["layers.3"] }')
    (wrong,) = compiled(model=model, group=group).diagnostics.errors
    assert wrong.code == "X436" and message in wrong.message and hint in wrong.hint


@pytest.mark.parametrize(
    ("group", "message"),
    [('group "norm" { }', "the group `norm` changes nothing"),
        ('group "layers.0-4" { lr_scale = 2 }', "`layers.0-4` goes beyond the model"),
        ("group norm { weight_decay = 0, optimizer sgd { lr = 1, weight_decay = 1 } }", "the group's own counts")],
)  # fmt: skip
def test_what_a_group_says_in_vain(compiled, group, message):
    (idle,) = compiled(model=SHAPE, group=group).diagnostics.warnings
    assert idle.code == "W401" and message in idle.message


def test_gradients_are_clipped_together(tmp_path):
    from xtrain.dsl.load import load_spec

    path = tmp_path / "spec.xtrain"
    path.write_text("group norm { optimizer sgd { lr = 1, clip = 2 } }")
    assert [each.code for each in load_spec(path).diagnostics.errors if "clip" in each.message] == ["X208"]


def test_a_state_fits_the_same_optimizers_and_any_rates(make_plan):
    one, rate, other = (
        make_plan(model=SHAPE, group=group)
        for group in (APART, APART.replace("0.1,", "0.3,"), APART.replace("lion", "adamw"))
    )
    assert not mismatches(checkpoint_contents(one), checkpoint_contents(rate))
    (change,) = resumable(one, rate).reasons
    assert (change.kind, change.path) == ("safe", "group.embed_tokens.lr_scale") and "0.1 → 0.3" in change.text
    (found,) = mismatches(checkpoint_contents(one), checkpoint_contents(other))
    assert "lion of layers.*.mlp.up_proj" in found.text and "not compatible" in found.text
    without = make_plan(model=SHAPE, group=APART.replace("weight_decay = 0.2", ""))
    (change,) = resumable(one, without).reasons
    assert change.path == "group.embed_tokens.weight_decay" and "0.2 → none" in change.text


MIXED = """
group "embed_tokens" { lr_scale = 0.5 }
group "layers.*.self_attn" { optimizer muon { lr = 0.01 } }
group "layers.1.mlp" { optimizer sgd { lr = 0.1 } }
"""


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [Topology(fsdp=2, note="mixed"), Topology(pp=2, fsdp=2)])
def test_groups_cost_what_the_plan_says(topology, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32", more=MIXED))
