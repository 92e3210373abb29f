"""What is costly happens less often."""

from xtrain.tui.board.refresh_limiter import FREE, SHARE, RefreshLimiter


class Hands:
    """Clocks that a test turns."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0


def worked(hands: Hands, seconds: float) -> RefreshLimiter:
    sparing = RefreshLimiter(lambda: hands.now, lambda: hands.spent)
    assert sparing.due
    with sparing.spending():
        hands.spent += seconds
        hands.now += seconds
    return sparing


def test_what_costs_little_is_due_at_once() -> None:
    assert worked(Hands(), FREE).due


def test_what_costs_much_waits_until_it_is_a_small_share() -> None:
    hands = Hands()
    sparing = worked(hands, 0.5)
    hands.now += 0.5 / SHARE - 0.01
    assert not sparing.due
    hands.now += 0.02
    assert sparing.due


def test_time_in_which_others_compute_is_not_counted() -> None:
    hands = Hands()
    sparing = RefreshLimiter(lambda: hands.now, lambda: hands.spent)
    with sparing.spending():
        hands.now += 10.0
    assert sparing.due
