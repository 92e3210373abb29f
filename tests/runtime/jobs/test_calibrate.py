"""Step times by measured runs: planted efficiencies are found, and ranges and labels say what they mean."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from commands import xtrain

from xtrain.plan import calibration as model
from xtrain.plan.calibration import ASSUMED, Calibration, CalibrationError, PlannedTiming, TimedPart, TimedRun
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_text
from xtrain.runtime.jobs.calibrate import timed_run

SPEC = """
experiment measured {{ budget = 100 steps }}
cluster {cluster}
parallel {{ {parallel} }}
precision {{ compute = bf16 }}
model llama {{ dim = 1024, layers = 8, heads = 8, ffn = 4096, vocab = 32000 }}
tokenizer "none"
dataset synthetic {{ source = jsonl("none.jsonl") }}
batch {{ sequence = {sequence}, micro = {micro} }}
optimizer adamw {{ lr = 3e-4 }}
"""
PLANTED = {"products": 0.4, "attention": 0.25, "link": 0.6}
"""Efficiencies, and the share of the stated bandwidth."""
LAYOUTS = [
    (parallel, sequence, micro)
    for parallel in ("fsdp 8", "fsdp 4, tp 2", "fsdp 2, tp 4", "tp 8")
    for sequence, micro in ((1024, 8), (4096, 2), (16384, 1))
]


def planned(
    parallel: str, sequence: int = 4096, micro: int = 2, cluster: str = "h100 { nodes = 1, devices = 8 }"
) -> Plan:
    text = SPEC.format(cluster=cluster, parallel=parallel, sequence=sequence, micro=micro)
    compiled = plan_from_text(text, "row.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def measured(timing: PlannedTiming, noise: float = 0.0, parts: tuple[TimedPart, ...] = ()) -> TimedRun:
    """A run whose kinds of operations take as long as `PLANTED` says."""
    usual = {"products": ASSUMED, "attention": ASSUMED, "link": 1.0}
    left = 1 - sum(timing.shares[kind] for kind in PLANTED)
    slower = left + sum(timing.shares[kind] * usual[kind] / planted for kind, planted in PLANTED.items())
    seconds = timing.seconds * slower * math.exp(noise)
    return TimedRun(source="run", plan="0" * 16, torch="2.11", date="2026-11-30", samples=10, seconds=seconds,
                    low=0.99 * seconds, high=1.01 * seconds, timing=timing, parts=parts)  # fmt: skip


@pytest.fixture(scope="module")
def timings() -> list[PlannedTiming]:
    from xtrain.planner.costs.times import timing_of_plan

    found = [timing_of_plan(planned(*layout)) for layout in LAYOUTS]
    return [timing for timing in found if timing is not None]


@pytest.fixture(scope="module")
def runs(timings: list[PlannedTiming]) -> list[TimedRun]:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.03, len(timings))
    return [measured(timing, off) for timing, off in zip(timings, noise, strict=True)]


def test_efficiencies_that_were_planted_lie_within_their_intervals(timings: list[PlannedTiming]):
    usual = {"products": ASSUMED, "attention": ASSUMED, "link": 1.0}
    parts = [
        TimedPart(name=kind, seconds=timing.shares[kind] * timing.seconds * usual[kind] / planted,
                  planned=timing.shares[kind] * timing.seconds, shares={kind: 1.0})
        for timing in timings for kind, planted in PLANTED.items() if timing.shares[kind] > 0
    ]  # fmt: skip
    assert len(parts) == 3 * len(timings)
    triples = [tuple(parts[3 * number : 3 * number + 3]) for number in range(len(timings))]
    found = Calibration.of([measured(timing, parts=own) for timing, own in zip(timings, triples, strict=True)])
    efficiencies = {kind: (low, likely, high) for kind, likely, low, high in found.efficiencies()}
    assert efficiencies.keys() == PLANTED.keys()
    for kind, (low, likely, high) in efficiencies.items():
        assert low < PLANTED[kind] < high and likely == pytest.approx(PLANTED[kind], rel=0.1), kind


def test_a_run_is_predicted_from_the_others(runs: list[TimedRun]):
    inside = 0
    for run in runs:
        found = Calibration.of([other for other in runs if other is not run]).predicted(run.timing)
        assert found.factor == pytest.approx(run.seconds / run.timing.seconds, rel=0.3)
        inside += found.low <= run.seconds / run.timing.seconds <= found.high
    assert inside >= 0.8 * len(runs)


def test_errors_of_leaving_one_out_are_those_of_a_calibration_without_it(runs: list[TimedRun]):
    part = TimedPart(name="computation", seconds=1.0, planned=0.8, shares={"products": 0.9, "attention": 0.1})
    runs = [evolve(run, parts=(part, evolve(part, seconds=1.1))[: number % 3]) for number, run in enumerate(runs)]
    for run, error in zip(runs, Calibration.of(runs).left_out_errors(), strict=True):
        others = Calibration.of([other for other in runs if other is not run])
        assert error == pytest.approx(run.slowness - math.log(others.predicted(run.timing).factor), abs=1e-9)


def test_a_prediction_is_that_of_the_covariance(runs: list[TimedRun]):
    """Compared with the textbook's formula in numpy, written out here."""
    *known, new = runs
    shares = np.array([[run.timing.shares[kind] for kind in model.KINDS] for run in runs])
    places = np.array([run.timing.place for run in runs])
    far = ((places[:, None] - places[None]) ** 2).sum(-1)
    k = 0.09 * shares @ shares.T + 0.09 + 0.09 * np.exp(-far / 8)
    weights = np.linalg.solve(k[:-1, :-1] + 0.0025 * np.eye(len(known)), k[:-1, -1])
    found = Calibration.of(known).predicted(new.timing)
    assert math.log(found.factor) == pytest.approx(float(weights @ [run.slowness for run in known]), abs=1e-9)


def test_labels(runs: list[TimedRun]):
    found = Calibration.of(runs)
    again = found.predicted(runs[3].timing)
    assert again.label == "exact" and again.factor == pytest.approx(runs[3].seconds / runs[3].timing.seconds)
    assert again.low < again.factor < again.high < 1.11 * again.factor
    shape = runs[0].timing.shape
    between = evolve(runs[0].timing, seconds=1.0, shape={**shape, "tokens a rank": 0.9 * shape["tokens a rank"]})
    assert found.predicted(between).label == "interpolated"
    longer = {**runs[2].timing.shape, "tokens a rank": 24_576}
    wider = found.predicted(evolve(runs[2].timing, seconds=1.0, shape=longer))
    assert (wider.label, wider.beyond) == ("extrapolated", ("tokens a rank 24,576, measured 1,024 to 16,384",))
    assert 1.25**2 > wider.high / wider.low > found.predicted(between).high / found.predicted(between).low
    elsewhere = found.predicted(evolve(between, machine="b200"))
    assert (elsewhere.label, elsewhere.beyond[0]) == ("extrapolated", "machine b200, measured on h100")
    assert elsewhere.low == elsewhere.factor == elsewhere.high  # the runs say nothing of it
    assert re.fullmatch(r"no range: by the assumptions of the process alone it is ± \d\d%", elsewhere.beyond[1])


def test_what_no_step_time_can_be_predicted_from(runs: list[TimedRun], tmp_path: Path):
    with pytest.raises(CalibrationError, match="needs 4 measured runs"):
        Calibration.of(runs[:3])
    path = tmp_path / "calibration.json"
    path.write_text(whole := Calibration.of(runs).text())
    assert Calibration.read(path).predicted(runs[0].timing) == Calibration.of(runs).predicted(runs[0].timing)
    for damaged, said in (
        (whole[:100], "is not a file that"),
        ("[]", "is not a file that"),
        (whole.replace('"calibration": 1', '"calibration": 9'), "not a calibration of this version"),
        (whole.replace('"tp": 1,', '"tp": -1,', 1), "figures of run are invalid"),
        (whole.replace('"tp": 1,', "", 1), "figures of run are invalid"),
        (whole.replace('"products"', '"produce"').replace('"seconds": ', '"seconds": "x', 1), "is not a file that"),
    ):
        path.write_text(damaged)
        with pytest.raises(CalibrationError, match=said):
            Calibration.read(path)


def test_runs_are_measured_since_their_last_start_and_plans_are_labeled(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (parallel, sequence, micro) in enumerate(LAYOUTS[:5]):
        plan = planned(parallel, sequence, micro)
        run = tmp_path / f"runs/{number}"
        (run / "metadata").mkdir(parents=True)
        (run / "plan.json").write_text(json.dumps(to_json(plan)))
        (run / "metadata/environment.json").write_text('{"torch": "2.11"}')
        (run / "events.jsonl").write_text('{"event": "run_start", "time": 100, "step": 0, "device": "cuda"}\n')
        assert plan.estimates.times is not None
        seconds = 1.5 * plan.estimates.times.step
        rows = [{"step": 1, "time": 50, "step_seconds": 99 * seconds}, *({"step": 2 + step, "time": 101 + step,
                "step_seconds": seconds * (1 + step / 100)} for step in range(5))]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert timed_run(run).seconds == pytest.approx(1.02 * seconds)
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/plan.json").write_text("{}")
    done = xtrain("calibrate", tmp_path / "runs", "--out", tmp_path / "calibration.json")
    assert done.returncode == 0, done.stderr
    assert "runs/broken is left out" in done.stderr and "5 of 5 runs" in done.stdout
    with_runs = 'h100 { nodes = 1, devices = 8, calibration = "calibration.json" }'
    plan = planned(*LAYOUTS[1], cluster=with_runs)
    times, usual = plan.estimates.times, planned(*LAYOUTS[1]).estimates.times
    assert times is not None and usual is not None and times.label == "exact"
    assert times.step == pytest.approx(1.02 * 1.5 * usual.step)
    assert times.computing + times.exposed == pytest.approx(times.step)
    other = planned("tp 8", 16384, 1, cluster=with_runs)
    assert other.estimates.times is not None and other.estimates.times.label == "extrapolated"
    content = json.loads(Path("calibration.json").read_text())
    content["runs"][1]["seconds"] *= 2
    Path("calibration.json").write_text(json.dumps(content))
    changed = planned(*LAYOUTS[1], cluster=with_runs)
    assert changed.estimates.times is not None and changed.estimates.times.step > 1.9 * times.step
    assert changed.id == plan.id  # measured times decide nothing in a run
    none = xtrain("calibrate", tmp_path / "runs/0")
    assert none.returncode == 2 and "needs 4 measured runs" in none.stderr
