"""What is costly happens less often."""

from xtrain.tui.board.pacing import FREE, SHARE, Pace


class Hands:
    """Clocks that a test turns."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0


def worked(hands: Hands, seconds: float) -> Pace:
    pace = Pace(lambda: hands.now, lambda: hands.spent)
    assert pace.due
    with pace.spending():
        hands.spent += seconds
        hands.now += seconds
    return pace


def test_what_costs_little_is_due_at_once() -> None:
    assert worked(Hands(), FREE).due


def test_what_costs_much_waits_until_it_is_a_small_share() -> None:
    hands = Hands()
    pace = worked(hands, 0.5)
    hands.now += 0.5 / SHARE - 0.01
    assert not pace.due
    hands.now += 0.02
    assert pace.due


def test_time_in_which_others_compute_is_not_counted() -> None:
    hands = Hands()
    pace = Pace(lambda: hands.now, lambda: hands.spent)
    with pace.spending():
        hands.now += 10.0
    assert pace.due
