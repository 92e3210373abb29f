"""Learning rates against hand-computed vectors: step i (from 0) uses the factor of s = i + 1."""

from fractions import Fraction

import pytest
from attrs import evolve

from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.learning_rate import SHAPES, closed_form
from xtrain.plan.plan import PlanPhase
from xtrain.runtime.nn.optimizer import build_schedule

COSINE = [.25, .5, .75, 1, .9914, .9657, .9242, .8682, .8, .7222, .6378, .55, .4622, .3778, .3, .2318, .1758, .1343, .1086, .1]  # noqa: E501  # fmt: skip


class Counted:
    """A feed whose data gives 20 steps."""

    phases: tuple[PlanPhase, ...] = ()
    batch = Arithmetic(micro=1, accumulate=1, rows=1, sequence=8, steps=20)


def phase(name: str, first: int | None, lr_scale: float, fraction: float | None = None) -> PlanPhase:
    return PlanPhase(name=name, first=first, fraction=fraction, shares={"a": 1.0}, lr_scale=lr_scale)


def schedule(**settings):
    given = {"kind": "cosine", "lr": 1.0, "steps": 20, "warmup": {"steps": 4}, "floor": 0.1} | settings
    return build_schedule(Counted(), **given)


def test_cosine():
    assert [schedule()(i) for i in range(20)] == pytest.approx(COSINE, abs=5e-5)


def test_linear():
    rate = schedule(kind="linear")
    assert [rate(i) for i in (3, 4, 5, 19)] == pytest.approx([1, 0.94375, 0.8875, 0.1])


@pytest.mark.parametrize(
    ("shape", "rates"),
    [("cosine", [0.9657, 0.8682, 0.7222, 0.55, 0.3778, 0.2318, 0.1343, 0.1]),
        ("sqrt", [0.9419, 0.8794, 0.8115, 0.7364, 0.6511, 0.55, 0.4182, 0.1]),
        ("linear", [0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1])],
)  # fmt: skip
def test_wsd_stays_then_falls(shape, rates):
    rate = schedule(kind="wsd", decay={"steps": 8}, shape=shape)
    assert [rate(i) for i in range(3, 12)] == [1.0] * 9
    assert [rate(i) for i in range(12, 20)] == pytest.approx(rates, abs=1e-4)


def test_constant_only_rises():
    given = {"kind": "constant", "lr": 2.0, "steps": 20, "warmup": {"steps": 2}}
    assert [build_schedule(Counted(), **given)(i) for i in range(4)] == [1.0, 2.0, 2.0, 2.0]
    given["warmup"] = {"steps": 0}
    assert build_schedule(Counted(), **given)(0) == 2.0


def test_shares_are_of_the_budget_and_the_budget_may_come_from_the_data():
    feed = Counted()
    feed.batch = evolve(feed.batch, steps=None, epochs=2.0).counted(Fraction(10))
    rate = build_schedule(feed, kind="cosine", lr=1.0, steps=None, warmup={"fraction": 0.2}, floor=0.1)
    assert rate(3) == 1.0 and rate(19) == pytest.approx(0.1)


def test_a_step_beyond_the_budget_keeps_the_floor():
    assert closed_form(1.0, 20, 4, 16, 0.1, SHAPES["cosine"])(25) == pytest.approx(0.1)


def test_warm_up_over_the_whole_budget():
    rate = schedule(warmup={"steps": 20})
    assert rate(19) == 1.0 and rate(9) == 0.5


@pytest.mark.parametrize("steps", [20, None])
def test_a_phase_scales_the_rate_of_its_very_steps(steps: int | None):
    given = {"kind": "cosine", "lr": 1.0, "steps": steps, "warmup": {"steps": 4}, "floor": 0.1}
    feed = Counted()
    feed.phases = (phase("warm", 0, 1.0), phase("half", 7, 0.5), phase("last", None, 0.25, fraction=0.9))
    plain, scaled = schedule(), build_schedule(feed, **given)
    scale = [1.0] * 7 + [0.5] * 11 + [0.25] * 2
    assert [scaled(i) for i in range(20)] == [plain(i) * scale[i] for i in range(20)]


def test_the_number_of_steps_may_be_settled_after_the_curve_is_made():
    given = {"kind": "linear", "lr": 1.0, "steps": None, "warmup": {"steps": 0}, "floor": 0.0}
    feed = Counted()
    rate = build_schedule(feed, **given)
    assert rate(9) == pytest.approx(0.5)
    feed.batch = evolve(feed.batch, steps=40)
    assert rate(9) == pytest.approx(0.75)
