"""Rules about `phase`: where phases begin, what of the data each of them trains on, and what changes nothing."""

from itertools import pairwise

from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.plan import PlanPhase
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.epochs import rows_of_step
from xtrain.planner.schedule.mixing import build_phases, start_of, trainable
from xtrain.planner.units import amount_in_epochs, plural


def check_phases(spec: Spec, batch: Arithmetic, found: Findings) -> tuple[PlanPhase, ...]:
    """Check where phases begin; the phases of the run in order, which are worth something only if nothing failed."""
    for name in spec.phases:
        _check_start(spec, name, batch, found)
    _check_order(spec, batch, found)
    phases = build_phases(spec, batch)
    _check_exact(spec, phases, batch, found)
    _check_idle(spec, phases, found)
    return phases


def _check_start(spec: Spec, name: str, batch: Arithmetic, found: Findings) -> None:
    """A phase begins before the run ends."""
    start, rule, path = spec.phases[name].from_, f"schedule.phase.{name}.start", f"phase.{name}.from"
    first = start_of(start, batch)
    hint = "use `from = 90%`, or remove the phase"
    if start.unit == "%" and start.fraction >= 1:
        found.fail(rule, "X607", path, f"phase {name} begins at {start} of the budget, when the run is over", hint)
    elif start.unit == "epochs" and batch.epochs is not None and start.value >= batch.epochs:
        message = f"phase {name} begins at {start}, and the run has {amount_in_epochs(batch.epochs)}"
        found.fail(rule, "X607", path, message, hint)
    elif first is None or batch.steps is None:
        found.unknown(
            rule, f"{name} begins at {start}: the number of steps is known only when the data has been counted"
        )
    elif first >= batch.steps:
        where = f"{start}, before step {first + 1:,}" if start.unit != "steps" else f"{start}"
        message = f"phase {name} begins at {where}, and the run has {plural(batch.steps, 'step')}"
        found.fail(rule, "X607", path, message, hint)
    else:
        found.passed(rule, f"{name} begins at {start}, with step {first + 1:,} of {batch.steps:,}")


def _check_order(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """No two phases begin with the same step; of starts in what is not counted, those alike are known to."""
    seen: dict[tuple[str, float], str] = {}
    units: set[str] = set()
    for name, phase in spec.phases.items():
        rule, path = f"schedule.phase.{name}.order", f"phase.{name}.from"
        first = start_of(phase.from_, batch)
        at = ("step", float(first)) if first is not None else (phase.from_.unit, float(phase.from_.value))
        earlier = seen.setdefault(at, name)
        if earlier != name:
            step = f"step {first + 1:,}" if first is not None else f"{phase.from_}"
            message = f"phases {earlier} and {name} both begin with {step}"
            found.fail(rule, "X606", path, message, "let one of them begin later, or merge them")
            continue
        if at[1]:  # the beginning of the run is the same however it is written
            units.add(at[0])
    if len(units) > 1:
        rule = "schedule.phases"
        found.unknown(rule, "which phase comes first is known once the data is counted")


def _check_exact(spec: Spec, phases: tuple[PlanPhase, ...], batch: Arithmetic, found: Findings) -> None:
    """With `exact` each dataset has whole rows in every step."""
    if not spec.mixture.exact:
        return
    rule, path = "data.exact", "mixture.exact"
    if any(phase.passes is not None for phase in phases):
        message = "exact shares of a step need weights as shares, and these are in epochs"
        found.fail(rule, "X526", path, message, "leave it out, or give weights without `epochs`")
    elif batch.ramp:
        message = "exact shares need as many rows in every step, and those of a ramp grow"
        found.fail(rule, "X526", path, message, "leave out `exact`, or `ramp_from` of batch")
    elif phases[0].exact_rows is None:
        message = "exact changes nothing, because one dataset is all that is trained on"
        found.warn("idle.mixture.exact", "W401", path, message, "remove it")
    else:
        for phase in phases:
            taken = dict(zip(phase.shares, rows_of_step(phase, tuple(phase.shares), batch.rows), strict=True))
            if (odd := next((name for name, rows in taken.items() if rows.denominator != 1), None)) is not None:
                message = f"{phase.shares[odd]:.4g} of {plural(batch.rows, 'row')} a step, the share of {odd}, "
                message += f"is {float(taken[odd]):.4g} rows"
                found.fail(rule, "X526", path, message, "choose weights or `batch { rows }` so that they are whole")
                return
        found.passed(rule, "every dataset has whole rows in every step")


def _learned_by(phase: PlanPhase) -> tuple[object, ...]:
    return phase.shares, phase.passes, phase.lr_scale, phase.mtp_weight


def _check_idle(spec: Spec, phases: tuple[PlanPhase, ...], found: Findings) -> None:
    """Warn of a phase in which nothing is other than before it."""
    if found.failed or not trainable(spec):
        return
    for before, phase in pairwise(phases):
        if _learned_by(before) == _learned_by(phase):
            message = f"phase {phase.name} changes nothing: shares and learning rate are those of {before.name}"
            hint = "give it a `mix` or an `lr_scale`, or remove it"
            found.warn(f"idle.phase.{phase.name}", "W401", f"phase.{phase.name}", message, hint)
