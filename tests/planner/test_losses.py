"""Losses in plans: a node where something else than the cross-entropy is minimised, and nothing new where not."""

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.compare.resumable import resumable
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
