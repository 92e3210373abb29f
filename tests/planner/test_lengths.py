"""Lengths of a run that is resumed with another batch, against amounts counted by hand: every length × unit × change.

The run has 20 steps of 4 rows of 16 tokens: 80 rows, 2 epochs of 40, 1,280 tokens. It stops after step 8.
"""

import json
import math
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.learning_rate import learning_rate
from xtrain.plan.plan import Counted, Plan
from xtrain.plan.step_sizes import StepSizes, past_of, sizes_of
from xtrain.plan.timeline import is_due, known_arithmetic, known_timeline, next_due, resumed_plan
from xtrain.planner.compile import compile_plan
from xtrain.planner.rules.schedule import begins_at

STOP = 8
UNITS = {"steps": 1, "tokens": 64, "epochs": 0.1}  # what a step of 4 rows is
# Rows of a step, and ranks, after the resume: each of them has rows that follow from micro.
CHANGES = {
    "larger": (8, 1), "smaller": (2, 1), "much larger": (20, 1), "more ranks": (8, 2), "same": (4, 1),
    "another run": (8, 1),
}  # fmt: skip
LENGTHS = ("budget", "warmup", "decay", "late decay", "phase", "stop_at", "stop_after", "every", "ema")
SHARES = ("share", "share stop_at", "share stop_after")  # of the budget, whatever its unit
# Of the whole table these rows run each time: each length, unit and change.
USUAL = {
    tuple(row.split(" | "))
    for row in """budget | steps | steps | larger
        budget | tokens | tokens | same
        budget | tokens | tokens | larger
        budget | epochs | epochs | smaller
        warmup | tokens | tokens | larger
        warmup | steps | tokens | more ranks
        warmup | epochs | steps | much larger
        decay | tokens | tokens | smaller
        decay | steps | tokens | larger
        late decay | epochs | epochs | larger
        late decay | steps | tokens | more ranks
        decay | steps | tokens | much larger
        phase | tokens | steps | larger
        stop_at | epochs | tokens | smaller
        every | tokens | steps | larger
        share | steps | steps | smaller
        share | tokens | tokens | larger
        share | epochs | epochs | much larger
        share stop_at | steps | steps | larger
        share stop_at | tokens | tokens | smaller
        share stop_at | epochs | epochs | larger
        share stop_after | steps | steps | smaller
        share stop_after | tokens | tokens | larger
        share stop_after | epochs | epochs | smaller
        stop_after | tokens | steps | smaller
        stop_after | epochs | tokens | more ranks
        ema | steps | tokens | larger
        ema | steps | epochs | smaller
        budget | tokens | tokens | another run
        warmup | epochs | tokens | another run
        every | tokens | epochs | another run
        ema | steps | tokens | another run""".replace("        ", "").splitlines()
}


def amount(unit: str, steps: float) -> str:
    return f"{steps * UNITS[unit]:g} {unit}"


@cache
def plan_of(folder: Path, length: str, unit: str, budget: str, change: str) -> Plan:
    """The plan of a run that resumes a checkpoint of step 8 (of 4 rows a step), which lies in its directory or in that
    of another run."""
    rows, world = CHANGES[change]
    own = "r" if change != "another run" else f'new" }}\ncheckpoint {{ from = "{folder}/runs/tiny/r'
    said = {
        "budget": "",
        "warmup": f"scheduler cosine {{ warmup = {amount(unit, 10)} }}",
        "decay": f"scheduler wsd {{ decay = {amount(unit, 14)} }}",
        "late decay": f"scheduler wsd {{ decay = {amount(unit, 4)} }}",
        "phase": f"phase late {{ from = {amount(unit, 10)}, lr_scale = 0.5 }}",
        "stop_at": f"launch {{ stop_at = {amount(unit, 12)} }}",
        "every": f"every {amount(unit, 3)} eval a",
        "stop_after": f"launch {{ stop_after = {amount(unit, 3)} }}",
        "ema": "ema { every = 3 }",
        "share": "every 15% eval a",
        "share stop_at": "launch { stop_at = 60% }",
        "share stop_after": "launch { stop_after = 15% }",
    }[length]
    path = folder / "spec.xtrain"
    path.write_text(
        f"""experiment tiny {{ budget = {amount(budget, 20)} }}
        model llama {{ dim = 16, layers = 1, heads = 2 }}
        tokenizer bytes
        dataset a {{ source = text("*.txt"), holdout = 1% }}
        batch {{ sequence = 16, micro = {rows // world} }}
        optimizer adamw {{ lr = 1.0 }}
        {said}
        workspace {{ root = "{folder}/runs", run = "{own}" }}"""
    )
    spec = load_spec(path).require()
    found = compile_plan(spec, world=world, count=lambda plan: Counted(rows={"a": 40}, stores={}))
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


class Hand:
    """Amounts after a number of steps, whole or not, by hand. then: rows of a step after the resume."""

    def __init__(self, then: int) -> None:
        self.then = then

    def at(self, unit: str, steps: float) -> float:
        rows = 4 * min(steps, STOP) + self.then * max(0, steps - STOP)
        return {"steps": steps, "tokens": 16 * rows, "epochs": rows / 40}[unit]

    def position(self, unit: str, wanted: float) -> float:
        low, high = 0.0, 1000.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if self.at(unit, middle) >= wanted else (middle, high)
        return round(high, 9)

    def first(self, unit: str, wanted: float) -> int:
        return math.ceil(self.position(unit, wanted) - 1e-6)

    def begin_of_end(self, unit: str, length: float, budget: str) -> float:
        """Where so much is left with the batch of that moment."""
        for sizes, until in ((Hand(4), STOP), (self, math.inf)):
            end = sizes.position(budget, 20 * UNITS[budget])
            end = math.ceil(end - 1e-6) if unit == "steps" else end
            begin = sizes.position(unit, sizes.at(unit, end) - length)
            if begin < until:
                return begin if sizes is not self else max(begin, STOP)
        raise AssertionError


def rate_by_hand(hand: Hand, length: str, unit: str, budget: str, done: int) -> float:
    """The rate of the step that ends with `done` steps."""
    if length not in ("warmup", "decay", "late decay"):
        return 1.0
    steps = {"warmup": 10, "decay": 14, "late decay": 4}[length] * UNITS[unit]
    if length == "warmup":
        if (now := hand.at(unit, done)) < steps:
            return now / steps
        begin = hand.position(unit, steps)
    else:
        begin = hand.begin_of_end(unit, steps, budget)
    whole, before = 20 * UNITS[budget], hand.at(budget, begin)
    share = min(1.0, max(0.0, (hand.at(budget, done) - before) / (whole - before)))
    return (1 + math.cos(math.pi * share)) / 2 if length == "warmup" else 1 - share


def resumed(folder: Path, length: str, unit: str, budget: str, change: str) -> tuple[Plan, Arithmetic]:
    assert known_arithmetic(plan_of(folder, length, unit, budget, "same")).steps == 20
    begun = begins_at(folder / "runs/tiny/r")
    assert begun is not None and begun.past is not None and begun.step == STOP
    return resumed_plan(plan_of(folder, length, unit, budget, change), begun.past, STOP)


def check(folder: Path, length: str, unit: str, budget: str, change: str) -> None:
    plan, batch = resumed(folder, length, unit, budget, change)
    rows = CHANGES[change][0]
    hand, timeline = Hand(rows), plan.timeline
    end = hand.first(budget, 20 * UNITS[budget])
    assert timeline.steps == batch.steps == end
    assert [batch.sizes.before(step) for step in (0, 5, STOP, end)] == [
        hand.at("tokens", step) for step in (0, 5, STOP, end)
    ]
    if length == "phase":
        assert timeline.phases[1].first == hand.first(unit, 10 * UNITS[unit])
    if length in ("stop_at", "share stop_at"):
        assert timeline.stop_at == hand.first(unit, 12 * UNITS[unit])
    if length == "stop_after":
        assert timeline.stop_after == (3 if unit == "steps" else math.ceil(3 * 4 / rows))
        assert timeline.stop_after_tokens == (3 * 64 if unit == "tokens" else None)
    if length == "share stop_after":
        assert timeline.stop_after == (3 if unit == "steps" else math.ceil(3 * 4 / rows))
    if length == "ema":
        assert plan.node("setup.ema").args["every"] == 3
        (found,) = (each.evidence for each in plan.checks if each.id == "ema.every")
        assert found == f"the average has {end // 3} updates"
    if length in ("every", "share"):
        (tick,) = (tick for tick in timeline.ticks if tick.nodes == ("tick.eval.a",))
        period = 3 * UNITS[unit]
        due = [
            step for step in range(1, end + 1)
            if int(hand.at(unit, step) / period + 1e-9) > int(hand.at(unit, step - 1) / period + 1e-9)
        ]  # fmt: skip
        assert [step for step in range(1, end + 1) if is_due(tick, step, batch.sizes)] == due
        assert next_due(tick, STOP, batch.sizes) == next(step for step in due if step > STOP)
    rate = learning_rate(plan.node("setup.scheduler").args, batch)
    rates = [rate(index) for index in range(end)]
    assert rates == pytest.approx([rate_by_hand(hand, length, unit, budget, done + 1) for done in range(end)], abs=1e-9)
    # The steps that are done had these rates, and the last one ends the curve.
    old = plan_of(folder, length, unit, budget, "same")
    assert rates[:STOP] == pytest.approx(
        [learning_rate(old.node("setup.scheduler").args, known_arithmetic(old))(step) for step in range(STOP)], abs=1e-9
    )
    if length in ("warmup", "decay", "late decay"):
        assert rates[-1] == pytest.approx(0.0, abs=1e-9)


def table():
    for length, unit, budget, change in product((*LENGTHS, *SHARES), UNITS, UNITS, CHANGES):
        if (length in ("budget", *SHARES) and unit != budget) or (length == "ema" and unit != "steps"):
            continue
        marks = () if (length, unit, budget, change) in USUAL else pytest.mark.slow
        yield pytest.param(length, unit, budget, change, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lengths")
    checkpoint = made / f"runs/tiny/r/checkpoints/ckpt-s{STOP:012}"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    state = {"step": STOP, "tokens": 64 * STOP, "loader": {"capacity": 16, "rows_per_step": 4}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    return made


@pytest.mark.parametrize(("length", "unit", "budget", "change"), list(table()))
def test_a_resume_with_another_batch_keeps_every_length(folder, length, unit, budget, change):
    check(folder, length, unit, budget, change)


def test_a_second_resume_counts_from_all_batches_before_it(folder):
    plan = plan_of(folder, "budget", "tokens", "tokens", "much larger")
    once = resumed(folder, "budget", "tokens", "tokens", "larger")[1].row_sizes
    twice = sizes_of(once.described())
    assert twice == once
    batch = resumed_plan(plan, twice, 10)[1]
    assert [batch.sizes.before(step) for step in (8, 9, 10, 11)] == [512, 640, 768, 1088]
    assert batch.steps == 12 and [batch.sizes.steps_of(tokens) for tokens in (512, 513, 768, 769)] == [8, 9, 10, 11]
    assert batch.row_sizes.resumed(once, 10).described() == batch.row_sizes.described()
    assert known_timeline(plan).steps == 4  # from its start


def test_a_ramp_in_tokens_goes_on_where_its_tokens_are():
    """A ramp from 4 to 16 rows over 12 steps; in tokens it continues where as many rows are taken."""
    ramp = StepSizes(16, 4, 12)
    by_steps = ramp.resumed(StepSizes(8), 6)
    by_rows = ramp.resumed(StepSizes(8), 6, ramp.steps_of(48))
    assert [by_steps.at(step) for step in (5, 6, 7)] == [8, ramp.at(6), ramp.at(7)]
    assert ramp.steps_of(48) == 8 and [by_rows.at(step) for step in (5, 6, 7)] == [8, ramp.at(8), ramp.at(9)]
    for sizes in (by_steps, by_rows):
        taken = [sizes.before(step) for step in range(20)]
        assert [after - before for before, after in pairwise(taken)] == [sizes.at(step) for step in range(19)]
        assert [sizes.steps_of(rows) for rows in taken] == list(range(20))
        assert [sizes.position(sizes.amount_at(step / 4)) for step in range(70)] == [step / 4 for step in range(70)]


def test_a_checkpoint_without_the_sizes_of_its_steps_takes_them_to_be_alike():
    state = {"step": 10, "tokens": 768, "loader": {"capacity": 16, "rows_per_step": 8}}
    past = past_of(state)
    assert [past.before(step) for step in (0, 5, 10)] == [0, 24, 48] and past.steps_of(48) == 10
    assert past_of({**state, "tokens": 1280}) == StepSizes(8)
    after = StepSizes(5).resumed(past, 10)
    assert sizes_of(after.described()) == after and after.before(12) == 58 and after.steps_of(58) == 12
