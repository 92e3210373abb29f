"""What `benchmarks/gpu_day.py` runs on a GPU: that each of its specs has a plan, and that nothing found is lost."""

import json
import sys
import time
from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_text

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = ("gpu_day", "gpu_process", "gpu_specs", "gpu_pieces", "gpu_kernels", "one_device")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: __import__(name)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def day(benchmarks, tmp_path):
    return benchmarks("gpu_day").Day(tmp_path / "day.json", dry=True, until=time.monotonic() + 60)


def plan_of(text, tmp_path):
    compiled = plan_from_text(text, str(tmp_path / "s.xtrain"), [], world=1)
    assert compiled.plan is not None, compiled.diagnostics.render(color=False)
    return compiled.plan


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_run_of_the_day_has_a_plan(benchmarks, device, tmp_path):
    specs = benchmarks("gpu_specs")
    for model, more in specs.every_spec().values():
        plan_of(specs.spec_text(model, more, steps=2, sequence=128, device=device), tmp_path)


def test_every_shape_of_the_day_has_a_plan_that_saves_nothing(benchmarks, tmp_path):
    one, pieces = benchmarks("one_device"), benchmarks("gpu_pieces")
    cases = [*pieces.MEMORY.values(), *({"shape": shape, "activation": "full"} for shape in ("1b", "8b"))]
    for case in cases:
        plan = plan_of(one.spec_text(one.arguments_of(**case, cluster="h200")), tmp_path)
        assert plan.estimates.times is not None
        assert not [node.id for node in plan.nodes if node.id.startswith("event.finish")]


def test_what_is_measured_is_a_cluster_of_a_spec(benchmarks, day, tmp_path):
    day.cluster = ["--cluster", "h200"]
    assert benchmarks("gpu_day").calibrated(day) == ""
    day.note("about", "machine", {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-01"})
    for name, share in (("a, compile default", 0.4), ("b, compile default", 0.5), ("c, compile none", 0.1)):
        day.note("goal", name, {"efficiency": share})
    day.note("goal", "d, compile default", {"failed": "no"})
    text = benchmarks("gpu_day").calibrated(day)
    specs = benchmarks("gpu_specs")
    plan = plan_of(specs.spec_text(specs.DENSE, text, steps=2, sequence=128, device="cuda"), tmp_path)
    assert plan.cluster.preset == "h200" and plan.cluster.efficiency == pytest.approx((0.45, 0.45))


@pytest.mark.parametrize("error", [ValueError("not enough values to unpack"), KeyError("loss"), OSError(28, "full")])
def test_a_trial_that_fails_is_noted_and_the_next_one_begins(day, error):
    def fails(limit):
        raise error

    day.trial("p", "first", 5, fails)
    day.trial("p", "numbers that are no JSON", 5, lambda limit: {"x": {1, 2}})
    day.trial("p", "last", 5, lambda limit: {"ms": 1})
    found = json.loads(day.out.read_text())["p"]
    assert type(error).__name__ in found["first"]["failed"] and "failed" in found["numbers that are no JSON"]
    assert found["last"]["ms"] == 1


def test_without_time_nothing_begins(day):
    day.until = time.monotonic() + 5
    day.trial("p", "one", 5, lambda limit: pytest.fail("it has begun"))
    day.pieces("p", 5, "attention")
    assert [each["skipped"] for each in day.found["p"].values()] == ["no time is left"] * 2


PIECES = """
import json, os, sys, time
out = open(sys.argv[sys.argv.index("--to") + 1], "a")
skip = sys.argv[sys.argv.index("--skip") + 1:]
for name in "abcd":
    if name in skip:
        continue
    for line in ({"begins": name}, {"name": name, "found": {"ms": 1}}):
        out.write(json.dumps(line) + "\\n")
        out.flush()
        if name == "b":
            print("the device is lost", flush=True)
            os._exit(7)
        if name == "c":
            time.sleep(60)
"""


def test_a_process_that_dies_or_hangs_loses_one_piece(benchmarks, tmp_path):
    process, found = benchmarks("gpu_process"), {}
    (tmp_path / "pieces.py").write_text(PIECES)
    command = [sys.executable, str(tmp_path / "pieces.py")]
    process.in_pieces(command, 1.0, time.monotonic() + 60, found.__setitem__)
    assert found["a"] == found["d"] == {"ms": 1}
    assert "exit code 7" in found["b"]["failed"] and "the device is lost" in found["b"]["failed"]
    assert "not done within 1 s" in found["c"]["failed"]
    with pytest.raises(process.Failed, match="No such file"):
        process.in_pieces([sys.executable, str(tmp_path / "none.py")], 5.0, time.monotonic() + 60, found.__setitem__)


def test_figures_that_came_before_a_failure_are_kept(benchmarks):
    program = 'print(\'{"ms": 1}\'); print("{no object"); print(\'{"gib": 2}\'); raise SystemExit(3)'
    with pytest.raises(benchmarks("gpu_process").Failed) as failed:
        benchmarks("gpu_day").figures([sys.executable, "-c", program], 20)
    assert failed.value.found == {"ms": 1, "gib": 2} and "exit code 3" in str(failed.value)


def test_gaps_and_kernels_of_a_trace(benchmarks):
    entries = [("a", 0, 1000), ("b", 500, 250), ("a", 2000, 1000), ("c", 3500, 100)]
    found = benchmarks("one_device").largest([{"name": n, "ts": ts, "dur": dur} for n, ts, dur in entries])
    assert [(each["name"], each["ms"], each["calls"]) for each in found["kernels"]] == [
        ("a", 2.0, 2),
        ("b", 0.25, 1),
        ("c", 0.1, 1),
    ]
    assert [(each["ms"], each["after"], each["before"]) for each in found["gaps"]] == [(1.0, "a", "a"), (0.5, "a", "c")]
    assert found["busy_ms"] == 2.1 and found["idle_ms"] == 1.5
