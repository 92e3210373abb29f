"""Goodput of runs whose devices fail: the closed form against a simulation, and what a plan says of it."""

from math import inf, isclose

import pytest

from xtrain.planner.costs.run import Faults, goodput_of
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.page import render

SPEC = """
experiment failing {{ budget = 200k steps }}
cluster h100 {{ nodes = 128, devices = 8, efficiency = 40%{more} }}
parallel {{ fsdp 1024 }}
activation full
precision {{ compute = fp32 }}
compile {{ mode = none }}
model llama {{ dim = 4096, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 8Ki, rows = 1024 }}
optimizer adamw {{ lr = 3e-4 }}
{rest}
"""
SAVING = "every 500 steps checkpoint"


def planned(more="", rest=SAVING):
    found = plan_from_text(SPEC.format(more=more, rest=rest), "failing.xtrain")
    assert found.plan is not None, found.diagnostics.render()
    return found.plan, [each.code for each in found.diagnostics]


CASES = [
    Faults(between=10_000, restart=600, blocked=30, later=0),
    Faults(between=10_000, restart=600, blocked=0, later=120),
    Faults(between=2_000, restart=900, blocked=200, later=0),
    Faults(between=1_000_000, restart=60, blocked=5, later=20),
]


@pytest.mark.parametrize("faults", CASES)
def test_the_closed_form_is_what_a_simulation_finds(faults):
    for interval in (100, 600, 3_600):
        exact = faults.goodput(interval)
        assert abs(faults.simulated(interval, failures=100_000) - exact) < 0.01 * exact + 1e-4


@pytest.mark.parametrize("faults", CASES)
def test_the_best_interval_is_better_than_all_others(faults):
    best = faults.best(1.0)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert faults.goodput(best) >= faults.goodput(max(1.0, best * factor))
    if faults.blocked and faults.between > 100 * faults.blocked:
        assert isclose(best, faults.young, rel_tol=0.1)  # which is the first order of it


def test_shares_of_the_time_are_all_of_it():
    plan, _ = planned(", mtbf = 30000 h, storage = 20 GiB, restart = 20 min")
    found = goodput_of(plan)
    assert found is not None and found.wall is not None and plan.estimates.times is not None
    assert found.interval == 500 * plan.estimates.times.step
    assert found.faults.between == 30_000 * 3600 / 1024
    assert found.faults.blocked == plan.estimates.checkpoint_bytes / (20 * 2**30)
    assert min(found.share, found.saves, found.restarts, found.lost) > 0
    assert isclose(found.share + found.saves + found.restarts + found.lost, 1)
    assert isclose(found.wall * found.share, 200_000 * plan.estimates.times.step)


def test_asynchronous_saves_do_not_block_and_count_later():
    more = ", mtbf = 30000 h, storage = 20 GiB"
    waited, beside = (planned(more, f"{SAVING}\ncheckpoint {{ mode = {mode} }}")[0] for mode in ("sync", "async"))
    waited, beside = goodput_of(waited), goodput_of(beside)
    assert waited is not None and beside is not None
    assert (waited.faults.blocked, waited.faults.later) == (beside.faults.later, beside.faults.blocked)
    assert beside.share > waited.share


def test_without_mtbf_nothing_is_said_and_a_restart_is_idle():
    plan, codes = planned(", restart = 5 min, storage = 1 GiB")
    assert goodput_of(plan) is None and codes.count("W401") == 1  # weights are read from storage
    assert "goodput" not in render(plan)


def test_more_failures_than_restarts_are_a_warning():
    assert planned(", mtbf = 30000 h")[1] == ["W432"]
    assert planned(", mtbf = 30000 h", f"{SAVING}\nfault_tolerance {{ restarts = 1000 }}\nlauncher slurm {{}}")[1] == []
    assert planned(", mtbf = 30000 h", f"{SAVING}\nfault_tolerance {{ restarts = 1000 }}")[1] == ["W432", "W401"]
    plan, codes = planned(", mtbf = 30000 h", "checkpoint { enabled = false }")
    found = goodput_of(plan)
    assert found is not None and (found.interval, found.share, found.failures) == (inf, 0, None)
    assert codes == ["W432"] and "restarts it from step 0" in render(plan)


def test_a_plan_shows_failures_goodput_and_the_best_interval():
    text = render(planned(", mtbf = 30000 h, storage = 20 GiB")[0])
    for word in ("failures", "goodput", "in a simulation", "best to save", "Young"):
        assert word in text, text
    free = " ".join(render(planned(", mtbf = 30000 h")[0]).split())
    assert "best to save unknown set cluster.storage: without it saves count as free" in free


@pytest.mark.parametrize(("more", "better"), [
    (", mtbf = 1 s", "fewer devices"),  # nothing is left in fp64
    (", mtbf = 50000 h, restart = 10000 h", "fewer devices"),
    (", mtbf = 300 h, storage = 200 GiB, restart = 3 min", "save every"),
])  # fmt: skip
def test_a_run_that_does_not_get_on_is_told_of(more, better):
    found = plan_from_text(SPEC.format(more=more, rest="every 5k steps checkpoint"), "failing.xtrain")
    (warning,) = [each for each in found.diagnostics if each.code == "W432"]
    assert "makes no progress" in warning.message and better in (warning.hint or ""), warning
    goodput = goodput_of(found.plan)
    assert goodput is not None and goodput.stands


def test_a_checkpoint_that_never_comes_saves_nothing():
    text = SPEC.format(more=", mtbf = 30000 h", rest="every 500 steps checkpoint")
    short = text.replace("200k steps", "400 steps")
    found = plan_from_text(short, "failing.xtrain")
    assert found.plan is not None
    goodput = goodput_of(found.plan)
    assert goodput is not None and (goodput.interval, goodput.share) == (inf, 0)
    # Failures that are not to be expected while it lasts are nothing to warn of.
    assert "W432" not in [each.code for each in found.diagnostics]
    assert "W432" in [each.code for each in plan_from_text(short.replace("30000 h", "300 h"), "f.xtrain").diagnostics]


def test_shares_are_no_less_than_nothing():
    plan, _ = planned(", mtbf = 1e15 h")
    found = goodput_of(plan)
    assert found is not None and found.lost >= 0
    line = next(line for line in render(plan).splitlines() if line.split()[:1] == ["failures"])
    assert "-0.0%" not in render(plan) and "e-" in line
