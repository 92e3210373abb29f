"""Plans of runs that learn from a teacher: what each setting changes, and which teachers are refused."""

import json
import math
import shutil

import pytest
from model_folders import CONFIG, safetensors, shapes
from teachers import make_teacher

from xtrain.planner.load import plan_from_path
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text

LOSS = 'loss distill {{ teacher = "teacher", {} }}'


@pytest.fixture
def plan_of(make_plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda settings, **blocks: make_plan(loss=LOSS.format(settings), **blocks)


def test_the_plan_shows_the_teacher_and_what_is_read_of_it(plan_of):
    plan = plan_of("form = jsd, beta = 0.2, temperature = 2, mix = 0.5, top = 10")
    assert plan.node("setup.loss").args == {
        "kind": "distill", "form": "jsd", "beta": 0.2, "temperature": 2.0, "mix": 0.5
    }  # fmt: skip
    assert "jsd of β 0.2" in plan.node("setup.loss").does and "its 10 most probable" in plan.node("setup.loss").does
    node = plan.node("setup.teacher.code")
    sequence = plan.node("setup.loader").args["sequence"]
    assert node.args == {
        "dataset": "code", "folder": "teacher", "top": 10, "temperature": 2.0, "precision": "fp32", "sequence": sequence
    }  # fmt: skip
    assert "84 B a token" in node.does
    assert plan.node("collate.pack").args["wide"] == {
        "teacher_ids": {"width": 10, "format": "int32"},
        "teacher_logprobs": {"width": 11, "format": "float32"},
    }
    edges = {(edge.before, edge.after) for edge in plan.edges}
    assert {("setup.data.code", "setup.teacher.code"), ("setup.teacher.code", "collate.to_tensor")} <= edges


def test_each_setting_is_another_experiment(plan_of):
    base = plan_of("form = jsd")
    others = ("form = forward_kl", "form = jsd, beta = 0.4", "form = jsd, temperature = 2", "form = jsd, mix = 0.1",
              "form = jsd, top = 32", "form = jsd, z_loss = 0.1")  # fmt: skip
    plans = [base, *map(plan_of, others)]
    assert len({plan.config_id for plan in plans}) == len(plans)
    for other in plans[1:]:
        assert [each.args for each in other.nodes] != [each.args for each in base.nodes]
        verdict = resumable(base, other)
        assert verdict.kind == "safe" and {reason.effect for reason in verdict.reasons} == {"learning"}, verdict


def test_what_is_evaluated_is_measured_by_its_teacher_too(plan_of):
    both = "dataset code { source = synthetic() }\ndataset web { source = synthetic(), holdout = 100% }"
    plan = plan_of("top = 8", dataset=both, every="every 10 steps eval web")
    assert [node.args["dataset"] for node in plan.nodes if node.op == "setup.teacher"] == ["code", "web"]
    assert next(node for node in plan.nodes if node.op == "tick.eval").args["objective"] == "token"


def errors_of(tmp_path, settings, **blocks):
    (tmp_path / "spec.xtrain").write_text(spec_text(loss=LOSS.format(settings), **blocks))
    return [each for each in plan_from_path(tmp_path / "spec.xtrain").diagnostics if each.severity == "error"]


# (keys of its config.json that are others, part of the message)
TEACHERS = [
    ({}, ""),
    ({"vocab_size": 300}, "has a vocabulary of 300, and the model one of 258"),
    # Computed by transformers' code, with other weights; that is inspected first.
    pytest.param({"model_type": "gpt_neox"}, "gpt_neox.embed_in.weight", marks=pytest.mark.slow),
    ({"num_hidden_layers": 3}, "layers.2"),
]


@pytest.mark.parametrize(("changed", "message"), TEACHERS)
def test_a_teacher_must_be_a_model_of_the_same_tokens(changed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**CONFIG, "vocab_size": 258}
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / "teacher" / "model.safetensors").write_bytes(safetensors(shapes(config)))
    errors = errors_of(tmp_path, "top = 8")
    assert len(errors) == bool(message)
    for error in errors:
        assert message in error.message and "teacher" in error.message and error.hint
        assert (tmp_path / "spec.xtrain").read_text()[error.span.start :].startswith('"teacher"')


def test_a_tokenizer_with_other_ids_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("own", ("a", "b", "c")), ("teacher", ("a", "c", "b"))):
        (tmp_path / name).mkdir()
        vocab = {token: number for number, token in enumerate((*tokens, "</s>"))}
        content = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    config = {**CONFIG, "vocab_size": 4}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config))
    (tmp_path / "teacher" / "model.safetensors").write_bytes(safetensors(shapes(config)))
    (error,) = errors_of(tmp_path, "top = 2", tokenizer='tokenizer "own"')
    assert error.code == "X441" and 'token "b" is 2 there and 1 in own' in error.message


# of a teacher that computes beside the model ------------------------------------------------------------------------


@pytest.fixture
def live_plan_of(make_plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_teacher(tmp_path / "teacher", 258)
    return lambda settings="", **blocks: make_plan(loss=LOSS.format(f"live = true, {settings}"), **blocks)


def test_the_plan_shows_a_live_teacher(live_plan_of):
    plan = live_plan_of("form = jsd", precision="precision { params = fp32, compute = bf16 }")
    assert plan.node("setup.loss").args["live"] is True and "all tokens" in plan.node("setup.loss").does
    built, reads = plan.node("setup.teacher_model"), plan.node("setup.read_teacher")
    assert built.args["format"] == "bf16" and built.args["architecture"]["family"] == "llama"
    assert reads.args["folder"] == "teacher" and len(reads.args["digest"]) == 32
    assert not [node for node in plan.nodes if node.op == "setup.teacher"]
    assert "wide" not in plan.node("collate.pack").args
    assert "a forward of teacher" in plan.node("step.forward_backward").does
    edges = {(edge.before, edge.after) for edge in plan.edges}
    assert {("setup.teacher_model", "setup.teacher_weights"), ("setup.teacher_weights", "setup.read_teacher")} <= edges


def test_a_live_teacher_is_counted(live_plan_of, make_plan):
    live, plain = live_plan_of(), make_plan()
    (beside,), (alone,) = live.estimates.classes, plain.estimates.classes
    size = sum(math.prod(shape) for shape in shapes({**CONFIG, "vocab_size": 258}).values())
    assert beside.memory.parameters == alone.memory.parameters + 4 * size
    assert beside.memory.gradients == alone.memory.gradients
    matrices = size - 258 * 32 - 5 * 32  # without the embedding and norms
    assert beside.hardware_flops - alone.hardware_flops > 2 * matrices * live.estimates.tokens_per_step
    assert live.estimates.checkpoint_bytes == plain.estimates.checkpoint_bytes


def test_another_live_teacher_is_another_experiment(live_plan_of, plan_of, tmp_path):
    base, stored = live_plan_of("form = jsd"), plan_of("form = jsd")
    make_teacher(tmp_path / "teacher", 258, num_hidden_layers=3)
    larger = live_plan_of("form = jsd")
    assert len({base.config_id, stored.config_id}) == 2 and base.id != larger.id
    for other in (stored, larger):
        verdict = resumable(base, other)
        assert verdict.kind == "safe" and {reason.effect for reason in verdict.reasons} == {"learning"}, verdict


ODD = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
# (keys of the teacher's config.json, blocks of the spec, code, part of the message)
UNFIT = [
    (ODD, "parallel { cp 2 { ulysses = 2 } }", "X402", "cannot be split over ulysses 2"),
    ({"num_key_value_heads": 4}, "parallel { cp 2 { ulysses = 2 } }", "", ""),
    (ODD, "parallel { tp 2 }", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "parallel", "code", "message"), UNFIT)
def test_a_layout_must_fit_both_models(changed, parallel, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_teacher(tmp_path / "teacher", 258, **changed)
    errors = errors_of(tmp_path, "live = true", parallel=parallel)
    assert len(errors) == bool(code)
    for error in errors:
        assert error.code == code and message in error.message and "teacher" in error.message and "live" in error.hint


def test_nothing_is_stored_of_a_live_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_teacher(tmp_path / "teacher", 258)
    (tmp_path / "spec.xtrain").write_text(spec_text(loss=LOSS.format("live = true, top = 8")))
    found = plan_from_path(tmp_path / "spec.xtrain").diagnostics
    assert [(each.code, each.message) for each in found if "top" in each.message] == [
        ("W401", "top has no effect: nothing is stored with a live teacher")
    ]
    shutil.rmtree(tmp_path / "teacher")
    (error,) = errors_of(tmp_path, "live = true")
    assert error.code == "X441" and "has no config.json" in error.message
