"""Effects of a changed learning rate, end, mixture or phases on a resumed run, and the first step that differs."""

import math
from collections.abc import Iterator
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.schema.optimizers import Rate
from xtrain.lazy_attrs import frozen
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.data import call_text
from xtrain.plan.graph import Effect
from xtrain.plan.learning_rate import computed, first_step, in_order, learning_rate
from xtrain.plan.plan import Plan, PlanPhase
from xtrain.planner.review.resuming_data import Reason, refused, renamed, safe
from xtrain.text.units import amount_in_epochs, plural

BUDGET: Final = "experiment.budget"
SAMPLES: Final = 1_000  # steps at which two curves are compared
SAME: Final = 1e-12  # rates that are functions of tokens round differently with another batch


@frozen
class ResumedPlan:
    """Plan with everything known at the checkpoint, and the arithmetic of its steps there."""

    plan: Plan
    batch: Arithmetic

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of the learning-rate schedule."""
        return self.plan.node("setup.scheduler").args

    @property
    def steps(self) -> int | None:
        """Steps of the whole run."""
        return self.plan.timeline.steps

    def rate(self, *, peak: float | None = None) -> Rate:
        """Return the learning rate of every step; with `peak`, the rate for that peak without the factors of phases."""
        if peak is None:
            return learning_rate(self.args, self.batch, self.plan.timeline.phases)
        return learning_rate({**self.args, "lr": peak}, self.batch)


def curve_reasons(one: ResumedPlan, other: ResumedPlan, step: int | None) -> Iterator[Reason]:
    """Yield a reason for every difference of the learning-rate curves. step: of the checkpoint; None: unknown, and the
    texts assume a likely one."""
    a, b, before, after = one.plan, other.plan, one.args, other.args
    total_a, total_b = one.steps, other.steps
    at = _at(one, other, step)
    own = [name for name in {**before, **after} if name not in ("lr", "kind", "steps", "warmup")]
    for name in ("lr", "kind", *own, "warmup"):
        path = "optimizer.lr" if name == "lr" else f"scheduler.{name}"
        if _length(before.get(name), total_a) == _length(after.get(name), total_b):
            continue
        # A warm-up in percent follows the budget, which is reported below.
        if _share(a, path) and _share(a, path) == _share(b, path):
            continue
        if before["kind"] != after["kind"] and not (name in before and name in after):
            continue  # an argument that only one schedule has is covered by the schedule's name
        yield safe(path, f"{_spell(before.get(name))} → {_spell(after.get(name))}: {at}", "learning")
    yield from _budget(one, other, step, at)


def _share(plan: Plan, path: str) -> str:
    """Return a length as the spec gives it if it is a share of the budget; otherwise empty."""
    value = plan.value(path) or ""
    return value if value.endswith("%") else ""


def _length(value: Any, total: int | None) -> Any:
    """Return a length in comparable form: in steps where they are known, so that `10%` and `30 steps` can be equal; in
    tokens or epochs if declared so, because the batch decides how many steps these are."""
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
    """Return text that compares the learning rate after the checkpoint with the rate of the first plan."""
    total_a, total_b = a.steps, b.steps
    if total_a is None or total_b is None or not _counted_length(a, b) or not (computed(a.args) and computed(b.args)):
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
    begins_there = b.node("setup.resume").args["origin"] is not None  # a run does not continue past its own end
    if step is not None and total_b is not None and (step > total_b or (step == total_b and begins_there)):
        yield refused(BUDGET, f"{_amount(b)}, and the checkpoint is of step {step:,}: nothing is left to train (X722)")
        return
    if (total_a, before.epochs) == (total_b, after.epochs):
        return
    path = BUDGET
    if total_a is None or total_b is None or not _counted_length(one, other):
        text = f"{_amount(a)} → {_amount(b)}: the schedule spans the number of steps that the data gives"
        yield safe(path, text, "learning")
        return
    text = f"{total_a:,} → {plural(total_b, 'step')}: "
    if total_a != total_b and (left := _left(one, other, step)):
        yield safe(path, f"{text}{left}")
        return
    done = step if step is not None else min(total_a, total_b)
    alike = _alike(one, other, done)
    if step == total_b:
        text += "the checkpoint is of the last step: only the end of the run is left"
        yield safe(path, text, "none" if alike else "learning")
        return
    if alike:
        text += f"the learning rate up to step {done:,} is the same as in a run of {plural(total_b, 'step')}"
        yield safe(path, text)
        return
    kind = other.args["kind"]
    text += f"the curve ({kind}) now spans {plural(total_b, 'step')}; {at}"
    if step is None and total_b < total_a:
        text += f"; a checkpoint of step {total_b:,} or later has nothing left to train"
    yield safe(path, text, "learning")


def _amount(plan: Plan) -> str:
    steps, epochs = plan.timeline.steps, plan.timeline.epochs
    return plural(steps, "step") if steps is not None else amount_in_epochs(epochs or 0.0)


def _left(one: ResumedPlan, other: ResumedPlan, step: int | None) -> str:
    """Return text on the rest of an unchanged budget in tokens or epochs if only the batch differs; otherwise empty."""
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


def _counted_length(a: ResumedPlan, b: ResumedPlan) -> bool:
    """Return True if everything that the learning rates of both plans depend on is known in steps."""
    values = [value for side in (a, b) for value in side.args.values()]
    phases = (*a.plan.timeline.phases, *b.plan.timeline.phases)
    lengths = [value for value in values if isinstance(value, dict)]
    waits = any(("epochs" in each or "tokens" in each) and "steps" not in each for each in lengths)
    return not waits and not any(p.first is None and p.epochs for p in phases)


def _alike(a: ResumedPlan, b: ResumedPlan, done: int) -> bool:
    """Return True if both curves have equal rates in the first `done` steps, apart from a changed peak."""
    if not (computed(a.args) and computed(b.args)):
        return False
    one, other, stride = a.rate(peak=1.0), b.rate(peak=1.0), max(1, done // SAMPLES)
    steps = (*range(0, done, stride), max(done - 1, 0))
    return all(math.isclose(one(index), other(index), rel_tol=SAME) for index in steps)


def phase_reasons(a: Plan, b: Plan, step: int | None) -> Iterator[Reason]:
    """Yield a reason for every phase that differs between the plans. step: of the checkpoint, None if unknown."""
    a = _under_new_names(a, b)
    before, after = a.timeline.phases, b.timeline.phases
    counted = _counted(a) and _counted(b)
    parts = first_difference(a, b)
    alike = counted and (parts is None or (step is not None and parts >= step))
    effect: Effect = "none" if alike else "learning"
    then = _from_there(parts, step) if counted else ""
    named = {phase.name: phase for phase in before}
    for phase in after:
        old = named.pop(phase.name, None)
        if old is None:
            text = f"is new: {phase_text(phase, b)}; {then}"
            yield safe(_path(phase, b), text.removesuffix("; "), effect)
        elif old != phase and (changes := _changes(old, phase, a, b)):
            text = f"{', '.join(changes)}; {then}"
            yield safe(_path(phase, b), text.removesuffix("; "), effect)
    for phase in named.values():
        text = f"is gone: {phase_text(phase, a)}; {then}"
        yield safe(_path(phase, a), text.removesuffix("; "), effect)


def _under_new_names(a: Plan, b: Plan) -> Plan:
    """Return `a` with the dataset names of `b`; if each plan trains on a single dataset, with the name in `b`.

    A change of that dataset is reported with the datasets.
    """
    names = renamed(a, b)
    (one, *more), (other, *others) = (plan.node("setup.loader").args["datasets"] for plan in (a, b))
    if not more and not others:
        names = {one: other}
    phases = tuple(
        evolve(phase, shares=_renamed(phase.shares, names), passes=phase.passes and _renamed(phase.passes, names))
        for phase in a.timeline.phases
    )
    return evolve(a, timeline=evolve(a.timeline, phases=phases))


def _renamed(found: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    return {names.get(name, name): each for name, each in found.items()}


def first_difference(a: Plan, b: Plan) -> int | None:
    """Return the index of the first step whose mixture or learning-rate factor differs.

    None if no step differs, or if one of the runs has steps that are not counted yet.
    """
    totals = a.timeline.steps, b.timeline.steps
    if totals[0] is None or totals[1] is None or not (_counted(a) and _counted(b)):
        return None
    one, other = in_order(a.timeline.phases, totals[0]), in_order(b.timeline.phases, totals[1])
    for step in sorted({first for first, _ in (*one, *other)}):
        if _holds(one, step) != _holds(other, step):
            return step
    return None


def _counted(plan: Plan) -> bool:
    """Return True if the first step of every phase is known."""
    timeline = plan.timeline
    return timeline.steps is not None and not any(phase.first is None and phase.epochs for phase in timeline.phases)


def _holds(phases: list[tuple[int, PlanPhase]], step: int) -> tuple[Any, ...]:
    """Return everything that decides about a step: its datasets, the factor and, with several datasets, the share of
    each and since when. Shares are also drawn by the name of the phase."""
    *before, (first, phase) = [pair for pair in phases if pair[0] <= step]
    mixed = _mixed(phase)
    if len(mixed) == 1:
        return [*mixed], phase.learned
    if phase.passes is None:
        return list(mixed.items()), phase.learned, first, phase.exact_rows or phase.name
    for earlier, each in reversed(before):
        if each.passes is None or list(_mixed(each).items()) != list(mixed.items()):
            break
        first = earlier
    return list(mixed.items()), phase.learned, first, "epochs"


def _mixed(phase: PlanPhase) -> dict[str, float]:
    return {name: amount for name, amount in phase.amounts.items() if amount > 0}


def _from_there(parts: int | None, step: int | None) -> str:
    if parts is None:
        return "every step is trained as before"
    if step is None:
        return (
            f"a checkpoint of step {parts:,} or before continues as if nothing had changed, "
            "a later one learns differently"
        )
    if parts >= step:
        return f"the run reaches this phase at step {parts + 1:,}, as it would have from the start"
    return "each dataset continues at its own position, with the new shares"


def _path(phase: PlanPhase, plan: Plan) -> str:
    """Return the path of the block that sets a phase; `mixture` for a first phase that was not declared."""
    declared = any(entry.path.startswith(f"phase.{phase.name}.") for entry in plan.provenance)
    return f"phase.{phase.name}" if declared else "mixture"


def phase_text(phase: PlanPhase, plan: Plan) -> str:
    """Return a phase as text: `web 80%, code 20%, learning rate × 0.5 from step 181`."""
    scale = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
    scale += f", further tokens × {phase.mtp_weight:g}" if phase.mtp_weight is not None else ""
    scale += "".join(f", {name} {value:g}" for name, value in phase.router.items())
    return f"{mix_text(phase)}{scale} {_start(phase, plan)}"


def _changes(old: PlanPhase, new: PlanPhase, a: Plan, b: Plan) -> list[str]:
    changes = []
    if _start(old, a) != _start(new, b):
        changes.append(f"{_start(old, a)} → {_start(new, b)}")
    if mix_text(old) != mix_text(new) or _mixed(old) != _mixed(new):
        changes.append(f"{mix_text(old)} → {mix_text(new)}")
    if old.lr_scale != new.lr_scale:
        changes.append(f"learning rate × {old.lr_scale:g} → × {new.lr_scale:g}")
    if old.mtp_weight != new.mtp_weight:
        weights = ["as in the model" if one is None else f"× {one:g}" for one in (old.mtp_weight, new.mtp_weight)]
        changes.append(f"further tokens {weights[0]} → {weights[1]}")
    for name in sorted({**old.router, **new.router}):
        one, other = (f"{each.router[name]:g}" if name in each.router else "as in the model" for each in (old, new))
        if one != other:
            changes.append(f"{name} {one} → {other}")
    return changes


def _start(phase: PlanPhase, plan: Plan) -> str:
    total = plan.timeline.steps
    if phase.first is None and (total is None or phase.epochs is not None):
        return f"from {start_text(phase)}"
    return f"from step {first_step(phase, total or 0) + 1:,}"


def start_text(phase: PlanPhase) -> str:
    """Return the start of a phase that waits for its data to be counted: `0.9 of the budget`, `2 epochs`."""
    return amount_in_epochs(phase.epochs) if phase.epochs is not None else f"{phase.fraction or 0:.4g} of the budget"


def mix_text(phase: PlanPhase) -> str:
    """Return a mixture as text, without unused datasets: `web 80%, code 20%` or `web 1 epoch, code 3 epochs`."""
    if phase.passes is not None:
        return ", ".join(f"{name} {amount_in_epochs(epochs)}" for name, epochs in _mixed(phase).items())
    shares = ", ".join(f"{name} {100 * share:.3g}%" for name, share in _mixed(phase).items())
    return f"{shares} of every step" if phase.exact_rows else shares
