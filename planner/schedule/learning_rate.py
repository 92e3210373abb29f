"""`scheduler` of a spec → arguments of the closed form of the learning rate, lengths in steps where they are known."""

from typing import Any

from attrs import evolve, fields_dict

from ...dsl.quantity import Quantity
from ...dsl.schema.training import Scheduler
from ...dsl.spec import Spec
from ..findings import Findings
from ..units import plural
from .arithmetic import Arithmetic, length_of


def idle_settings(scheduler: Scheduler) -> dict[str, str]:
    """The settings that change nothing beside the others, whatever the budget, and why."""
    flat = scheduler.floor.fraction >= 1
    if scheduler.kind == "wsd" and not scheduler.decay.value:
        return dict.fromkeys(("shape", "floor"), "the final fall has no length")
    if scheduler.kind == "wsd" and flat:
        return dict.fromkeys(("shape", "decay"), "the rate falls to 100% of the peak")
    if scheduler.kind in ("cosine", "linear") and scheduler.warmup == Quantity(100, "%"):
        return {"floor": "the warm-up takes the whole budget"}
    return {}


def in_effect(scheduler: Scheduler) -> Scheduler:
    """With the defaults in place of settings that change nothing."""
    defaults = {name: fields_dict(Scheduler)[name].default for name in idle_settings(scheduler)}
    return evolve(scheduler, **defaults)


def scheduler_args(spec: Spec, batch: Arithmetic) -> dict[str, Any]:
    """Only what the kind has: `warmup` for all, `floor` where the rate falls, `decay` and `shape` for wsd."""
    scheduler = in_effect(spec.scheduler)
    args: dict[str, Any] = {
        "kind": scheduler.kind,
        "lr": spec.optimizer.lr,
        "steps": batch.steps,
        "warmup": _length(scheduler.warmup, batch),
    }
    if scheduler.kind != "constant":
        args["floor"] = scheduler.floor.fraction
    if scheduler.kind == "wsd":
        args["decay"] = _length(scheduler.decay, batch)
        args["shape"] = scheduler.shape
    return args


def _length(quantity: Quantity, batch: Arithmetic) -> dict[str, Any]:
    length = length_of(quantity, batch)
    if length is not None:
        return {"steps": length}
    return {"fraction": quantity.fraction} if quantity.unit == "%" else {"epochs": float(quantity.value)}


def check_schedule(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Warm-up, and the final fall of wsd, must fit into the budget."""
    scheduler, steps = spec.scheduler, batch.steps
    parts = {"warmup": scheduler.warmup}
    if scheduler.kind == "wsd":
        parts["decay"] = scheduler.decay
    rule = "schedule.warmup"
    shown = " + ".join(f"{name} {quantity}" for name, quantity in parts.items())
    lengths = [length_of(quantity, batch) for quantity in parts.values()]
    if steps is None or None in lengths:
        shares = [_share(quantity, batch) for quantity in parts.values()]
        if None in shares:
            found.unknown(rule, f"{shown}: the number of steps is known only when the data has been counted")
            return
        fraction = sum(share for share in shares if share is not None)
        used, total = f"{fraction:.0%}", "the budget"
        fits = fraction <= 1
    else:
        length = sum(length or 0 for length in lengths)
        used, total = f"{length:,} steps", f"the {steps:,} steps of the budget"
        fits = length <= steps
    if fits:
        found.passed(rule, f"{shown} = {used} of {total}")
        return
    hint = "use `warmup = 2%`"
    if steps is not None and steps > 1 and None not in lengths:
        hint = f"use `warmup = 2%`, or {plural(steps // 2, 'step')} or fewer"
    length = shown if shown.endswith(used) else f"{shown} = {used}"
    found.fail(rule, "X602", "scheduler.warmup", f"{length}, longer than {total}", hint)


def _share(quantity: Quantity, batch: Arithmetic) -> float | None:
    """A length as a share of the budget, where that is known without counting the data."""
    if quantity.unit == "%":
        return quantity.fraction
    if quantity.unit == "epochs" and batch.epochs is not None:
        return quantity.value / batch.epochs
    return None if quantity.value else 0.0
