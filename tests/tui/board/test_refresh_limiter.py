"""What is costly happens less often."""

from xtrain.tui.board.pane import FREE, SHARE, RefreshLimiter


class Hands:
    """Clocks that a test turns."""

    def __init__(self) -> None:
        self.now, self.spent = 0.0, 100.0


def worked(hands: Hands, seconds: float) -> RefreshLimiter:
    limiter = RefreshLimiter(lambda: hands.now, lambda: hands.spent)
    assert limiter.due
    with limiter.spending():
        hands.spent += seconds
        hands.now += seconds
    return limiter


def test_what_costs_little_is_due_at_once() -> None:
    assert worked(Hands(), FREE).due


def test_what_costs_much_waits_until_it_is_a_small_share() -> None:
    hands = Hands()
    limiter = worked(hands, 0.5)
    hands.now += 0.5 / SHARE - 0.01
    assert not limiter.due
    hands.now += 0.02
    assert limiter.due


def test_time_in_which_others_compute_is_not_counted() -> None:
    hands = Hands()
    limiter = RefreshLimiter(lambda: hands.now, lambda: hands.spent)
    with limiter.spending():
        hands.now += 10.0
    assert limiter.due
