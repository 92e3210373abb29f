"""The driver of a sweep: what it asks, starts, compares and stops, whatever is killed meanwhile."""

from pathlib import Path
from random import Random

import pytest
from sweeps import DiesAfter, FailingTrials, Killed, WrittenTrials, driver, loss_of, write_spec

from xtrain.cli import run_sweep
from xtrain.cli.main import main
from xtrain.cli.verb import Refused
from xtrain.plan.serialise import load_plan
from xtrain.records.sweep import SweepState
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.jobs import sweep as driver_module


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch, tmp_path):
    monkeypatch.setattr(driver_module, "LOOK_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)


def outcome(state: SweepState) -> list[tuple]:
    """All that a sweep has come to."""
    return [
        (each.number, each.name, each.point, each.same_as, each.values, each.decisions, each.value, each.status)
        for each in state.trials.values()
    ]


def test_a_random_search_trains_each_trial_once_and_finds_the_best(tmp_path: Path):
    path = write_spec(tmp_path, "method random { seed = 3 }, trials = 6, parallel = 3")
    trials = WrittenTrials(Random(0))
    sweep = driver(path, trials)
    assert sweep.run() == "done"
    assert set(trials.steps.values()) == {18} and len(trials.steps) == 6
    assert set(trials.slots) == {0, 1, 2}
    values = {each.number: each.value for each in sweep.state.trials.values()}
    plans = {number: load_plan(f"{sweep.folder}/plans/{each.name}.json") for number, each in sweep.state.trials.items()}
    assert values == {number: loss_of(plan, 18) for number, plan in plans.items()}
    best = sweep.state.best()
    assert best is not None and best.value == min(values.values())
    assert plans[best.number].origin.sets[:2] == tuple(f"{k}={v}" for k, v in best.point.items())


def test_a_grid_has_every_combination_and_equal_plans_are_run_once(tmp_path: Path):
    path = write_spec(tmp_path, "method grid, model.heads in [2, 4]")
    text = Path(path).read_text().replace("log(1e-4, 1e-1)", "[1e-3, 1e-2]")
    Path(path).write_text(text.replace("model.ffn in [32, 64]", "model.kv_heads in [auto, 2]"))
    trials = WrittenTrials(Random(0))
    sweep = driver(path, trials)
    assert sweep.plan.count == 8
    assert sweep.run() == "done"
    same = {each.number: each.same_as for each in sweep.state.trials.values() if each.same_as is not None}
    # With 2 heads, as many of keys and values as of queries are 2.
    assert same and len(trials.steps) == 8 - len(same)
    rows = {row["trial"]: row for row in sweep.state.table()}
    assert all(rows[number]["value"] == rows[first]["value"] for number, first in same.items())


def test_halving_stops_those_that_fall_behind_at_the_same_budgets(tmp_path: Path):
    path = write_spec(tmp_path, "method asha { first = 256 tokens, suggest = random }, trials = 12, parallel = 4")
    trials = WrittenTrials(Random(1))
    sweep = driver(path, trials)
    assert sweep.plan.rungs == ("256 tokens", "768 tokens")
    assert sweep.run() == "done"
    assert set(trials.steps.values()) == {2, 6, 18}
    for rung in (0, 1):
        seen: list[float] = []
        for each in sweep.state.trials.values():
            if len(each.values) > rung:
                better = sum(1 for value in seen if value <= each.values[rung])
                seen.append(each.values[rung])
                assert each.decisions[rung] == (better < max(len(seen) // 3, 1))
    whole = driver(write_spec(tmp_path, "method random, trials = 12"), WrittenTrials(Random(0)))
    whole.run()
    assert whole.state.best().point == sweep.state.best().point
    assert sum(trials.steps.values()) < 0.7 * 12 * 18


@pytest.mark.parametrize(
    "method",
    [pytest.param("asha { first = 2 steps, startup = 4 }", id="asha"),
        pytest.param("tpe { startup = 4 }", id="tpe", marks=pytest.mark.slow),
        pytest.param("random", id="random", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_killed_driver_changes_nothing(tmp_path: Path, method: str):
    """Each driver is killed behind some of its events, and trials die too; the order in which they end differs."""
    pytest.importorskip("optuna")
    path = write_spec(tmp_path, f"method {method}, trials = 10, parallel = 3")
    alone = driver(path, WrittenTrials(Random(0)), ("workspace.root=alone",))
    alone.run()
    random, starts = Random(7), 0
    trials = WrittenTrials(random, chance=0.2)
    while True:
        starts += 1
        sweep = driver(path, trials, ("sweep.retries=100",), DiesAfter(random.randrange(1, 9)))
        try:
            assert sweep.run() == "done"
        except Killed:
            sweep._lock.close()
            continue
        break
    assert starts > 5
    assert outcome(SweepState.read(sweep.folder)) == outcome(alone.state)
    if method != "random":
        import optuna
        from optuna.storages.journal import JournalFileBackend

        storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep.folder / "optuna.log")))
        study = optuna.load_study(study_name="tiny", storage=storage)
        assert len(study.trials) == 10
        assert study.best_trial.user_attrs["trial"] == sweep.state.best().number


def test_a_trial_that_gets_no_further_fails_after_its_retries(tmp_path: Path):
    path = write_spec(tmp_path, "method random, trials = 2, retries = 1")
    trials = WrittenTrials(Random(0), chance=1.0)
    sweep = driver(path, trials)
    assert sweep.run() == "done"
    assert [each.status for each in sweep.state.trials.values()] == ["failed", "failed"]
    assert len(trials.slots) == 4 and sweep.state.best() is None


@pytest.mark.parametrize(("agreed", "starts"), [(True, 1), (False, 3)])
def test_a_trial_that_would_fail_again_is_started_once(tmp_path: Path, agreed: bool, starts: int):
    """As one whose loss is not finite."""
    trials = FailingTrials(Random(0), agreed=agreed)
    sweep = driver(write_spec(tmp_path, "method random, trials = 1, retries = 2"), trials)
    assert sweep.run() == "done"
    assert [each.status for each in sweep.state.trials.values()] == ["failed"] and len(trials.slots) == starts


def test_a_sweep_without_any_value_is_no_success(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    path = write_spec(tmp_path, "method random, trials = 2, retries = 0")
    sweep = driver(path, WrittenTrials(Random(0), chance=1.0))
    sweep._lock.close()
    with pytest.raises(Refused, match=r"no trial has a final value of eval.lines.loss") as refused:
        run_sweep._drive(sweep.plan, sweep.trials, sweep.launcher, "none")
    assert refused.value.code == 1
    assert main(["sweep", "show", sweep.plan.folder, "--csv", "/dev/full"]) == 3
    assert capsys.readouterr().err == "error: /dev/full cannot be written: No space left on device\n"


def test_a_value_that_is_not_finite_never_goes_on(tmp_path: Path, monkeypatch):
    path = write_spec(tmp_path, "method asha { first = 2 steps, suggest = random }, trials = 3")
    monkeypatch.setattr("sweeps.loss_of", lambda plan, step: float("nan"))
    sweep = driver(path, WrittenTrials(Random(0)))
    sweep.run()
    assert [each.status for each in sweep.state.trials.values()] == ["stopped early"] * 3


def test_one_driver_at_a_time(tmp_path: Path):
    path = write_spec(tmp_path, "trials = 2")
    first = driver(path, WrittenTrials(Random(0)))
    with pytest.raises(EnvironmentFault) as refused:
        driver(path, WrittenTrials(Random(0)))
    assert refused.value.code == "X707"
    assert first.run() == "done"


def test_a_sweep_that_is_stopped_goes_on_and_may_grow(tmp_path: Path):
    path = write_spec(tmp_path, "method random, trials = 4, parallel = 2")
    sweep = driver(path, WrittenTrials(Random(0)))
    (sweep.folder / "stop").touch()
    assert sweep.run() == "stopped"
    sweep._lock.close()
    longer = driver(path, WrittenTrials(Random(0)), ("sweep.trials=6",))
    assert longer.folder == sweep.folder and longer.run() == "done"
    assert len(longer.state.trials) == 6
