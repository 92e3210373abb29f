"""`scheduler` of a spec → arguments of the closed form of the learning rate, lengths in steps where they are known."""

from typing import Any

from attrs import evolve, fields_dict

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.schedules import Scheduler
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.schedule.arithmetic import Arithmetic, length_of
from xtrain.planner.units import plural


def in_effect(scheduler: Scheduler) -> Scheduler:
    """With the defaults in place of settings that change nothing."""
    defaults = {name: fields_dict(type(scheduler))[name].default for name in scheduler.idle()}
    return evolve(scheduler, **defaults)


def scheduler_args(spec: Spec, batch: Arithmetic) -> dict[str, Any]:
    """The arguments of `setup.scheduler`: only what the kind has."""
    scheduler = in_effect(spec.scheduler)
    lengths = {name: _length(scheduler, name, batch) for name in scheduler.lengths()}
    own = {**lengths, **scheduler.args()}
    found = {"kind": scheduler.kind, "lr": spec.optimizer.lr, "steps": batch.steps}
    return found | {name: own.pop(name) for name in settings_of(type(scheduler)) if name in own} | own


def _length(scheduler: Scheduler, name: str, batch: Arithmetic) -> dict[str, Any]:
    quantity, length = scheduler.lengths()[name], _in_steps(scheduler, name, batch)
    tokens = batch.in_tokens(quantity)
    declared = {} if tokens is None else {"tokens": tokens}
    if length is not None or declared:
        return declared if length is None else {"steps": length, **declared}
    return {"fraction": quantity.fraction} if quantity.unit == "%" else {"epochs": float(quantity.value)}


def _in_steps(scheduler: Scheduler, name: str, batch: Arithmetic) -> int | None:
    return length_of(scheduler.lengths()[name], batch, at_end=name in scheduler.at_end)


def check_schedule(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that the lengths of a schedule fit into the budget, by the present batch or the one the run began with: a
    run that is resumed with another batch keeps its schedule (`learning_curve.py`)."""
    if batch.past is not None:
        batch = next((each for each in (batch, batch.as_begun()) if _fits(spec, each)), batch)
    _check_lengths(spec, batch, found)


def _fits(spec: Spec, batch: Arithmetic) -> bool:
    found = Findings(spec)
    _check_lengths(spec, batch, found)
    return not found.failed


def _check_lengths(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    scheduler, steps = spec.scheduler, batch.steps
    parts = scheduler.lengths()
    rule = "schedule.warmup"
    shown = " + ".join(f"{name} {quantity}" for name, quantity in parts.items())
    lengths = [_in_steps(scheduler, name, batch) for name in parts]
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
