"""References of losses in plans: the node that computes them, what it costs, and why some cannot be computed."""

import json
from pathlib import Path

import pytest
from model_folders import CONFIG, safetensors, shapes

from xtrain.plan.plan import Plan
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text
from .test_losses import PAIRS, SAMPLED

OWN = """
from xtrain import collator

@collator(takes="labelled samples")
def halves(samples): ...
"""
MODEL = (
    "model llama { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, rope_theta = 5e5, "
    "norm_eps = 1e-5 }"
)


def write_model(folder: Path, **changes: object) -> None:
    """A folder as transformers saves it, with other keys."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(shapes(config)))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(OWN)


def compiled(loss: str, dataset: str = PAIRS, **blocks: str):
    Path("spec.xtrain").write_text(spec_text(dataset=f"{dataset} }}", loss=f"loss {loss}", **blocks))
    return plan_from_path(Path("spec.xtrain"))


def plan_of(loss: str, dataset: str = PAIRS, **blocks: str) -> Plan:
    found = compiled(loss, dataset, **blocks)
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def references(plan: Plan) -> list[str]:
    return [node.id for node in plan.nodes if node.op == "setup.reference"]


def test_the_plan_shows_what_is_computed_by_whom_and_what_it_costs():
    plan = plan_of("dpo {}", cluster="cluster other { flops = 1e12, link = 1 GiB, network = 1 GiB, memory = 8 GiB }")
    node = plan.node("setup.reference.code")
    assert node.args == {"dataset": "code", "reference": "initial", "format": "fp32"}
    assert "under the initial weights of the run" in node.does and "4 bytes a token" in node.does
    assert "a forward of " in node.does and " a row, about " in node.does
    pack = plan.node("collate.pack").args
    assert pack["columns"] == pack["computed"] == ["ref_logprobs"]
    order = [node.id for node in plan.nodes]
    assert order.index("setup.weights") < order.index(node.id) < order.index("setup.loader")
    edges = {(edge.before, edge.after) for edge in plan.edges}
    assert {("setup.weights", node.id), ("collate.microbatches", node.id), (node.id, "setup.loader")} <= edges
    assert "about" not in plan_of("dpo {}").node("setup.reference.code").does
    assert "ref_logprobs" in render(plan)
    assert "8 bytes a token" in plan_of("dpo {}", precision="precision { params = fp64 }").node(node.id).does


def test_nothing_is_computed_that_no_loss_reads():
    given = PAIRS + ', columns = { ref_logprobs: "r" }'
    assert not references(plan_of("dpo { reference = precomputed }", given))
    assert not references(plan_of("simpo")) and not references(plan_of("ppo", SAMPLED))
    assert references(plan_of("ppo { kl = k1, kl_weight = 0.1 }", SAMPLED)) == ["setup.reference.code"]


def test_each_dataset_that_is_trained_on_or_evaluated_has_a_node():
    more = PAIRS.replace("dataset code", "dataset more") + " }\n" + PAIRS.replace("dataset code", "dataset seen")
    mixed = {"mixture": "mixture { code = 1, more = 1 }", "every": "every 10 steps eval seen"}
    plan = plan_of("dpo {}", f"{PAIRS} }}\n{more}, holdout = 100%", **mixed)
    assert references(plan) == ["setup.reference.code", "setup.reference.more", "setup.reference.seen"]
    assert "parts" not in plan.node("setup.reference.code").args
    seen = plan.node("setup.reference.seen")
    assert seen.args["parts"] == ["hold-out"] and "labels of held-out rows of seen" in seen.does
    assert plan.node("tick.eval.seen").args["objective"] == "pair"
    held = plan_of("dpo {}", f"{PAIRS}, holdout = 10%", every="every 10 steps eval code")
    node = held.node("setup.reference.code")
    assert node.args["parts"] == ["training", "hold-out"] and "of code and its held-out rows" in node.does
    asked = plan_of("dpo {}", f"{PAIRS}, holdout = 10%")  # by `xtrain control`
    (command,) = (each for each in asked.timeline.commands if each.name == "eval code")
    assert asked.node(command.nodes[0]).args["objective"] == "pair"
    assert asked.node("setup.reference.code").args == node.args


def test_another_reference_is_another_experiment_and_a_run_may_go_on_with_it():
    adapter = {"adapter": "adapter lora { rank = 2 }"}
    given = PAIRS + ', columns = { ref_logprobs: "r" }'
    plans = [plan_of(f"dpo {{ reference = {each} }}", given, **adapter) for each in ("initial", "adapter_off")]
    plans.append(plan_of("dpo { reference = precomputed }", given, **adapter))
    assert len({plan.id for plan in plans}) == len({plan.config_id for plan in plans}) == 3
    assert plans[0].id == plan_of("dpo {}", given, **adapter).id
    for a, b, change in ((0, 1, "initial → adapter_off"), (1, 2, "adapter_off → precomputed")):
        (reason,) = resumable(plans[a], plans[b]).reasons
        assert (reason.kind, reason.effect, reason.path) == ("safe", "learning", "loss.reference")
        assert reason.text.startswith(change)


def test_the_model_in_a_folder_takes_the_place_of_that_of_the_run(tmp_path):
    write_model(tmp_path / "sft")
    plan = plan_of('dpo { reference = "sft" }', model=MODEL)
    args = plan.node("setup.reference.code").args
    assert args["reference"] == "sft" and len(args["digest"]) == 32
    assert "the model in sft (1 file with " in plan.node("setup.reference.code").does
    write_model(tmp_path / "sft", torch_dtype="float32")  # metadata
    assert plan_of('dpo { reference = "sft" }', model=MODEL).config_id == plan.config_id
    (tmp_path / "sft" / "model.safetensors").write_bytes(safetensors(shapes(), dict.fromkeys(shapes(), "F32")))
    assert plan_of('dpo { reference = "sft" }', model=MODEL).config_id != plan.config_id


# (reference, blocks, parts of the message, part of the hint)
WRONG = [
    ("adapter_off", {}, ["there is no adapter"], "reference = initial"),
    ("initial", {"checkpoint": 'checkpoint { from = "runs/a" }'}, ["random numbers"], "pretrained"),
    ("initial", {"collate": 'use "parts.py"\ncollate = to_tensor -> flatten -> shift_tokens -> halves() -> pack'},
     ["`halves`", "changes documents"], "reference = precomputed"),
    ('"nowhere"', {}, ["nowhere", "no folder"], "`initial`"),
    ('"sft"', {"model": MODEL.replace("ffn = 48", "ffn = 64")}, ["`ffn`", "sft", "48", "64"], "same architecture"),
    ('"sft"', {"model": MODEL.replace("5e5", "1e4")}, ["`rope_theta`", "500000", "10000"], "same architecture"),
    ('"sft"', {"model": MODEL.replace("llama", "qwen3")}, ["`family`", "llama", "qwen3"], "same architecture"),
    ('"cut"', {"model": MODEL}, ["cut off"], "download"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "blocks", "message", "hint"), WRONG)
def test_a_reference_that_cannot_be_computed_is_reported(reference, blocks, message, hint, tmp_path):
    for name in ("sft", "cut"):
        write_model(tmp_path / name)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = compiled(f"dpo {{ reference = {reference} }}", **blocks).diagnostics
    (error,) = found.errors
    assert error.code == "X444" and all(part in error.message for part in message) and hint in error.hint
    if reference != "initial":
        assert error.span is not None and error.span.text == reference


# (loss, dataset, path, part of the message)
IDLE = [
    ("dpo {}", PAIRS + ', columns = { ref_logprobs: "r" }', "dataset.code.columns", "the run computes it"),
    ("ppo { reference = adapter_off }", SAMPLED, "loss.reference", "does not read `ref_logprobs`"),
]


@pytest.mark.parametrize(("loss", "dataset", "path", "message"), IDLE)
def test_what_has_no_effect_is_said(loss, dataset, path, message):
    (warning,) = [each for each in compiled(loss, dataset).diagnostics.warnings if each.code == "W401"]
    assert message in warning.message and (path != "loss.reference" or warning.span.text == "adapter_off")


def test_a_word_that_is_none_is_reported_and_a_text_is_a_folder(load):
    Path("spec.xtrain").write_text(spec_text(dataset=f"{PAIRS} }}", loss="loss dpo { reference = inital }"))
    (error,) = plan_from_path(Path("spec.xtrain")).diagnostics.errors
    assert error.code == "X305" and "initial" in (error.hint or "")
    quoted = load(dataset=f"{PAIRS} }}", loss='loss dpo { reference = "precomputed" }')
    assert quoted.loss.reference == "precomputed" and compile_plan(quoted).plan is None
