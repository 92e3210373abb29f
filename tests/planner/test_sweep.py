"""The plan of a sweep: points, their mistakes, their cost, and what they share."""

from pathlib import Path

import pytest
from sweeps import write_spec

from xtrain.components.searches.random import drawn
from xtrain.dsl.load import load_spec
from xtrain.dsl.values import Between, Listed
from xtrain.planner.compile_sweep import compile_sweep, corners
from xtrain.planner.load import check_from_spec, plan_from_spec
from xtrain.planner.review.sweep import render_sweep, share_trained


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def planned(path: str, *sets: str):
    compiled = compile_sweep(path, sets)
    assert compiled is not None
    assert compiled.plan is not None, compiled.diagnostics.render(color=False)
    return compiled.plan


def refused(path: str, *sets: str) -> str:
    compiled = compile_sweep(path, sets)
    assert compiled is not None and compiled.plan is None
    return compiled.diagnostics.render(color=False)


def test_dimensions_draw_what_they_say():
    rate = Between(low=1e-4, high=1e-2, log=True)
    assert (rate.at(0.0), rate.at(0.5)) == ("0.0001", "0.001")
    assert rate.ends() == ("0.0001", "0.01")
    whole = Between(low=2, high=4, whole=True)
    assert [whole.at(share) for share in (0.0, 0.3, 0.34, 0.66, 0.67, 0.999)] == ["2", "2", "3", "3", "4", "4"]
    assert whole.grid() == ("2", "3", "4")
    assert Between(low=1, high=100, log=True, points=3).grid() == ("1.0", "10.0", "100.0")
    assert Between(low=1, high=3, unit="steps", whole=True).ends() == ("1 steps", "3 steps")
    assert [Listed(("a", "b")).at(share) for share in (0.0, 0.49, 0.5, 0.99)] == ["a", "a", "b", "b"]


def test_a_point_depends_on_its_number_and_setting_alone():
    over = {"a": Between(low=0.0, high=1.0), "b": Listed(("x", "y"))}
    assert drawn(over, 0, 5)["a"] == drawn({"a": over["a"]}, 0, 5)["a"]
    assert drawn(over, 0, 5) != drawn(over, 0, 6) and drawn(over, 1, 5) != drawn(over, 0, 5)


def test_corners_are_every_end_with_every_other_while_these_are_few():
    two = {"a": Listed(("1", "2", "3")), "b": Between(low=0.0, high=1.0)}
    assert len(corners(two)) == 6
    many = {f"a{number}": Between(low=0.0, high=1.0) for number in range(6)}
    found = corners(many)
    assert len(found) == 2 + 12
    assert dict.fromkeys(many, "0.0") in found and dict.fromkeys(many, "1.0") in found


def test_the_page_shows_trials_and_cost(tmp_path: Path):
    path = write_spec(tmp_path, "method asha { first = 256 tokens, suggest = random }, trials = 4, parallel = 2")
    plan = planned(path)
    page = render_sweep(plan)
    assert "a sweep of 4 trials, 2 at once" in page and "256 tokens, 768 tokens" in page
    # Two steps of 18 by all, four by a third, twelve by a ninth.
    assert share_trained(plan) == pytest.approx((2 + 4 / 3 + 12 / 9) / 18)
    assert plan.tokens == plan.rows == ((0, 1, 2, 3),)
    for trial in plan.trials:
        alone = plan_from_spec(path, trial.sets).plan
        assert alone is not None and alone.id == trial.plan.id
        assert trial.plan.origin is not None and trial.plan.origin.sets == trial.sets


def test_trials_that_read_other_data_share_nothing(tmp_path: Path):
    path = write_spec(tmp_path, "method grid, experiment.seed in [0, 1], batch.sequence in [32, 64]")
    text = Path(path).read_text().replace("log(1e-4, 1e-1)", "[1e-3]")
    Path(path).write_text(text.replace("model.ffn in [32, 64]", "model.ffn in [32]"))
    plan = planned(path)
    assert plan.count == 4
    assert plan.tokens == ((0, 1, 2, 3),)
    assert len(plan.rows) == 4


def test_trials_are_the_experiment_and_the_sweep_is_none_of_it(tmp_path: Path):
    path = write_spec(tmp_path, "trials = 2")
    with_sweep = plan_from_spec(path).plan
    Path("alone.xtrain").write_text(Path(path).read_text().partition("sweep {")[0])
    alone = plan_from_spec("alone.xtrain").plan
    assert with_sweep is not None and alone is not None and with_sweep.id == alone.id
    assert "sweep" not in with_sweep.spec_text


def test_which_sweep_it_is_depends_on_what_is_sought_not_on_how_much(tmp_path: Path):
    path = write_spec(tmp_path, "method random { seed = 1 }, trials = 2")
    first = planned(path)
    for same in ("sweep.trials=3", "sweep.parallel=2", "sweep.retries=0", "every.log='3 steps'".replace("'", "")):
        assert planned(path, same).id == first.id, same
    for other in ("sweep.method.seed=2", "sweep.objective=eval.lines.objective", "experiment.budget=20 steps"):
        assert planned(path, other).id != first.id, other
    assert [each.point for each in planned(path, "sweep.trials=3").trials[:2]] == [each.point for each in first.trials]


@pytest.mark.parametrize(("more", "says"), [
    ("model.heads in [2, 3], trials = 6", "X641"),
    ("optimizer.beta in [0.1, 0.2]", "did you mean `betas`"),
    ("optimizer.eps in [1e-8, true]", "must be a number, not `true`"),
    ("method grid, model.layers in 1..1000000000", "2,000,000,000 trials are too many"),
    ("method grid { }, model.layers in 1..200, optimizer.eps in log(1e-9, 1e-8, 100)", "40,000 trials are too many"),
    ("trials = 10001", "10,001 trials are too many"),
    ("launch.stop_at in [1 steps, 2 steps]", "trials cannot differ in `launch.stop_at`"),
    ("method grid", "a grid needs the number of values"),
    ("method asha { first = 18 steps }", "is not before the end"),
    ("method asha { first = 4 steps }", "comes before the first eval.lines"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_anything_runs(tmp_path: Path, more: str, says: str):
    path = write_spec(tmp_path, more)
    Path(path).write_text(Path(path).read_text().replace("every 1 step eval", "every 5 steps eval"))
    assert says in refused(path)


def test_a_mistake_that_many_points_have_is_said_once(tmp_path: Path):
    path = write_spec(tmp_path, "model.heads in [2, 3], optimizer.beta in [0.1, 0.2], nope in [1, 2], trials = 12")
    text = refused(path)
    assert text.count("error[") == text.count("X217") == 2
    text = refused(write_spec(tmp_path, "model.heads in [2, 3], trials = 12"))
    assert text.count("error[X641]") == 1 and "the same error occurs at" in text and "other points" in text


def test_check_says_what_is_wrong_with_a_sweep(tmp_path: Path):
    path = write_spec(tmp_path, "model.heads in [2, 4], trials = 12")
    assert not check_from_spec(path).has_errors
    assert [each.code for each in check_from_spec(path, ("sweep.objective=eval.nope.loss",)).errors] == ["X640"]
    path = write_spec(tmp_path, "nope in [1, 2], optimizer.eps in [1e-8, true], dataset.web.holdout in [1%, 2%]")
    found = check_from_spec(path).errors
    assert [each.code for each in found] == ["X217", "X301", "X217"]
    assert [each.span.text for each in found if each.span] == ["[1, 2]", "[1e-8, true]", "[1%, 2%]"]


def test_a_spec_without_trials_has_no_plan_of_them(tmp_path: Path):
    path = write_spec(tmp_path, "trials = 2")
    assert "there is no dataset web" in refused(path, "sweep.objective=eval.web.loss")
    Path(path).write_text(Path(path).read_text().partition("sweep {")[0])
    assert compile_sweep(path) is None


def test_the_resolved_text_of_a_sweep_says_the_same(tmp_path: Path):
    path = write_spec(tmp_path, "every.eval.lines in [1 steps, 2 steps], method asha { first = 2 steps }, trials = 5")
    loaded = load_spec(path)
    again = load_spec("x", (), {"x": loaded.resolved_text()})
    assert again.require().sweep == loaded.require().sweep
