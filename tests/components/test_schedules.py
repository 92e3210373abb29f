"""Schedules as others define them: transformers' `get_inverse_sqrt_schedule` and
`get_polynomial_decay_schedule_with_warmup`, whose step counts from 0 where ours counts from 1."""

import pytest

from xtrain.dsl.schema.optimizers import SCHEDULERS


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("timescale", [None, 20])
def test_inverse_sqrt(warmup, timescale):
    args = {"lr": 2.0, "warmup": {"steps": warmup}, "timescale": timescale}
    rate = SCHEDULERS["inverse_sqrt"].rate(args, 100)
    scale = timescale or warmup or 10_000
    shift = scale - warmup
    for step in range(1, 101):
        expected = step / warmup if step <= warmup else 1 / ((step + shift) / scale) ** 0.5
        assert rate(step - 1) == pytest.approx(2.0 * expected, rel=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial(power):
    warmup, total, floor, lr = 10, 50, 0.1, 3.0
    args = {"lr": lr, "warmup": {"steps": warmup}, "floor": floor, "power": power}
    rate = SCHEDULERS["polynomial"].rate(args, total)
    for step in range(1, total + 1):
        left = 1 - (step - warmup) / (total - warmup)
        expected = lr * step / warmup if step <= warmup else (lr - floor * lr) * left**power + floor * lr
        assert rate(step - 1) == pytest.approx(expected, rel=1e-12)
    assert rate(total - 1) == pytest.approx(floor * lr) and rate(warmup - 1) == lr


def test_a_power_of_one_is_the_straight_line():
    args = {"lr": 1.0, "warmup": {"steps": 5}, "floor": 0.2, "power": 1.0}
    power, line = (SCHEDULERS[name].rate(args, 40) for name in ("polynomial", "linear"))
    assert [power(i) for i in range(40)] == pytest.approx([line(i) for i in range(40)], rel=1e-15)


def test_what_a_plan_says_of_them(tmp_path):
    from xtrain.planner.review.training import breakpoints

    length = {"steps": 10}
    args = {"kind": "inverse_sqrt", "lr": 1.0, "steps": 90, "warmup": length, "timescale": None}
    assert breakpoints(args) == ["warm-up over 10 steps", "1/√step to 0.333 at step 90"]
    args = {"kind": "polynomial", "lr": 1.0, "steps": 90, "warmup": length, "floor": 0.5, "power": 2.0}
    assert breakpoints(args) == ["warm-up over 10 steps", "power 2 to 0.5 at step 90"]
