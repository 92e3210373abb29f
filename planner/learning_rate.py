"""`scheduler` of a spec → arguments of the closed form of the learning rate, lengths in steps where they are known."""

from typing import Any

from ..dsl.quantity import Quantity
from ..dsl.spec import Spec
from .arithmetic import steps_of
from .rules.findings import Findings
from .units import plural


def scheduler_args(spec: Spec, steps: int | None) -> dict[str, Any]:
    """Only what the kind has: `warmup` for all, `floor` where the rate falls, `decay` and `shape` for wsd."""
    scheduler = spec.scheduler
    args: dict[str, Any] = {
        "kind": scheduler.kind,
        "lr": spec.optimizer.lr,
        "steps": steps,
        "warmup": _length(scheduler.warmup, steps),
    }
    if scheduler.kind != "constant":
        args["floor"] = scheduler.floor.fraction
    if scheduler.kind == "wsd":
        args["decay"] = _length(scheduler.decay, steps)
        args["shape"] = scheduler.shape
    return args


def _length(quantity: Quantity, steps: int | None) -> dict[str, Any]:
    length = steps_of(quantity, steps)
    return {"fraction": quantity.fraction} if length is None else {"steps": length}


def check_schedule(spec: Spec, steps: int | None, found: Findings) -> None:
    """Warm-up, and the final fall of wsd, must fit into the budget."""
    scheduler = spec.scheduler
    parts = {"warmup": scheduler.warmup}
    if scheduler.kind == "wsd":
        parts["decay"] = scheduler.decay
    rule = "schedule.warmup"
    shown = " + ".join(f"{name} {quantity}" for name, quantity in parts.items())
    if steps is None:
        if any(quantity.unit == "steps" and quantity.value for quantity in parts.values()):
            found.unknown(rule, f"{shown}: the number of steps is known once the data is counted")
            return
        fraction = sum(quantity.fraction for quantity in parts.values() if quantity.unit == "%")
        used, total = f"{fraction:.0%}", "the budget"
        fits = fraction <= 1
    else:
        lengths = [steps_of(quantity, steps) or 0 for quantity in parts.values()]
        used, total = f"{sum(lengths):,} steps", f"the {steps:,} steps of the budget"
        fits = sum(lengths) <= steps
    if fits:
        found.passed(rule, f"{shown} = {used} of {total}")
        return
    hint = "use `warmup = 2%`"
    if steps is not None and steps > 1:
        hint = f"use `warmup = 2%`, or {plural(steps // 2, 'step')} or fewer"
    length = shown if shown.endswith(used) else f"{shown} = {used}"
    found.fail(rule, "X602", "scheduler.warmup", f"{length}, longer than {total}", hint)
