"""Changes of the learning rate, and of the end of the run, when a run is resumed under another plan."""

import math
from collections.abc import Iterator
from typing import Any, Final

from attrs import frozen

from xtrain.dsl.schema.schedules import Rate
from xtrain.planner.compare.resumable_rules import Reason
from xtrain.planner.data.chain import call_text
from xtrain.planner.plan import Plan
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.learning_curve import computed, learning_rate
from xtrain.planner.units import amount_in_epochs, plural

BUDGET: Final = "experiment.budget"
SAMPLES: Final = 1_000  # steps at which two curves are compared
SAME: Final = 1e-12  # rates of functions of tokens round otherwise with another batch


@frozen
class ResumedPlan:
    """A plan with all that is known of it at the checkpoint, and the arithmetic of its steps there."""

    plan: Plan
    batch: Arithmetic

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the schedule."""
        return self.plan.node("setup.scheduler").args

    @property
    def steps(self) -> int | None:
        """The steps of the whole run."""
        return self.plan.timeline.steps

    def rate(self, *, peak: float | None = None) -> Rate:
        """Return the learning rate of every step; of `peak`, without the factors of phases, where that is given."""
        if peak is None:
            return learning_rate(self.args, self.batch, self.plan.timeline.phases)
        return learning_rate({**self.args, "lr": peak}, self.batch)


def curve_reasons(one: ResumedPlan, other: ResumedPlan, step: int | None) -> Iterator[Reason]:
    """step: that of the checkpoint; None: not known, so that words speak of a likely one."""
    a, b, before, after = one.plan, other.plan, one.args, other.args
    total_a, total_b = one.steps, other.steps
    at = _at(one, other, step)
    own = [name for name in {**before, **after} if name not in ("lr", "kind", "steps", "warmup")]
    for name in ("lr", "kind", *own, "warmup"):
        path = "optimizer.lr" if name == "lr" else f"scheduler.{name}"
        if _length(before.get(name), total_a) == _length(after.get(name), total_b):
            continue
        # A warm-up of so many per cent follows the budget, of which there is more to say below.
        if _share(a, path) and _share(a, path) == _share(b, path):
            continue
        if before["kind"] != after["kind"] and not (name in before and name in after):
            continue  # what one of the schedules does not have goes with its name
        text = f"{_spell(before.get(name))} → {_spell(after.get(name))}: {at}"
        yield Reason(kind="safe", path=path, text=text, effect="learning")
    yield from _budget(one, other, step, at)


def _share(plan: Plan, path: str) -> str:
    """A length as the spec has it, if it is a share of the budget."""
    value = next((entry.value for entry in plan.provenance if entry.path == path), "")
    return value if value.endswith("%") else ""


def _length(value: Any, total: int | None) -> Any:
    """Lengths in steps where they are known, so that `10%` and `30 steps` can be the same; in tokens or epochs where
    they were declared so, since the batch decides how many steps these are."""
    declared = [name for name in ("tokens", "epochs") if isinstance(value, dict) and name in value]
    if declared:
        return {declared[0]: value[declared[0]]}
    if isinstance(value, dict) and "fraction" in value and total is not None:
        return {"steps": round(value["fraction"] * total)}
    return value


def _spell(value: Any) -> str:
    if isinstance(value, dict) and "function" in value:
        return call_text(value)
    if isinstance(value, dict) and "epochs" in value and "steps" not in value:
        return amount_in_epochs(value["epochs"])
    if isinstance(value, dict) and "steps" not in value and "tokens" in value:
        return plural(value["tokens"], "token")
    if isinstance(value, dict):
        return plural(value["steps"], "step") if "steps" in value else f"{value['fraction']:.4g} of the budget"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _at(a: ResumedPlan, b: ResumedPlan, step: int | None) -> str:
    """The rate with which a checkpoint goes on, and the one it would have gone on with."""
    total_a, total_b = a.steps, b.steps
    if total_a is None or total_b is None or not _counted(a, b) or not (computed(a.args) and computed(b.args)):
        return "the learning rate uses it from here on"
    done = step if step is not None else total_a if total_b > total_a else total_a // 2
    done = min(done, max(total_b - 1, 0))
    now, old = b.rate()(done), a.rate()
    then = f"instead of {old(done):.3g}" if done < total_a else f"after {old(total_a - 1):.3g} in step {total_a:,}"
    if done < total_a and math.isclose(old(done), now, rel_tol=SAME):
        then = "as before"
    return f"{'' if step is not None else 'for example '}step {done + 1:,} takes the rate {now:.3g} {then}"


def _budget(one: ResumedPlan, other: ResumedPlan, step: int | None, at: str) -> Iterator[Reason]:
    a, b, total_a, total_b = one.plan, other.plan, one.steps, other.steps
    before, after = a.timeline, b.timeline
    begins_there = b.node("setup.resume").args["origin"] is not None  # and does not go on behind its own end
    if step is not None and total_b is not None and (step > total_b or (step == total_b and begins_there)):
        text = f"{_amount(b)}, and the checkpoint is of step {step:,}: nothing is left to train (X722)"
        yield Reason(kind="incompatible", path=BUDGET, text=text)
        return
    if (total_a, before.epochs) == (total_b, after.epochs):
        return
    path = BUDGET
    if total_a is None or total_b is None or not _counted(one, other):
        text = f"{_amount(a)} → {_amount(b)}: the schedule spans the number of steps that the data gives"
        yield Reason(kind="safe", path=path, text=text, effect="learning")
        return
    text = f"{total_a:,} → {plural(total_b, 'step')}: "
    if total_a != total_b and (left := _left(one, other, step)):
        yield Reason(kind="safe", path=path, text=f"{text}{left}")
        return
    done = step if step is not None else min(total_a, total_b)
    alike = _alike(one, other, done)
    if step == total_b:
        text += "the checkpoint is of the last step: only the end of the run is left"
        yield Reason(kind="safe", path=path, text=text, effect="none" if alike else "learning")
        return
    if alike:
        text += f"the learning rate up to step {done:,} is that of a run of {plural(total_b, 'step')} from its start"
        yield Reason(kind="safe", path=path, text=text)
        return
    kind = other.args["kind"]
    text += f"the curve ({kind}) now spans {plural(total_b, 'step')}; {at}"
    if step is None and total_b < total_a:
        text += f"; a checkpoint of step {total_b:,} or later has nothing left to train"
    yield Reason(kind="safe", path=path, text=text, effect="learning")


def _amount(plan: Plan) -> str:
    steps, epochs = plan.timeline.steps, plan.timeline.epochs
    return plural(steps, "step") if steps is not None else amount_in_epochs(epochs or 0.0)


def _left(one: ResumedPlan, other: ResumedPlan, step: int | None) -> str:
    """Say what is left of a budget in tokens or epochs that is the same, where the batch alone differs; else empty."""
    before, after = one.plan.timeline, other.plan.timeline
    amounts = (before.budget_tokens, before.epochs)
    if amounts != (after.budget_tokens, after.epochs) or amounts == (None, None):
        return ""
    batch, a_step = other.batch, f"{other.batch.tokens_per_step:,} tokens a step"
    if step is None:
        return f"the same budget at {a_step}; a resume counts what the checkpoint was trained on"
    if after.budget_tokens is not None:
        left, whole = max(0, after.budget_tokens - batch.sizes.before(step)), f"{after.budget_tokens:,} tokens"
        return f"{left:,} of {whole} are left after step {step:,}, at {a_step}"
    assert after.epochs is not None
    left = max(0.0, after.epochs - (batch.epochs_before(step) or 0.0))
    return f"{left:.4g} of {amount_in_epochs(after.epochs)} are left after step {step:,}, at {a_step}"


def _counted(a: ResumedPlan, b: ResumedPlan) -> bool:
    """Whether all that the learning rates of two plans hang on is known in steps."""
    values = [value for side in (a, b) for value in side.args.values()]
    phases = (*a.plan.timeline.phases, *b.plan.timeline.phases)
    lengths = [value for value in values if isinstance(value, dict)]
    waits = any(("epochs" in each or "tokens" in each) and "steps" not in each for each in lengths)
    return not waits and not any(p.first is None and p.epochs for p in phases)


def _alike(a: ResumedPlan, b: ResumedPlan, done: int) -> bool:
    """Whether both curves have the same rates in the first `done` steps, but for a peak that has changed."""
    if not (computed(a.args) and computed(b.args)):
        return False
    one, other, stride = a.rate(peak=1.0), b.rate(peak=1.0), max(1, done // SAMPLES)
    steps = (*range(0, done, stride), max(done - 1, 0))
    return all(math.isclose(one(index), other(index), rel_tol=SAME) for index in steps)
