"""Plans of models that predict further tokens: what is added, what it costs, and what it does not go with."""

import json
from pathlib import Path

import pytest

from xtrain.blocks.block import JOIN
from xtrain.plan.parameters import training_work
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

SPEC = """experiment tiny {{ seed = 1, budget = 8 steps }}
model llama {{ dim = 64, layers = 3, heads = 4, ffn = 96 {model} }}
tokenizer bytes
dataset made {{ source = synthetic(), holdout = 10% }}
batch {{ sequence = 64, rows = 8 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""


def compiled(model: str = "", more: str = "") -> Compiled:
    return plan_from_text(SPEC.format(model=model, more=more), "tiny.xtrain")


def plan_of(model: str = "", more: str = "") -> Plan:
    found = compiled(model, more)
    assert found.plan is not None, found.diagnostics.render()
    assert not [warning for warning in found.diagnostics.warnings if warning.code == "W401"]
    return found.plan


def test_a_module_is_a_block_with_a_projection_and_three_norms():
    plain, plan = plan_of(), plan_of(", mtp = 2")
    arch = plan.architecture
    assert (arch.layers, arch.blocks, arch.mtp) == (5, 3, 2) and arch.core == plain.architecture
    shapes = {each.name: each.shape for each in plan.parameters.tensors}
    before = {each.name: each.shape for each in plain.parameters.tensors}
    assert before.items() <= shapes.items()
    own = {name.removeprefix("layers.3."): shapes[name] for name in shapes if name.startswith("layers.3.")}
    block = {name.removeprefix("layers.2."): shapes[name] for name in before if name.startswith("layers.2.")}
    assert own == block | {
        f"{JOIN}.enorm.weight": (64,), f"{JOIN}.hnorm.weight": (64,), f"{JOIN}.eh_proj.weight": (64, 128),
        "norm.weight": (64,),
    }  # fmt: skip
    assert len(shapes) == len(before) + 2 * len(own)
    assert plan.node("setup.mtp").args == {"modules": 2, "weight": 0.3}
    assert plan.node("collate.pack").args["later"] == 2
    assert "later" not in plain.node("collate.pack").args and "setup.mtp" not in {node.op for node in plain.nodes}
    assert from_json(json.loads(dumps(plan))) == plan


def test_operations_are_those_of_a_block_a_projection_and_the_head_again():
    plain, plan = plan_of().architecture, plan_of(", mtp = 1").architecture
    block = sum(each.size for each in plan_of().parameters.tensors if each.name.startswith("layers.0.")) - 2 * 64
    more = training_work(plan, less=_none()).position - training_work(plain, less=_none()).position
    assert more == 6 * (block + 2 * 64 * 64 + plain.vocab * 64)


def _none():
    from xtrain.plan.parameters import BackwardLess

    return BackwardLess()


def test_the_first_values_of_the_model_itself_are_the_same():
    args = [plan_of(model).node("setup.weights").args for model in ("", ", mtp = 1")]
    assert args[0] == args[1]


@pytest.mark.parametrize(
    ("model", "setting"), [(", mtp_weight = 0.1", "mtp_weight"), (", mtp = 1, mtp_weight = 0", "mtp")]
)
def test_what_counts_nothing_is_said(model: str, setting: str):
    (warning,) = compiled(model).diagnostics.warnings
    assert warning.code == "W401" and warning.span is not None and setting in warning.message


LATE = "phase late {{ from = 4 steps, mtp_weight = {} }}"


def test_a_phase_may_weigh_further_tokens_otherwise():
    plain, plan = plan_of(", mtp = 1"), plan_of(", mtp = 1", LATE.format(0.1))
    node = plan.node("step.mtp_weight")
    assert node.args == {"weight": 0.3} and "0.3 in train, 0.1 in late" in node.does
    assert "step.mtp_weight" not in {each.op for each in plain.nodes}
    assert [phase.mtp_weight for phase in plan.timeline.phases] == [None, 0.1]
    assert from_json(json.loads(dumps(plan))) == plan and "mtp_weight" not in dumps(plain).partition('"phases"')[2]
    other = plan_of(", mtp = 1", LATE.format(0.2))
    assert len({plain.config_id, plan.config_id, other.config_id}) == 3
    (reason,) = resumable(plan, other).reasons
    assert reason.path == "phase.late" and "further tokens × 0.1 → × 0.2" in reason.text
    assert plan_of(", mtp = 1, mtp_weight = 0", LATE.format(0.2)).node("step.mtp_weight").args == {"weight": 0.0}
    assert {warning.code for warning in compiled("", LATE.format(0.1)).diagnostics.warnings} == {"W401"}


REFUSED = [
    ("loss cross_entropy { focal = 2.0 }", "", "the loss is cross_entropy"),
    ("parallel { pp 2 { schedule = zero_bubble } }", "", "splits the backward"),
    ("adapter lora { rank = 2 }", "", "an adapter"),
    ("", ", frozen = [embed_tokens]", "the whole model"),
    ("compile { mode = default }", "", "compiled"),
]


@pytest.mark.parametrize(("more", "model", "why"), REFUSED)
def test_what_it_does_not_go_with_is_refused(more: str, model: str, why: str):
    found = compiled(", mtp = 1" + model.replace("embed_tokens", '"embed_tokens"'), more)
    assert found.plan is None
    (error,) = [each for each in found.diagnostics.errors if each.code == "X445"]
    assert why in error.message and error.span is not None and error.span.text == "1"
    assert compiled(model.replace("embed_tokens", '"embed_tokens"'), more).plan is not None


def test_modules_are_on_the_stage_of_the_head():
    """With a copy of the embedding. `layers` are those of the model itself."""
    auto = plan_of(", mtp = 2", "parallel { pp 2 }")
    assert auto.node("setup.build_model").args["stages"][-1][1] == 4 and auto.architecture.layers == 5
    plan = plan_of(", mtp = 2", "parallel { pp 2 { layers = [2, 1] } }")
    assert plan.node("setup.build_model").args["stages"] == [[0, 1], [2, 4]]
    assert "copy on the last stage, used by the further-token modules" in plan.node("step.tied_grad_sync").does
    assert "a copy of the embedding" in render(plan, full=True)
    (error,) = compiled(", mtp = 2", "parallel { pp 2 { layers = [1, 4] } }").diagnostics.errors
    assert error.code == "X404" and "5 layers, but the model 3" in error.message


def test_another_depth_is_another_model_and_another_weight_is_learned_by():
    plan = plan_of(", mtp = 1")
    assert plan.config_id != plan_of().config_id
    deeper, weighted = resumable(plan, plan_of(", mtp = 2")), resumable(plan, plan_of(", mtp = 1, mtp_weight = 0.1"))
    assert deeper.kind == "incompatible" and plan_of(", mtp = 1, mtp_weight = 0.1").config_id != plan.config_id
    assert weighted.kind != "incompatible" and {each.path for each in weighted.reasons} == {"model.mtp_weight"}


def test_a_folder_is_not_read_with_modules(tmp_path: Path, monkeypatch):
    from model_folders import Folder

    monkeypatch.chdir(tmp_path)
    folder = Folder.whole(tmp_path)
    (error,) = folder.plan('"model" { mtp = 1 }').diagnostics.errors
    assert error.code == "X445" and "files of llama have no modules" in error.message
    drawn = folder.plan('"model" { mtp = 1, weights = none }').plan
    assert drawn is not None and drawn.architecture.mtp == 1
