"""The closed form of a curriculum: shares, cursors and phases at any step, whatever came before."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.plan.arithmetic import Arithmetic, counted, exact, rows_of_epoch
from xtrain.plan.learning_rate import first_step, in_order, phase_at
from xtrain.plan.plan import PlanPhase
from xtrain.plan.step_sizes import LONGEST, STRIDE, TURN, MixtureSampler, RepeatedSizes, even_stride, floor_sum
from xtrain.runtime.feed.curriculum import Curriculum, Position, sampled_datasets

NAMES = ("a", "b", "c")
# Of any stretch of rows, each dataset has its share up to so many.
ERROR = 6


def phase(name: str, first: int | None = 0, fraction: float | None = None, **shares: float) -> PlanPhase:
    return PlanPhase(name=name, first=first, fraction=fraction, shares=shares)


SHARES = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any).map(lambda weights: [w / 5 for w in weights])
PHASES = st.lists(st.tuples(st.integers(0, 30), SHARES), min_size=1, max_size=4).map(
    lambda drawn: tuple(
        phase(f"p{number}", first if number else 0, **dict(zip(NAMES, shares, strict=True)))
        for number, (first, shares) in enumerate(sorted(drawn, key=lambda pair: pair[0]))
    )
)


def curriculum(phases: tuple[PlanPhase, ...], rows: int = 4, seed: int = 0, steps: int = 100, **more) -> Curriculum:
    return Curriculum(datasets=NAMES, phases=phases, steps=steps, rows_per_step=rows, seed=seed, **more)


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_a_sum_of_floors(count: int, divisor: int, factor: int, offset: int):
    assert floor_sum(count, divisor, factor, offset) == sum((factor * i + offset) // divisor for i in range(count))


def test_rows_that_come_again():
    """Of two steps, three times each; from any step on, whatever rows its steps then have."""
    sizes = RepeatedSizes(4, steps=2, turns=3)
    one = Curriculum(datasets=("a",), phases=(phase("all", a=1.0),), steps=40, rows_per_step=sizes, seed=0)
    firsts = [one.rows(step)[1].tolist() for step in range(14)]
    assert [rows[0] for rows in firsts] == [0, 4, 0, 4, 0, 4, 8, 12, 8, 12, 8, 12, 16, 20]
    assert all(rows == list(range(rows[0], rows[0] + 4)) for rows in firsts)
    assert [one.rows_before(step) for step in range(8)] == [0, 4, 0, 4, 0, 4, 8, 12]
    # The first step that takes a row.
    assert [sizes.steps_of(place + 1) - 1 for place in (0, 3, 4, 7, 8, 15, 16)] == [0, 0, 1, 1, 6, 7, 12]
    for begin in range(13):
        later = evolve(one, start=one.position(begin))
        assert [later.rows(step)[1].tolist() for step in range(begin, 14)] == firsts[begin:]
        taken = one.position(begin).cursors.get("a", 0)
        assert sizes.uses(begin, taken) == 4 * begin
    larger = evolve(one, start=one.position(4), rows_per_step=RepeatedSizes(8, steps=2, turns=3))
    assert [larger.rows(step)[1][0] for step in range(4, 8)] == [0, 8, 16, 24]


@given(SHARES, st.integers(0, 2**64 - 1), st.integers(0, 10**15), st.integers(0, 400))
def test_counts_are_those_of_the_draws(shares: list[float], seed: int, first: int, count: int):
    sampler = MixtureSampler.of(shares, seed, "train")
    sampled = sampled_datasets(sampler, first, count)
    assert sampler.counts(first, count) == np.bincount(sampled, minlength=3).tolist()
    assert all(shares[number] > 0 for number in set(sampled.tolist()))


@given(SHARES, st.integers(0, 2**40), st.integers(0, 2**32))
def test_any_stretch_has_its_mix_up_to_a_few_rows(shares: list[float], first: int, count: int):
    counts = MixtureSampler.of(shares, 3, "train").counts(first, count)
    total = sum(map(Fraction, shares))
    for share, number in zip(shares, counts, strict=True):
        assert abs(number - count * Fraction(share) / total) < ERROR
        assert share or not number


@pytest.mark.parametrize("bounds", [(0, 0, TURN), (0, 0, 0, TURN), (0, STRIDE, STRIDE, TURN), (0, 7, TURN, TURN)])
def test_a_point_on_a_bound_belongs_to_what_begins_there(bounds: tuple[int, ...]):
    sampler = MixtureSampler(0, bounds)
    sampled = sampled_datasets(sampler, 0, 2).tolist()
    assert sampled == [max(n for n in range(len(bounds) - 1) if bounds[n] <= u) for u in (0, STRIDE)]
    assert sampler.counts(0, 2) == np.bincount(sampled, minlength=len(bounds) - 1).tolist()
    assert all(bounds[number] < bounds[number + 1] for number in sampled)


def test_no_share_makes_the_stride_fall_into_step_with_itself():
    """Its continued fraction has small numbers only: that is what keeps the error of any stretch small."""
    quotients, a, b = [], TURN, STRIDE
    while b:
        quotients.append(a // b)
        a, b = b, a % b
    assert STRIDE % 2 == 1 and max(quotients) <= 4


def test_phases_and_seeds_draw_differently():
    samplers = [MixtureSampler.of([1, 1], seed, name) for seed, name in ((0, "a"), (0, "b"), (1, "a"))]
    sequences = [sampled_datasets(sampler, 0, 64).tolist() for sampler in samplers]
    assert sequences[0] != sequences[1] and sequences[0] != sequences[2]


@given(PHASES, st.integers(1, 9), st.integers(0, 2**32))
@settings(deadline=None)
def test_each_dataset_gives_its_rows_one_by_one(phases: tuple[PlanPhase, ...], rows: int, seed: int):
    schedule = curriculum(phases, rows, seed)
    seen = dict.fromkeys(NAMES, 0)
    for step in range(40):
        assert schedule.position(step).cursors.get("b", 0) == seen["b"]
        assert schedule.rows_before(step) == step * rows
        for number, cursor in zip(*(values.tolist() for values in schedule.rows(step)), strict=True):
            assert phase_at(phases, step, 100).shares[NAMES[number]] > 0
            assert cursor == seen[NAMES[number]]
            seen[NAMES[number]] += 1


@given(PHASES, st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), min_size=1, max_size=5), st.integers(0, 99))
@settings(deadline=None)
def test_a_run_that_stops_anywhere_goes_on_with_the_next_rows(phases: tuple[PlanPhase, ...], legs, seed: int):
    """Also with other rows per step: nothing is repeated, nothing skipped."""
    position, seen, where = Position(), Counter(), dict.fromkeys(NAMES, 0)
    for steps, rows in legs:
        leg = curriculum(phases, rows, seed, start=position)
        for step in range(position.step, position.step + steps):
            for number, cursor in zip(*(values.tolist() for values in leg.rows(step)), strict=True):
                assert cursor == where[NAMES[number]]
                where[NAMES[number]] += 1
                seen[phase_at(phases, step, 100).name] += 1
        position = leg.position(position.step + steps)
        assert position.rows == sum(seen.values()) == sum(where.values())
        assert {name: position.cursors.get(name, 0) for name in NAMES} == where
        if position.rows:
            assert position.sampled == seen[position.phase]


@given(PHASES, st.integers(0, 40), st.integers(0, 2**32))
def test_a_run_that_stops_and_goes_on_alike_is_the_run_that_did_not(
    phases: tuple[PlanPhase, ...], stop: int, seed: int
):
    whole = curriculum(phases, 5, seed)
    again = curriculum(phases, 5, seed, start=whole.position(stop))
    for step in range(stop, stop + 12):
        assert [x.tolist() for x in again.rows(step)] == [x.tolist() for x in whole.rows(step)]
        assert again.position(step + 1) == whole.position(step + 1)


def test_a_later_phase_that_is_changed_after_a_stop_is_as_if_it_had_always_been_so():
    early = (phase("one", a=0.5, b=0.5), phase("two", 10, c=1.0))
    late = (phase("one", a=0.5, b=0.5), phase("two", 20, b=0.2, c=0.8))
    for stop in (0, 3, 10):
        moved = curriculum(late, start=curriculum(early).position(stop))
        for step in (*range(stop, 12), 19, 20, 33):
            assert [x.tolist() for x in moved.rows(step)] == [x.tolist() for x in curriculum(late).rows(step)]


def test_a_phase_whose_shares_change_while_it_lasts_goes_on_with_the_new_ones():
    before = curriculum((phase("one", a=1.0, b=0.0),)).position(7)
    after = curriculum((phase("one", a=0.0, b=1.0, c=0.0),), start=before)
    assert [x.tolist() for x in after.rows(7)] == [[1] * 4, [0, 1, 2, 3]]
    assert after.position(9).cursors == {"a": 28, "b": 8, "c": 0}


def test_the_first_rows_of_a_phase_are_of_its_mix():
    schedule = curriculum((phase("one", a=1.0), phase("two", 5, b=1.0), phase("three", None, 0.5, c=1.0)), steps=16)
    assert [set(schedule.rows(step)[0].tolist()) for step in (0, 4, 5, 7, 8, 15)] == [{0}, {0}, {1}, {1}, {2}, {2}]


def test_one_dataset_is_taken_row_by_row():
    schedule = Curriculum(datasets=("a",), phases=(phase("train", a=1.0),), steps=9, rows_per_step=3, seed=1)
    resumed = evolve(schedule, start=Position(step=4, rows=20, cursors={"a": 20}, phase="train", sampled=20))
    assert [schedule.rows(2)[1].tolist(), resumed.rows(5)[1].tolist()] == [[6, 7, 8], [23, 24, 25]]
    assert resumed.position(6) == Position(step=6, rows=26, cursors={"a": 26}, phase="train", sampled=26)


def test_what_lies_before_the_beginning_is_not_asked_for():
    with pytest.raises(AssertionError, match="step 3 lies before"):
        curriculum((phase("one", a=1.0),), start=Position(step=4)).rows(3)


def test_starts_in_steps_and_in_shares_come_into_order_once_the_steps_are_counted():
    phases = (phase("train"), phase("half", None, 0.5), phase("late", 30))
    assert [(first, each.name) for first, each in in_order(phases, 40)] == [(0, "train"), (20, "half"), (30, "late")]
    assert [(first, each.name) for first, each in in_order(phases, 80)] == [(0, "train"), (30, "late"), (40, "half")]
    assert phase_at(phases, 35, 80).name == "late" and phase_at(phases, 999, 80).name == "half"
    assert first_step(phases[1], 5) == 2


def test_of_phases_that_begin_together_the_last_one_has_the_steps():
    phases = (phase("train"), phase("brief", None, 0.01), phase("rest", None, 0.02))
    assert [each.name for _, each in in_order(phases, 10)] == ["rest"]


@pytest.mark.parametrize(
    ("epochs", "rows", "each", "taken", "steps"),
    [(1, 10, 3, 0, 4), (3, 10, 5, 0, 6), (0.1, 10, 1, 0, 1), (2, 10, 4, 12, 2), (1, 10, 4, 12, 0), (1.5, 4, 1, 5, 1)],
)
def test_steps_that_are_left_of_epochs(epochs: float, rows: int, each: int, taken: int, steps: int):
    batch = Arithmetic(micro=1, accumulate=each, rows=each, sequence=8, epochs=epochs)
    assert batch.resumed(None, 0, taken).counted(Fraction(rows)).steps == steps


def test_an_epoch_has_the_rows_of_all_that_is_trained_on():
    phases = (phase("one", a=0.9, b=0.1, c=0.0), phase("two", 10, a=0.0, b=1.0, c=0.0))
    assert rows_of_epoch(phases, {"a": 30, "b": 12, "c": 1000}) == 42
    assert rows_of_epoch((phase("train", a=1.0),), {"a": 30}) == 30


# Weights in epochs ----------------------------------------------------------------------------------------------------

NUM_ROWS = st.fixed_dictionaries({name: st.integers(1, 70) for name in NAMES})
EPOCHS = st.fixed_dictionaries({name: st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 1 / 3)) for name in NAMES})
EPOCHS = EPOCHS.filter(lambda epochs: any(epochs.values()))
WHOLE = st.fixed_dictionaries({name: st.integers(0, 3).map(float) for name in NAMES})
WHOLE = WHOLE.filter(lambda epochs: any(epochs.values()))


def by_epochs(name: str, epochs: dict[str, float], first: int = 0, lr_scale: float = 1.0) -> PlanPhase:
    return PlanPhase(name=name, first=first, fraction=None, shares={}, lr_scale=lr_scale, passes=epochs)


def sampler_in(epochs: dict[str, float], num_rows: dict[str, int], seed: int) -> MixtureSampler:
    return MixtureSampler.of_epochs([exact(epochs[name]) * num_rows[name] for name in NAMES], seed)


@given(EPOCHS, NUM_ROWS, st.integers(0, 2**32), st.integers(0, 10**15), st.integers(0, 300))
@settings(deadline=None)
def test_any_stretch_of_an_epoch_has_its_mix_up_to_a_few_rows(epochs, num_rows, seed, first, count):
    sampler = sampler_in(epochs, num_rows, seed)
    sampled, counts = sampled_datasets(sampler, first, count), sampler.counts(first, count)
    assert counts == np.bincount(sampled, minlength=3).tolist()
    rows = [exact(epochs[name]) * num_rows[name] for name in NAMES]
    for own, number in zip(rows, counts, strict=True):
        assert abs(number - count * own / sum(rows)) < ERROR
        assert own or not number


@given(WHOLE, NUM_ROWS, st.integers(0, 99), st.integers(0, 500), st.integers(1, 3))
@settings(deadline=None)
def test_an_epoch_takes_every_row_as_often_as_is_said(epochs, num_rows, seed, first, times):
    """Also between two epochs: any so many rows in a row."""
    rows = [int(epochs[name] * num_rows[name]) for name in NAMES]
    sampled = sampled_datasets(sampler_in(epochs, num_rows, seed), first, times * sum(rows))
    assert np.bincount(sampled, minlength=3).tolist() == [times * own for own in rows]


@given(EPOCHS.filter(lambda epochs: 1 / 3 not in epochs.values()), NUM_ROWS, st.integers(0, 99))
@settings(deadline=None)
def test_fractions_of_epochs_come_out_even(epochs, num_rows, seed):
    """0.1 and 0.5 epochs of any number of rows are whole after ten or twenty epochs."""
    sampler = sampler_in(epochs, num_rows, seed)
    rows = [exact(epochs[name]) * num_rows[name] for name in NAMES]
    assert (20 * sum(rows)) % sampler.turn == 0
    assert sampler.counts(7, int(20 * sum(rows))) == [20 * own for own in rows]


def test_a_fraction_that_never_comes_out_even_is_kept_for_longer_than_any_run():
    sampler = sampler_in({"a": 1 / 3, "b": 1.0, "c": 0.0}, {"a": 10**9 + 7, "b": 10**9, "c": 5}, 0)
    assert LONGEST / 2 < sampler.turn <= LONGEST
    rows = exact(1 / 3) * (10**9 + 7), Fraction(10**9)
    counts = sampler.counts(0, 10**15)
    assert all(abs(number - 10**15 * own / sum(rows)) < 30 for number, own in zip(counts, rows, strict=False))
    assert sampler.counts(10**12, 500) == np.bincount(sampled_datasets(sampler, 10**12, 500), minlength=3).tolist()


@given(st.integers(1, 2**62))
def test_a_stride_meets_every_point_and_crowds_none(turn: int):
    stride, quotients, a, b = even_stride(turn), [], turn, even_stride(turn)
    while b:
        quotients.append(a // b)
        a, b = b, a % b
    assert a == 1 and 0 <= stride < max(turn, 2) and max(quotients, default=0) < 30


@given(WHOLE, NUM_ROWS, st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=6), st.integers(0, 99))
@settings(deadline=None)
def test_epochs_come_out_even_whatever_happens_on_the_way(epochs, num_rows, legs, seed):
    """Stops at any step, other rows per step, and phases that come, go and change only the rate."""
    position = Position()
    for number, (steps, rows) in enumerate(legs):
        phases = [by_epochs("train", epochs), by_epochs("late", epochs, 11, 0.5), by_epochs("last", epochs, 23, 0.1)]
        leg = curriculum(tuple(phases[: 1 + number % 3]), rows, seed, num_rows=num_rows, start=position)
        taken = {**dict.fromkeys(NAMES, 0), **position.cursors}
        for step in range(position.step, position.step + steps):
            for dataset, cursor in zip(*(values.tolist() for values in leg.rows(step)), strict=True):
                assert cursor == taken[NAMES[dataset]]
                taken[NAMES[dataset]] += 1
        position = leg.position(position.step + steps)
        assert {**dict.fromkeys(NAMES, 0), **position.cursors} == taken
    # On to the end of the epoch under way, row by row.
    epoch = int(rows_of_epoch((by_epochs("train", epochs),), num_rows))
    begun = -(-position.rows // epoch)
    rest = curriculum((by_epochs("late", epochs),), 1, seed, num_rows=num_rows, start=position)
    end = rest.position(position.step + begun * epoch - position.rows)
    assert {name: end.cursors.get(name, 0) for name in NAMES} == (
        {name: begun * epochs[name] * num_rows[name] for name in NAMES}
    )


def test_weights_that_change_begin_an_epoch_anew():
    num_rows, one, two = {"a": 8, "b": 4, "c": 1}, {"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 1.0, "b": 2.0, "c": 0.0}
    schedule = curriculum((by_epochs("one", one), by_epochs("two", two, 3)), 1, num_rows=num_rows)
    apart = schedule.position(3).cursors
    assert schedule.position(3).sampled == 3 and schedule.position(4).sampled == 1
    assert schedule.position(3 + 16).cursors == {"a": apart["a"] + 8, "b": apart["b"] + 8, "c": 0}
    # So they do between two starts, and from shares to epochs.
    for phases in ((by_epochs("two", two),), (by_epochs("one", two),)):
        moved = curriculum(phases, 1, num_rows=num_rows, start=schedule.position(3))
        assert moved.position(4).sampled == 1 and moved.rows(3)[0] == schedule.rows(3)[0]
    shares = curriculum((phase("one", a=0.5, b=0.5),), 1).position(3)
    assert curriculum((by_epochs("one", two),), 1, num_rows=num_rows, start=shares).position(4).sampled == 1


def test_shares_of_epochs_follow_from_the_rows():
    phases = (by_epochs("one", {"a": 1.0, "b": 3.0, "c": 0.0}), phase("two", 5, a=0.5, b=0.0, c=0.5))
    first, second = counted(phases, {"a": 60, "b": 20, "c": 9})
    assert first.shares == {"a": 0.5, "b": 0.5, "c": 0.0} and second == phases[1]
    assert rows_of_epoch(phases, {"a": 60, "b": 20, "c": 9}) == 120
    assert rows_of_epoch((by_epochs("one", {"a": 0.1, "b": 0.5}),), {"a": 11, "b": 3}) == Fraction(26, 10)


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(lambda rows: sum(rows) > 1), st.integers(0, 99))
def test_exact_shares_are_those_of_every_step_wherever_a_run_begins(taken: list[int], seed: int):
    """Each dataset gives the rows that a run on it alone would take, also where a run goes on."""
    rows = sum(taken)
    shares = {name: each / rows for name, each in zip(NAMES, taken, strict=True)}
    first, second = (evolve(phase(name, at, **shares), exact_rows=rows) for name, at in (("a", 0), ("b", 3)))
    whole = curriculum((first, second), rows=rows, seed=seed)
    # Any stretch as long as a step has the same rows, wherever the circle is entered.
    later = evolve(whole, start=evolve(whole.position(2), sampled=5))
    for step in range(6):
        for each in (whole, *([later] if step >= 2 else [])):
            datasets, cursors = each.rows(step)
            for number, count in enumerate(taken):
                assert cursors[datasets == number].tolist() == list(range(step * count, (step + 1) * count))
