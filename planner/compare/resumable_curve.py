"""What becomes of the learning rate, and of the end of the run, when a run goes on under another plan."""

from collections.abc import Iterator
from typing import Any, Final

from ..data.chain import call_text
from ..plan import Plan
from ..schedule.learning_curve import computed, learning_rate
from ..units import amount_in_epochs, plural
from .resumable_rules import Reason

BUDGET: Final = "experiment.budget"
SAMPLES: Final = 1_000  # steps at which two curves are compared


def curve_reasons(a: Plan, b: Plan, step: int | None) -> Iterator[Reason]:
    """step: that of the checkpoint; None: not known, so that words speak of a likely one."""
    before, after = a.node("setup.scheduler").args, b.node("setup.scheduler").args
    total_a, total_b = a.timeline.steps, b.timeline.steps
    at = _at(a, b, step)
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
    yield from _budget(a, b, step, at)


def _share(plan: Plan, path: str) -> str:
    """A length as the spec has it, if it is a share of the budget."""
    value = next((entry.value for entry in plan.provenance if entry.path == path), "")
    return value if value.endswith("%") else ""


def _length(value: Any, total: int | None) -> Any:
    """Lengths in steps where they are known, so that `10%` and `30 steps` can be the same."""
    if isinstance(value, dict) and "fraction" in value and total is not None:
        return {"steps": round(value["fraction"] * total)}
    return value


def _spell(value: Any) -> str:
    if isinstance(value, dict) and "function" in value:
        return call_text(value)
    if isinstance(value, dict) and "epochs" in value:
        return amount_in_epochs(value["epochs"])
    if isinstance(value, dict):
        return plural(value["steps"], "step") if "steps" in value else f"{value['fraction']:.4g} of the budget"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _at(a: Plan, b: Plan, step: int | None) -> str:
    """The rate with which a checkpoint goes on, and the one it would have gone on with."""
    before, after = a.node("setup.scheduler").args, b.node("setup.scheduler").args
    total_a, total_b = a.timeline.steps, b.timeline.steps
    if total_a is None or total_b is None or not _counted(a, b) or not (computed(before) and computed(after)):
        return "the learning rate uses it from here on"
    done = step if step is not None else total_a if total_b > total_a else total_a // 2
    done = min(done, max(total_b - 1, 0))
    now = learning_rate(after, total_b, b.timeline.phases)(done)
    old = learning_rate(before, total_a, a.timeline.phases)
    then = f"instead of {old(done):.3g}" if done < total_a else f"after {old(total_a - 1):.3g} in step {total_a:,}"
    if done < total_a and old(done) == now:
        then = "as before"
    return f"{'' if step is not None else 'for example '}step {done + 1:,} takes the rate {now:.3g} {then}"


def _budget(a: Plan, b: Plan, step: int | None, at: str) -> Iterator[Reason]:
    total_a, total_b = a.timeline.steps, b.timeline.steps
    before, after = a.timeline, b.timeline
    begins_there = b.node("setup.resume").args["origin"] is not None  # and does not go on behind its own end
    if step is not None and total_b is not None and (step > total_b or (step == total_b and begins_there)):
        text = f"{_amount(b)}, and the checkpoint is of step {step:,}: nothing is left to train (X722)"
        yield Reason(kind="incompatible", path=BUDGET, text=text)
        return
    if (total_a, before.epochs) == (total_b, after.epochs):
        return
    path = BUDGET
    if total_a is None or total_b is None or not _counted(a, b):
        text = f"{_amount(a)} → {_amount(b)}: the schedule spans the number of steps that the data gives"
        yield Reason(kind="safe", path=path, text=text, effect="learning")
        return
    text = f"{total_a:,} → {plural(total_b, 'step')}: "
    args_a, args_b = a.node("setup.scheduler").args, b.node("setup.scheduler").args
    done = step if step is not None else min(total_a, total_b)
    alike = _alike(args_a, args_b, total_a, total_b, done)
    if step == total_b:
        text += "the checkpoint is of the last step: only the end of the run is left"
        yield Reason(kind="safe", path=path, text=text, effect="none" if alike else "learning")
        return
    if alike:
        text += f"the learning rate up to step {done:,} is that of a run of {plural(total_b, 'step')} from its start"
        yield Reason(kind="safe", path=path, text=text)
        return
    kind = args_b["kind"]
    text += f"the curve ({kind}) now spans {plural(total_b, 'step')}; {at}"
    if step is None and total_b < total_a:
        text += f"; a checkpoint of step {total_b:,} or later has nothing left to train"
    yield Reason(kind="safe", path=path, text=text, effect="learning")


def _amount(plan: Plan) -> str:
    steps, epochs = plan.timeline.steps, plan.timeline.epochs
    return plural(steps, "step") if steps is not None else amount_in_epochs(epochs or 0.0)


def _counted(a: Plan, b: Plan) -> bool:
    """Whether all that the learning rates of two plans hang on is known in steps."""
    values = [value for plan in (a, b) for value in plan.node("setup.scheduler").args.values()]
    phases = (*a.timeline.phases, *b.timeline.phases)
    lengths = [value for value in values if isinstance(value, dict)]
    return not any("epochs" in each for each in lengths) and not any(p.first is None and p.epochs for p in phases)


def _alike(before: dict[str, Any], after: dict[str, Any], total_a: int, total_b: int, done: int) -> bool:
    """Whether both curves have the same rates in the first `done` steps, but for a peak that has changed."""
    if not (computed(before) and computed(after)):
        return False
    one, other = learning_rate({**before, "lr": 1.0}, total_a), learning_rate({**after, "lr": 1.0}, total_b)
    stride = max(1, done // SAMPLES)
    return all(one(index) == other(index) for index in (*range(0, done, stride), max(done - 1, 0)))
