"""docs/accuracy.md is what benchmarks/accuracy.py writes, and says as much as it claims."""

import importlib.util
from pathlib import Path

import pytest
from attrs import evolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks/accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(accuracy):
    assert (ROOT / "docs/accuracy.md").read_text(encoding="utf-8") == accuracy.page()


def test_what_the_page_of_plans_says_of_llama_3_is_current(accuracy):
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert text == accuracy.plan_page()
    shares = [f"{row.predicted:.1%}" for row in accuracy.goodput_rows() if row.run == "Llama 3 405B"]
    assert len(shares) == 3  # those of the other page
    assert all(share.replace("%", " %") in text for share in shares)


def test_memory_of_most_published_runs_is_foreseen(accuracy):
    rows = [*accuracy.titan_rows(), *accuracy.kempner_rows()]
    ratios = [accuracy.predicted(row, accuracy.planned(row)) / row.measured for row in rows]
    assert sum(abs(ratio - 1) <= 0.15 for ratio in ratios) >= 12


def test_the_head_in_fp32_is_foreseen(accuracy):
    heads = [head for head in accuracy.HEAD_ROWS if head.params == "fp32" and head.low == head.high]
    assert heads and [head for head in heads if abs(head.predicted / head.low - 1) >= 0.02] == []


def test_goodput_is_what_published_runs_exceed(accuracy):
    rows = accuracy.goodput_rows()
    assert {row.run for row in rows if row.exceeded} == {"Llama 3 405B", "MegaScale"}
    for row in rows:
        assert row.predicted > row.share or not row.exceeded, row
        assert abs(row.faults.simulated(row.interval) - row.predicted) < 0.005
    slow = evolve(rows[0].faults, restart=20 * 60.0)
    assert slow.goodput(slow.best(60.0)) < 0.9  # a share that is exceeded whatever is assumed would say nothing


def test_goodput_that_is_reported_lies_between_the_usual_and_the_longest_incidents(accuracy):
    usual, longest = (row for row in accuracy.goodput_rows() if not row.exceeded)
    assert longest.predicted < longest.share == usual.share < usual.predicted
    assert usual.predicted - longest.predicted < 0.06  # wide bounds would say nothing


def test_failures_of_jobs_are_those_that_meta_projects(accuracy):
    for devices, hours in accuracy.PROJECTED_HOURS.items():
        between = 1 / (accuracy.NODE_FAILURES * devices / 8)
        assert abs(between / accuracy.HOUR / hours - 1) < 0.03
        faults = accuracy.Faults(between=100 * between, restart=120.0, blocked=10.0, later=0.0)
        interval = faults.best(60.0)  # where failures are rare the first order is all there is
        assert abs(faults.goodput(interval) - accuracy.ettr(faults, interval)) < 1e-3
