"""Scaling laws: planted coefficients are found, and intervals mean what they say."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import xtrain

from xtrain.records.law import NAMES, Coefficients, LawError, ScalingLaw
from xtrain.runtime.jobs import law as fit
from xtrain.runtime.jobs.law import RunLoss, Unfittable, fit_law

# As published for the models of Hoffmann et al. 2022 (table A3).
PLANTED = Coefficients(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
SIZES, LENGTHS = np.geomspace(1e7, 3e9, 5), np.geomspace(3e8, 1e11, 4)


def runs_of(noise: float, seed: int = 0) -> list[RunLoss]:
    generator = np.random.default_rng(seed)
    return [
        RunLoss(n, d, PLANTED.loss(n, d) * float(np.exp(generator.normal(0, noise)))) for n in SIZES for d in LENGTHS
    ]


def test_runs_without_noise_give_the_coefficients_themselves(monkeypatch):
    monkeypatch.setattr(fit, "SAMPLES", 4)
    law = fit_law(runs_of(0.0), "eval.web.loss")
    for name in NAMES:
        assert getattr(law.fitted, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6), name
    assert law.predicted(1e10, 1e12)[0] == pytest.approx(PLANTED.loss(1e10, 1e12), rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_planted_coefficients_lie_within_their_intervals(monkeypatch, seed: int):
    monkeypatch.setattr(fit, "SAMPLES", 100)
    law = fit_law(runs_of(0.002, seed), "eval.web.loss")
    for name in NAMES:
        low, high = law.interval(name)
        assert low <= getattr(PLANTED, name) <= high, name
        assert high - low < getattr(PLANTED, name)
    low, high = law.predicted(1e10, 1e12)[1]
    assert low <= PLANTED.loss(1e10, 1e12) <= high


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_intervals_cover_what_they_say():
    """Of 100 intervals of 95 % about five miss; twelve would be too many."""
    laws = [fit_law(runs_of(0.002, seed), "eval.web.loss") for seed in range(20)]
    within = sum(
        low <= getattr(PLANTED, name) <= high for law in laws for name in NAMES for low, high in [law.interval(name)]
    )
    assert within >= 88


def test_one_run_that_went_wrong_moves_little(monkeypatch):
    monkeypatch.setattr(fit, "SAMPLES", 4)
    runs = runs_of(0.0005)
    runs[7] = RunLoss(runs[7].parameters, runs[7].tokens, runs[7].loss * 1.5)
    assert fit_law(runs, "m").fitted.alpha == pytest.approx(0.34, rel=0.05)
    monkeypatch.setattr(fit, "SAMPLES", 60)
    runs[7] = RunLoss(runs[7].parameters, runs[7].tokens, 20.0)
    law = fit_law(runs, "m")
    for name in NAMES:
        low, high = law.interval(name)
        assert low <= getattr(law.fitted, name) <= high and low <= getattr(PLANTED, name) <= high, name


def test_runs_that_are_too_few_or_too_much_alike_give_no_law():
    with pytest.raises(Unfittable, match="there are 6 with 3 and 2"):
        fit_law([RunLoss(n, d, 3.0) for n in SIZES[:3] for d in LENGTHS[:2]], "m")
    with pytest.raises(Unfittable, match="not a number above 0"):
        fit_law([*runs_of(0.0), RunLoss(1e8, 1e9, float("nan"))], "m")


def test_what_the_runs_say_nothing_of_is_said(monkeypatch):
    """Sizes that are nearly the same, with noise that is larger than what they change."""
    monkeypatch.setattr(fit, "SAMPLES", 4)
    generator = np.random.default_rng(3)
    noise = lambda: float(np.exp(generator.normal(0, 0.01)))  # noqa: E731
    sizes = (1.00e8, 1.01e8, 1.02e8)
    law = fit_law([RunLoss(n, d, PLANTED.loss(n, d) * noise()) for n in sizes for d in LENGTHS], "m")
    assert {"A", "alpha"} <= set(law.undetermined()) and "beta" not in law.undetermined()
    assert fit_law(runs_of(0.002), "m").undetermined() == ()


def made_runs(folder: Path) -> None:
    """Run directories of twelve models and lengths, as the command reads them."""
    from xtrain.plan.serialise import dumps
    from xtrain.planner.load import plan_from_spec

    spec = """experiment sizes {{ budget = {steps} steps }}
model qwen3 {{ dim = {dim}, layers = 1, heads = 2 }}
tokenizer bytes
dataset web {{ source = synthetic(), holdout = 10% }}
batch {{ sequence = 64, rows = 4, micro = 4 }}
optimizer adamw {{ lr = 1e-3 }}
parallel {{ fsdp 1 }}
every 10 steps eval web
"""
    for dim in (16, 32, 64, 128):
        for steps in (10, 30, 90):
            run = folder / "runs" / f"{dim}-{steps}"
            run.mkdir(parents=True)
            (folder / "s.xtrain").write_text(spec.format(dim=dim, steps=steps))
            plan = plan_from_spec(folder / "s.xtrain").plan
            assert plan is not None
            (run / "plan.json").write_text(dumps(plan))
            loss = 1.0 + 8.0 * plan.parameters.active**-0.3 + 30.0 * plan.timeline.tokens**-0.5
            rows = [{"step": steps, "time": 1.0, "tokens": plan.timeline.tokens, "eval/web/loss": loss}]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            end = {"step": steps, "time": 1.0, "event": "run_end", "status": "done" if dim else "failed"}
            (run / "events.jsonl").write_text(json.dumps(end) + "\n")
    unfinished = folder / "runs" / "unfinished"
    unfinished.mkdir()
    (unfinished / "plan.json").write_text(dumps(plan))


def test_the_command_fits_runs_and_a_plan_shows_what_follows(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fit, "SAMPLES", 20)
    made_runs(tmp_path)
    done = xtrain("fit-law", "runs", "--out", "law.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eval.web.loss of 12 runs" in done.stdout and "alpha  0.3" in done.stdout
    said = json.loads(xtrain("fit-law", "runs", "--metric", "eval.web.loss", "--json", cwd=tmp_path).stdout)
    assert said["beta"]["value"] == pytest.approx(0.5, rel=1e-4)
    law = ScalingLaw.read(tmp_path / "law.json")
    assert law.runs == 12
    page = xtrain("plan", "s.xtrain", "--set", "experiment.budget=900 steps", "--law", "law.json", cwd=tmp_path)
    assert "PREDICTED  by a law of 12 runs" in page.stdout and "10 times beyond the runs" in page.stdout
    found = json.loads(xtrain("plan", "s.xtrain", "--json", "--law", "law.json", cwd=tmp_path).stdout)["predicted"]
    assert found["loss"] == pytest.approx(law.fitted.loss(found["parameters"], found["tokens"]))
    assert found["beyond"] == 1.0
    assert xtrain("fit-law", "runs/16-10", cwd=tmp_path).returncode == 2
    assert "is not a metric" in xtrain("fit-law", "runs", "--metric", "loss", cwd=tmp_path).stderr
    with (tmp_path / "runs" / "32-30" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "time": 1.0, "tokens": 7680, "eval/web/loss": NaN}\n')
    assert "32-30 ended with eval.web.loss nan" in xtrain("fit-law", "runs", cwd=tmp_path).stderr
    (tmp_path / "law.json").write_text("{}")
    assert xtrain("plan", "s.xtrain", "--law", "law.json", cwd=tmp_path).returncode == 2
    with pytest.raises(LawError):
        ScalingLaw.read(tmp_path / "none.json")
