"""Losses in plans: a node where something else than the cross-entropy is minimised, and nothing new where not."""

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.resumable import resumable
from xtrain.planner.review.why import show_why

from .conftest import spec_text


def loss(settings: str) -> dict[str, str]:
    return {"loss": f"loss cross_entropy {{ {settings} }}"}


@pytest.fixture
def plans(make_plan):
    return {
        name: make_plan(**loss(name)) for name in ("z_loss = 0.0", "label_smoothing = 0.0", "label_smoothing = 0.1")
    }


def test_no_smoothing_is_no_change_of_a_plan(make_plan, plans):
    plain = make_plan()
    for name in ("z_loss = 0.0", "label_smoothing = 0.0"):
        assert (plans[name].id, plans[name].config_id) == (plain.id, plain.config_id)
    assert "label_smoothing" not in str(plain) and "setup.loss" not in str(plain)


def test_smoothing_is_a_node_and_another_experiment(make_plan, plans):
    plain, smoothed = make_plan(), plans["label_smoothing = 0.1"]
    node = smoothed.node("setup.loss")
    assert node.args == {"kind": "cross_entropy", "label_smoothing": 0.1}
    assert node.does == "minimize cross-entropy with 0.1 of each label spread evenly over the vocabulary; " + (
        "`loss` is the plain cross-entropy"
    )
    assert smoothed.config_id != plain.config_id
    assert smoothed.estimates.classes[0].memory == plain.estimates.classes[0].memory


def test_a_run_may_go_on_with_another_smoothing(make_plan, plans):
    more = make_plan(**loss("label_smoothing = 0.2"))
    for a, b, values in (
        (make_plan(), plans["label_smoothing = 0.1"], "none → 0.1"),
        (plans["label_smoothing = 0.1"], more, "0.1 → 0.2"),
        (more, make_plan(), "0.2 → none"),
    ):
        verdict = resumable(a, b)
        (reason,) = verdict.reasons
        assert (verdict.kind, reason.effect, reason.path) == ("safe", "learning", "loss.label_smoothing")
        assert reason.text == f"{values}: labels are smoothed by it from here on"


def test_why_explains_a_default_that_plans_are_silent_on(make_plan, tmp_path):
    (tmp_path / "spec.xtrain").write_text(spec_text())
    spec = load_spec(tmp_path / "spec.xtrain").require()
    page = show_why(make_plan(), spec, "loss.label_smoothing")
    assert "loss.label_smoothing = 0" in page and "share of each label" in page and "setup.loss" in page


def test_a_share_of_one_is_out_of_range(tmp_path):
    (tmp_path / "spec.xtrain").write_text(spec_text(**loss("label_smoothing = 1.0")))
    (error,) = load_spec(tmp_path / "spec.xtrain").diagnostics.errors
    assert (error.code, error.message) == ("X304", "`label_smoothing` must be at least 0 and below 1")


# What the loss reads of data -----------------------------------------------------------------------------------------

PAIRS = 'dataset code { source = jsonl("a/*.jsonl"), chosen = "chosen", rejected = "rejected"'
SAMPLED = 'dataset code { source = jsonl("a/*.jsonl"), tokens = "tokens", columns = { logprobs: "l", advantages: "a" }'
ANSWERS = 'dataset code { source = jsonl("a/*.jsonl"), prompt = "q", response = "a", template = "plain"'
# (loss, dataset, setting that is wrong, part of the message, part of the hint); no setting: nothing is wrong.
READS = [
    ("simpo", PAIRS, "", "", ""),
    ("simpo", ANSWERS, "source", "compares pairs", "chosen = "),
    ("dpo { reference = precomputed }", PAIRS, "source", "reads `ref_logprobs`", 'columns = { ref_logprobs: "ref_log'),
    ("dpo", PAIRS, "", "", ""),
    ("dpo { reference = precomputed }", PAIRS + ', columns = { ref_logprobs: "r" }', "", "", ""),
    ("cross_entropy", PAIRS, "chosen", "would learn rejected answers", "dpo"),
    ("cross_entropy { weighted = true }", ANSWERS, "source", "reads `weights`", "columns"),
    ("cross_entropy { weighted = true }", ANSWERS + ', columns = { weights: "w" }', "", "", ""),
    ("kto", ANSWERS + ", oversized = skip", "source", "`label`", "write `label = "),
    ("kto", ANSWERS + ', label = "ok"', "", "", ""),
    ("ppo", SAMPLED, "", "", ""),
    ("grpo", SAMPLED, "oversized", "longer than a row are split", "oversized = skip"),
    ("grpo", SAMPLED + ", oversized = truncate", "", "", ""),
    ("gspo { kl = k3, kl_weight = 0.1 }", SAMPLED + ", oversized = skip", "", "", ""),
    ("gspo { kl = k3, kl_weight = 0.1, reference = precomputed }", SAMPLED + ", oversized = skip", "source",
     "`ref_logprobs`", "columns"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "dataset", "setting", "message", "hint"), READS)
def test_a_dataset_must_have_what_the_loss_reads(loss, dataset, setting, message, hint, tmp_path):
    (tmp_path / "spec.xtrain").write_text(spec_text(dataset=dataset + " }", loss=f"loss {loss}"))
    errors = [each for each in plan_from_path(tmp_path / "spec.xtrain").diagnostics if each.severity == "error"]
    assert [each.code for each in errors] == (["X527"] if setting else [])
    for error in errors:
        assert message in error.message and hint in error.hint and error.message.startswith("dataset code: the loss ")


LABELLED = ANSWERS + ', label = "ok" }'


def test_an_estimated_point_is_a_forward_in_each_step_and_numbers_of_a_reference(tmp_path):
    plans = {}
    for name, loss in (("fixed", "kto"), ("estimated", "kto { reference_point = estimated }")):
        (tmp_path / "spec.xtrain").write_text(spec_text(dataset=LABELLED, loss=f"loss {loss}"))
        plans[name] = plan_from_path(tmp_path / "spec.xtrain").plan
    fixed, estimated = plans["fixed"], plans["estimated"]
    assert fixed is not None and estimated is not None and fixed.config_id != estimated.config_id
    more = {node.id for node in estimated.nodes} - {node.id for node in fixed.nodes}
    assert more == {"step.reference_point", "setup.reference.code.mismatched"}
    steps = [node.id for node in estimated.nodes if node.kind == "step"]
    assert steps[steps.index("step.reference_point") + 1] == "step.forward_backward"
    args = [estimated.node(f"setup.reference.code{each}").args for each in ("", ".mismatched")]
    assert args[1] == {**args[0], "parts": ["training"], "mismatched": True}
    assert resumable(fixed, estimated).kind == "safe"
    costs = [each.estimates.classes[0] for each in (fixed, estimated)]
    assert costs[1].hardware_flops == costs[0].hardware_flops + fixed.estimates.flops_per_step // 3


@pytest.mark.parametrize(("setting", "more", "code", "message"), [
    ("reference_point = estimated, reference = precomputed", "", "X439", "no dataset has them"),
    ("reference_point = estimated", "to_tensor -> flatten -> shift_tokens -> pack(single)", "X527", "it holds one"),
    ("reference_point = guessed", "", "X202", "guessed"),
    ("reference_point = -1", "", "X304", "must not be negative"),
])  # fmt: skip
def test_where_a_point_cannot_be_estimated(setting, more, code, message, tmp_path):
    chain = f"collate = {more}" if more else ""
    text = spec_text(dataset=LABELLED, loss=f"loss kto {{ {setting} }}", collate=chain)
    (tmp_path / "spec.xtrain").write_text(text)
    errors = plan_from_path(tmp_path / "spec.xtrain").diagnostics.errors
    assert any(each.code == code and message in each.message for each in errors), errors


TALKS = 'dataset code { source = jsonl("a/*.jsonl"), messages = "m", template = "plain", message_weight = "w"'
# (loss, dataset, settings that give what is not read, part of the hint of the first)
UNREAD = [
    ("cross_entropy", SAMPLED, {"columns.advantages": "advantages", "columns.logprobs": "logprobs"}, "ppo"),
    ("cross_entropy", TALKS, {"message_weight": "weights"}, "write `loss cross_entropy { weighted = true }`"),
    ("cross_entropy { weighted = true }", TALKS, {}, ""),
    ("cross_entropy", ANSWERS + ', label = "ok"', {"label": "label"}, "choose a loss that reads it: kto"),
    ("cross_entropy", ANSWERS + ', values = { margin: "m" }', {"values.margin": "margin"}, "remove it"),
    ("bradley_terry", PAIRS + ', values = { margin: "m" }', {"values.margin": "margin"}, "{ margin = true }"),
    ("simpo", PAIRS + ', columns = { ref_logprobs: "r" }', {"columns.ref_logprobs": "ref_logprobs"}, "dpo"),
    ("dpo { reference = precomputed }", PAIRS + ', columns = { ref_logprobs: "r" }', {}, ""),
    ("ppo", SAMPLED.replace(' }', ', ref_logprobs: "r" }'), {"columns.ref_logprobs": "ref_logprobs"}, "kl = k3"),
    ("ppo { kl = k3, kl_weight = 1, reference = precomputed }", SAMPLED.replace(' }', ', ref_logprobs: "r" }'), {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "dataset", "idle", "hint"), UNREAD)
def test_numbers_that_nothing_reads_are_reported(loss, dataset, idle, hint, tmp_path):
    (tmp_path / "spec.xtrain").write_text(spec_text(dataset=dataset + " }", loss=f"loss {loss}"))
    result = plan_from_path(tmp_path / "spec.xtrain")
    assert result.plan is not None
    found = [each for each in result.plan.checks if each.code == "W401"]
    assert [each.id for each in found] == [f"idle.dataset.code.{setting}" for setting in idle]
    warned = sorted((each for each in result.diagnostics if each.code == "W401"), key=lambda each: each.message)
    for each, number in zip(warned, idle.values(), strict=True):
        kind = loss.partition(" ")[0]
        assert each.message == f"dataset code: the loss {kind} does not read `{number}`"
        assert each.span is not None and each.span.text.startswith('"')
    assert not idle or hint in warned[0].hint


def test_what_a_collator_of_ones_own_reads_is_not_known(tmp_path):
    (tmp_path / "mine.py").write_text(
        'from xtrain import collator\n@collator(takes="token samples")\ndef mine(samples):\n    yield from samples\n'
    )
    chain = 'use "mine.py"\ncollate = to_tensor -> flatten -> mine() -> shift_tokens -> pack'
    (tmp_path / "spec.xtrain").write_text(spec_text(dataset=SAMPLED + " }", collate=chain))
    assert not [each for each in plan_from_path(tmp_path / "spec.xtrain").diagnostics if each.code == "W401"]


HELD = ", holdout = 10%"
MEASURED = [
    ("cross_entropy", ANSWERS + HELD, None, "loss on the first 20 held-out rows of code"),
    ("cross_entropy { focal = 1 }", ANSWERS + HELD, "token", "loss and cross_entropy on the first 20 held-out rows"),
    ("simpo", PAIRS + HELD, "pair", "loss and simpo and its metrics on the first 20 held-out rows of code"),
    ("grpo", SAMPLED + ", oversized = skip" + HELD, "sequence", "loss and grpo and its metrics on the first 20"),
    ("ppo", SAMPLED + HELD, "token", "loss and ppo and its metrics on the first 20 held-out rows"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "dataset", "objective", "does"), MEASURED)
def test_evaluations_measure_what_is_minimised(loss, dataset, objective, does, make_plan):
    plan = make_plan(dataset=dataset + " }", loss=f"loss {loss}", every="every 10 steps eval code")
    node = plan.node("tick.eval.code")
    assert node.args.get("objective") == objective and node.does.startswith(does)


def test_of_other_documents_evaluations_measure_the_cross_entropy(make_plan, compiled):
    both = PAIRS + ' }\ndataset web { source = text("*.txt"), holdout = 100% }\nmixture { code = 1 }'
    blocks = {"dataset": both, "loss": "loss simpo", "every": "every 10 steps eval web then checkpoint"}
    assert "objective" not in make_plan(**blocks).node("tick.eval.web").args
    (error,) = compiled(**blocks, more="checkpoint { best = eval.web.objective }").diagnostics.errors
    assert error.code == "X620" and error.hint == "write `best = eval.web.loss`"
    best = "checkpoint { best = eval.code.objective }"
    blocks |= {"dataset": both.replace(" }", HELD + " }", 1), "every": "every 10 steps eval code then checkpoint"}
    assert make_plan(**blocks, more=best).node("setup.checkpoint").args["best"] == "eval/code/objective"


# (settings, the one that is wrong, part of the hint)
CONFLICTS = [
    ("dpo { form = ipo, label_smoothing = 0.1 }", "label_smoothing", "robust"),
    ("dpo { form = robust }", "form", "label_smoothing = 0.1"),
    ("dpo { form = ipo, length_normalised = true }", "length_normalised", "remove"),
    ("cpo { form = hinge, label_smoothing = 0.1 }", "label_smoothing", "sigmoid"),
    ("grpo { normalise = dr_grpo }", "normalise", "max_tokens = 1024"),
    ("ppo { max_tokens = 10 }", "max_tokens", "dr_grpo"),
    ("ppo { kl_weight = 0.1 }", "kl_weight", "kl = k3"),
    ("ppo { kl = k1 }", "kl", "kl_weight"),
    ("ppo { dual_clip = 1.1 }", "dual_clip", "more than 1.2"),
    ("cispo { ratio_low = 6 }", "ratio_low", "less than 5"),
]


@pytest.mark.parametrize(("settings", "wrong", "hint"), CONFLICTS)
def test_settings_that_exclude_each_other_are_reported(settings, wrong, hint, tmp_path):
    columns = 'columns = { logprobs: "l", advantages: "a", ref_logprobs: "r" }, oversized = skip'
    dataset = f"{PAIRS if settings.startswith(('dpo', 'cpo')) else ANSWERS}, {columns} }}"
    (tmp_path / "spec.xtrain").write_text(spec_text(dataset=dataset, loss=f"loss {settings}"))
    (error,) = [e for e in plan_from_path(tmp_path / "spec.xtrain").diagnostics if e.severity == "error"]
    assert error.code == "X439" and hint in error.hint
    place = (tmp_path / "spec.xtrain").read_text()[error.span.start :]
    assert place.startswith((settings.partition(f"{wrong} = ")[2] or wrong).split(",")[0].split(" ")[0])


def test_weights_and_a_focal_loss_are_another_experiment(make_plan):
    dataset = ANSWERS + ', columns = { weights: "w" } }'
    plain, weighted, focal = (
        make_plan(dataset=dataset, loss=f"loss cross_entropy {{ {each} }}")
        for each in ("weighted = false, focal = 0", "weighted = true", "focal = 2")
    )
    assert len({plan.config_id for plan in (plain, weighted, focal)}) == 3
    assert plain.id == make_plan(dataset=dataset).id
    assert weighted.node("setup.loss").args == {"kind": "cross_entropy", "weighted": True}
    assert (
        weighted.node("collate.pack").args["columns"] == ["weights"] and "unit" not in weighted.node("step.agree").args
    )
    (reason,) = resumable(plain, focal).reasons
    assert (reason.kind, reason.effect, reason.path) == ("safe", "learning", "loss.focal")
    assert compare_of(plain, weighted) == ("safe", "loss.weighted")


def compare_of(a, b):
    (reason,) = resumable(a, b).reasons
    return reason.kind, reason.path


def test_the_plan_of_a_loss_of_pairs_shows_its_unit_and_what_it_costs(make_plan):
    dataset = PAIRS + " }"
    plain, pairs = (make_plan(dataset=dataset, loss=f"loss {loss}") for loss in ("simpo", "dpo"))
    for plan, columns in ((plain, None), (pairs, ["ref_logprobs"])):
        assert plan.node("collate.pack").args["unit"] == "pair" == plan.node("step.agree").args["unit"]
        assert plan.node("collate.pack").args.get("columns") == columns
        assert "pairs of the whole step" in plan.node("step.forward_backward").does
        assert "the head is computed twice" in plan.node("setup.loss").does
    tokens = make_plan()
    again = pairs.estimates.work.position_again - tokens.estimates.work.position_again
    assert again == 2 * tokens.architecture.vocab * tokens.architecture.dim
