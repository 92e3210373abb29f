"""Losses in plans: a node where something else than the cross-entropy is minimised, and nothing new where not."""

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.compare.resumable import resumable
from xtrain.planner.load import plan_from_path
from xtrain.planner.report.show_why import show_why

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
    assert node.does == "minimise cross-entropy with 0.1 of each label spread evenly over the vocabulary; " + (
        "`loss` stays the plain one"
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
    ("dpo", PAIRS, "source", "reads `ref_logprobs`", 'columns = { ref_logprobs: "ref_logprobs" }'),
    ("dpo", PAIRS + ', columns = { ref_logprobs: "r" }', "", "", ""),
    ("cross_entropy", PAIRS, "chosen", "would learn rejected answers", "dpo"),
    ("cross_entropy { weighted = true }", ANSWERS, "source", "reads `weights`", "columns"),
    ("cross_entropy { weighted = true }", ANSWERS + ', columns = { weights: "w" }', "", "", ""),
    ("kto", ANSWERS + ', columns = { ref_logprobs: "r" }, oversized = skip', "source", "`label`", "write `label = "),
    ("kto", ANSWERS + ', label = "ok", columns = { ref_logprobs: "r" }', "", "", ""),
    ("ppo", SAMPLED, "", "", ""),
    ("grpo", SAMPLED, "oversized", "longer than a row are split", "oversized = skip"),
    ("grpo", SAMPLED + ", oversized = truncate", "", "", ""),
    ("gspo { kl = k3, kl_weight = 0.1 }", SAMPLED + ", oversized = skip", "source", "`ref_logprobs`", "columns"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "dataset", "setting", "message", "hint"), READS)
def test_a_dataset_must_have_what_the_loss_reads(loss, dataset, setting, message, hint, tmp_path):
    (tmp_path / "spec.xtrain").write_text(spec_text(dataset=dataset + " }", loss=f"loss {loss}"))
    errors = [each for each in plan_from_path(tmp_path / "spec.xtrain").diagnostics if each.severity == "error"]
    assert [each.code for each in errors] == (["X527"] if setting else [])
    for error in errors:
        assert message in error.message and hint in error.hint and error.message.startswith("dataset code: the loss ")


# (settings, the one that is wrong, part of the hint)
MISFITS = [
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


@pytest.mark.parametrize(("settings", "wrong", "hint"), MISFITS)
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
    dataset = PAIRS + ', columns = { ref_logprobs: "r" } }'
    plain, pairs = (make_plan(dataset=dataset, loss=f"loss {loss}") for loss in ("simpo", "dpo"))
    for plan, columns in ((plain, None), (pairs, ["ref_logprobs"])):
        assert plan.node("collate.pack").args["unit"] == "pair" == plan.node("step.agree").args["unit"]
        assert plan.node("collate.pack").args.get("columns") == columns
        assert "pairs of the whole step" in plan.node("step.forward_backward").does
        assert "the head is computed twice" in plan.node("setup.loss").does
    tokens = make_plan()
    again = pairs.estimates.work.position_again - tokens.estimates.work.position_again
    assert again == 2 * tokens.architecture.vocab * tokens.architecture.dim
