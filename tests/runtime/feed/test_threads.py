"""How many threads work on data: what the run was given, or the machine has."""

import os
import sys
from types import SimpleNamespace

import pytest

from xtrain.runtime.feed.packing.rows import default_threads, in_threads


def test_a_run_takes_what_its_matrix_products_take(monkeypatch: pytest.MonkeyPatch):
    """The bootstrap sets them: `launch.threads`, OMP_NUM_THREADS, or the rank's share of the cores."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 3))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert default_threads() == 3


@pytest.mark.parametrize(("value", "threads"), [("5", 5), ("4,2", 4), ("0", 9), ("many", 9), (None, 9)])
def test_without_torch_the_environment_or_the_cores_decide(
    monkeypatch: pytest.MonkeyPatch, value: str | None, threads: int
):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads() == threads


def test_answers_come_in_the_order_of_the_calls():
    assert in_threads(lambda a, b: a * b, [(2, 3), (4, 5), (6, 7)]) == [6, 20, 42]
    assert in_threads(lambda a: a, []) == []


def test_what_fails_in_a_thread_fails_here():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda a: 1 / a, [(1,), (0,)])
