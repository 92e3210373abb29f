"""What other shares and phases mean for a run that goes on: from which step on it reads, or learns, otherwise."""

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from xtrain.planner.compare.resumable_data import renamed
from xtrain.planner.compare.resumable_rules import Effect, Reason
from xtrain.planner.plan import Plan, PlanPhase
from xtrain.planner.schedule.phases import first_step, in_order
from xtrain.planner.units import amount_in_epochs


def phase_reasons(a: Plan, b: Plan, step: int | None) -> Iterator[Reason]:
    """A reason for every phase that is not in both plans alike. step: that of the checkpoint, None if not known."""
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
            yield Reason(kind="safe", path=_path(phase, b), text=text.removesuffix("; "), effect=effect)
        elif old != phase and (changes := _changes(old, phase, a, b)):
            text = f"{', '.join(changes)}; {then}"
            yield Reason(kind="safe", path=_path(phase, b), text=text.removesuffix("; "), effect=effect)
    for phase in named.values():
        text = f"is gone: {phase_text(phase, a)}; {then}"
        yield Reason(kind="safe", path=_path(phase, a), text=text.removesuffix("; "), effect=effect)


def _under_new_names(a: Plan, b: Plan) -> Plan:
    """`a` with its datasets called as in `b`; where each trains on one dataset alone, with that of `b`.

    Which one that is, is spoken of where datasets are.
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
    """The index of the first step in which the mixture or the factor of the learning rate differs.

    None where none does, and where one of the runs has steps that are not counted yet.
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
    """Whether it is known with which step every phase begins."""
    timeline = plan.timeline
    return timeline.steps is not None and not any(phase.first is None and phase.epochs for phase in timeline.phases)


def _holds(phases: list[tuple[int, PlanPhase]], step: int) -> tuple[Any, ...]:
    """What decides about a step: its datasets, the factor, and where there are several, how much of each and since
    when; shares are drawn by the name of the phase too."""
    *before, (first, phase) = [pair for pair in phases if pair[0] <= step]
    mixed = _mixed(phase)
    if len(mixed) == 1:
        return [*mixed], phase.lr_scale, phase.mtp_weight
    if phase.passes is None:
        return list(mixed.items()), phase.lr_scale, phase.mtp_weight, first, phase.exact_rows or phase.name
    for earlier, each in reversed(before):
        if each.passes is None or list(_mixed(each).items()) != list(mixed.items()):
            break
        first = earlier
    return list(mixed.items()), phase.lr_scale, phase.mtp_weight, first, "epochs"


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
    """The block that says so: the first phase is nobody's unless it was declared."""
    declared = any(entry.path.startswith(f"phase.{phase.name}.") for entry in plan.provenance)
    return f"phase.{phase.name}" if declared else "mixture"


def phase_text(phase: PlanPhase, plan: Plan) -> str:
    """`web 80%, code 20%, learning rate × 0.5 from step 181`."""
    scale = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
    scale += f", further tokens × {phase.mtp_weight:g}" if phase.mtp_weight is not None else ""
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
    return changes


def _start(phase: PlanPhase, plan: Plan) -> str:
    total = plan.timeline.steps
    if phase.first is None and (total is None or phase.epochs is not None):
        return f"from {start_text(phase)}"
    return f"from step {first_step(phase, total or 0) + 1:,}"


def start_text(phase: PlanPhase) -> str:
    """Where a phase begins that waits for its data to be counted: `0.9 of the budget`, `2 epochs`."""
    return amount_in_epochs(phase.epochs) if phase.epochs is not None else f"{phase.fraction or 0:.4g} of the budget"


def mix_text(phase: PlanPhase) -> str:
    """`web 80%, code 20%` or `web 1 epoch, code 3 epochs`; datasets that it does not take are left out."""
    if phase.passes is not None:
        return ", ".join(f"{name} {amount_in_epochs(epochs)}" for name, epochs in _mixed(phase).items())
    shares = ", ".join(f"{name} {100 * share:.3g}%" for name, share in _mixed(phase).items())
    return f"{shares} of every step" if phase.exact_rows else shares
