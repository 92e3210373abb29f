"""What ranks do together about alerts: asked by the first, heard by all, done once."""

import pytest

from xtrain.plan.plan import Trigger
from xtrain.runtime.base.state import Clocks
from xtrain.runtime.loop.alerts import AlertActions

TRIGGERS = tuple(Trigger(event=name, nodes=(name,), stop=False) for name in ("loss_spike", "disk", "slow"))


class Rank:
    def __init__(self, triggers: tuple[Trigger, ...] = TRIGGERS) -> None:
        self.clocks, self.alert_actions = Clocks(), AlertActions(triggers)
        self.alert_actions.ask_through(self.clocks)


def meet(first: Rank, *others: Rank) -> None:
    said = first.clocks.ask(first=True)
    for other in others:
        assert other.clocks.ask(first=False) == [0.0] * len(said)
    for rank in (first, *others):
        rank.clocks.answer(said)
        rank.alert_actions.hear()


@pytest.mark.parametrize("raised", [["disk"], ["slow", "loss_spike"], ["loss_spike", "loss_spike"]])
def test_all_ranks_hear_of_the_same_once(raised):
    first, other = Rank(), Rank()
    for kind in raised:
        first.alert_actions.raised(kind)
    meet(first, other)
    expected = [each for each in TRIGGERS if each.event in raised]
    assert first.alert_actions.take() == other.alert_actions.take() == expected
    meet(first, other)
    assert first.alert_actions.due == other.alert_actions.due == []


def test_what_the_plan_does_nothing_about_is_not_asked():
    rank = Rank(())
    rank.alert_actions.raised("disk")
    assert rank.clocks.ask(first=True) == []


def test_an_alert_that_no_reaction_is_about_is_none():
    first = Rank()
    first.alert_actions.raised("memory")
    meet(first)
    assert first.alert_actions.due == []
