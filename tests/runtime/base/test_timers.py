"""Clocks that ranks agree on: each once, and again if what it was for has not been done."""

import pytest

from xtrain.runtime.base import state as timers
from xtrain.runtime.base.state import Clocks


@pytest.fixture
def now(monkeypatch):
    found = [100.0]
    monkeypatch.setattr(timers.time, "monotonic", lambda: found[0])
    return found


def test_a_clock_runs_out_once_a_period(now):
    clocks = Clocks()
    fast, slow, question = clocks.add(10), clocks.add(1000), clocks.ask_for(lambda: 7)
    for seconds, due in ((5, False), (10, True), (5, False), (5, True)):
        now[0] += seconds
        clocks.answer(clocks.ask(first=True))
        assert clocks.due(fast) == due and not clocks.due(slow) and clocks.value(question) == 7


def test_what_recurs_with_one_period_falls_into_the_same_steps(now):
    """Else a state that is measured as often as it is saved would be measured in another step than it is saved in."""
    clocks = Clocks()
    assert clocks.add(10) == clocks.add(10) != clocks.add(20)
    assert clocks.ask_for(lambda: 1) != clocks.ask_for(lambda: 2)


def test_what_was_due_and_has_not_been_done_is_due_again(now):
    """As in a step that a run goes back from, behind which no tick is looked at."""
    clocks = Clocks()
    fast, slow, question = clocks.add(10), clocks.add(1000), clocks.ask_for(lambda: 7)
    now[0] += 10
    clocks.answer(clocks.ask(first=True))
    assert clocks.due(fast)
    clocks.put_back()
    now[0] += 1
    heard = clocks.ask(first=True)
    assert heard == [1.0, 0.0, 7.0]
    clocks.answer(heard)
    assert clocks.due(fast) and not clocks.due(slow) and clocks.value(question) == 7
    now[0] += 1
    clocks.answer(clocks.ask(first=True))
    assert not clocks.due(fast)
