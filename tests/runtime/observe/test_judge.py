"""Whom a rank blames that does not get on, from what it has read of the others."""

import pytest
from beats import reading
from msgspec.structs import replace

from xtrain.records.status import Heartbeat
from xtrain.runtime.observe.judge import HealthVerdict, SeenRank, judge

LIMIT = 100.0
NOW = 1000.0


def seen(found: Heartbeat | None, *, still: float = 100.0, silent: float = 0.0, fresh: bool | None = None) -> SeenRank:
    """still: seconds without a mark. silent: seconds without a new line."""
    return SeenRank(found, NOW - still, NOW - silent, silent == 0.0 if fresh is None else fresh)


def verdict(*ranks: SeenRank, own: int = 0, lasting: bool = False) -> HealthVerdict | None:
    return judge(own, dict(enumerate(ranks)), NOW, LIMIT, lasting=lasting)


def test_a_rank_whose_line_stands_still_is_frozen():
    assert verdict(seen(reading(0)), seen(reading(1), silent=60), seen(reading(2))) == HealthVerdict((1,), True)


@pytest.mark.parametrize(
    ("silent", "lasting", "frozen"), [(40, False, False), (60, False, True), (60, True, False), (85, True, True)]
)
def test_lines_that_come_late_are_waited_for_longer_where_disks_may_be_busy(silent, lasting, frozen):
    ranks = seen(reading(0)), seen(reading(1), silent=silent)
    assert verdict(*ranks, lasting=lasting) == (HealthVerdict((1,), True) if frozen else None)


def test_a_rank_that_has_never_written_a_line_is_frozen_too():
    assert verdict(seen(reading(0)), seen(None, silent=60)) == HealthVerdict((1,), True)


def test_all_that_are_frozen_are_named():
    ranks = seen(reading(0)), seen(reading(1), silent=60), seen(reading(2)), seen(reading(3), silent=70)
    assert verdict(*ranks) == HealthVerdict((1, 3), True)


def test_of_ranks_that_live_the_one_that_is_least_far_is_named():
    ranks = seen(reading(0)), seen(reading(1, within=2, node="step.fetch")), seen(reading(2))
    assert verdict(*ranks) == HealthVerdict((1,), False)
    assert verdict(*ranks, own=1) == HealthVerdict((1,), False), "it names itself"


def test_a_step_counts_for_more_than_the_marks_within_it():
    ranks = seen(reading(0, step=8, within=1)), seen(reading(1, step=7, within=9))
    assert verdict(*ranks) == HealthVerdict((1,), False)


def test_of_ranks_that_are_equally_far_the_one_that_waits_for_nobody_is_named():
    ranks = seen(reading(0)), seen(reading(1)), seen(reading(2, place="my/own.py:4 sleep"))
    assert verdict(*ranks) == HealthVerdict((2,), False)


def test_where_nothing_distinguishes_them_all_are_named():
    assert verdict(seen(reading(0)), seen(reading(1))) == HealthVerdict((0, 1), False)


def test_a_rank_alone_names_itself():
    assert verdict(seen(reading(0))) == HealthVerdict((0,), False)
    assert verdict(seen(reading(0)), lasting=True) is None


def test_nobody_is_named_while_any_rank_gets_on():
    ranks = seen(reading(0)), seen(reading(1), silent=60), seen(reading(2, step=3), still=5)
    assert verdict(*ranks) is None


def test_nobody_is_named_in_or_behind_a_node_that_may_last():
    saving = reading(1, within=2, node="tick.checkpoint", lasting=True)
    assert verdict(seen(reading(0)), seen(saving)) is None, "the others wait for one that saves"
    assert verdict(seen(saving), seen(reading(1)), lasting=True) is None, "it saves, and others wait"


def test_nobody_is_named_while_somebody_looks_with_a_debugger():
    ranks = seen(reading(0)), seen(reading(1, within=2, debugger=True))
    assert verdict(*ranks) is None
    assert verdict(seen(reading(0)), seen(reading(1), silent=60), seen(reading(2, debugger=True))) is None


def test_where_the_own_line_cannot_be_written_those_of_others_say_nothing():
    """The disk is full, or the folder is gone: all lines stand still, though all ranks live."""
    blind = seen(reading(0), silent=20), seen(reading(1), silent=60)
    assert verdict(*blind) is None
    blind = seen(reading(0), silent=60), seen(reading(1), silent=60)
    assert verdict(*blind) == HealthVerdict((), False), "but a run that does not get on is ended"
    assert verdict(*blind, lasting=True) is None


def test_one_reading_that_is_old_is_no_reason_yet():
    """Read a second after the last one: whether that rank lives is not known."""
    assert verdict(seen(reading(0)), seen(reading(1, within=1), silent=2, fresh=False)) is None


def test_readings_say_what_has_moved():
    each = SeenRank(None, 0.0, 0.0)
    each.take(reading(1), 10.0)
    assert (each.moved, each.line_moved, each.fresh) == (10.0, 10.0, True)
    each.take(reading(1, alive=901), 13.0)
    assert (each.moved, each.line_moved, each.fresh) == (10.0, 13.0, True)
    each.take(reading(1, alive=901), 16.0)
    assert (each.moved, each.line_moved, each.fresh) == (10.0, 13.0, False)
    each.take(None, 19.0)
    assert (each.moved, each.line_moved, each.fresh) == (10.0, 13.0, False), "a line that cannot be read has not moved"
    each.take(replace(reading(1, alive=3), born=6), 22.0)
    assert (each.moved, each.line_moved, each.fresh) == (22.0, 22.0, True), "another process"


def test_clocks_of_others_do_not_matter():
    ranks = seen(reading(0)), seen(replace(reading(1, within=1), time=9e12, idle=0.0))
    assert verdict(*ranks) == HealthVerdict((1,), False)
