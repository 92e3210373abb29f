"""Weights of `mixture` and of phases → shares of rows or epochs, and which datasets a run is trained on."""

from collections.abc import Mapping, Sequence
from math import ceil

from attrs import evolve

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.data import Dataset, Weight
from xtrain.dsl.schema.data import Phase as PhaseSpec
from xtrain.dsl.spec import Spec
from xtrain.planner.canonical import plain_sum
from xtrain.planner.plan import PlanPhase
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.units import amount_in_epochs

FIRST = "train"  # what the stretch before the first declared phase is called


def trains(dataset: Dataset) -> bool:
    """Whether any of it is left to train on."""
    return dataset.holdout.fraction < 1


def trainable(spec: Spec) -> list[Dataset]:
    """The datasets that are not held out whole."""
    return [dataset for dataset in spec.datasets.values() if trains(dataset)]


def weights(spec: Spec, phase: PhaseSpec | None = None) -> dict[str, Weight]:
    """Dataset → weight, 0 where nothing gives it one; those of a phase, or of what comes before all phases.

    Without a mixture the only dataset that can be trained on has all the weight.
    """
    given = spec.mixture.weights
    if not given:
        sole = trainable(spec)
        given = {sole[0].name: 1.0} if len(sole) == 1 else {}
    given = {**given, **(phase.mix if phase is not None else {})}
    return {name: given.get(name, 0.0) for name in spec.datasets}


def amount(weight: Weight) -> float:
    """The number of a weight, whatever it counts."""
    return float(weight.value) if isinstance(weight, Quantity) else weight


def weight_text(weight: Weight) -> str:
    """`0.8`, `3 epochs`."""
    return amount_in_epochs(weight.value) if isinstance(weight, Quantity) else f"{weight:g}"


def in_epochs(weights: Mapping[str, Weight]) -> bool:
    """Whether weights are epochs; 0 is neither."""
    return any(isinstance(weight, Quantity) and weight.value for weight in weights.values())


def amounts(spec: Spec, phase: PhaseSpec | None = None) -> dict[str, float]:
    """Dataset → epochs or share of the rows, of a phase or of what comes before all phases."""
    given = weights(spec, phase)
    numbers = {name: amount(weight) for name, weight in given.items()}
    return numbers if in_epochs(given) else shares(numbers, spec.mixture.temperature)


def shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """p ∝ w^(1 / temperature), where 0 stays 0; all 0 if every weight is."""
    largest = max(weights.values(), default=0.0)
    if largest <= 0:
        return dict.fromkeys(weights, 0.0)
    # The largest is taken out first: a power of what is left cannot overflow.
    powers = {name: (w / largest) ** (1 / temperature) if w > 0 else 0.0 for name, w in weights.items()}
    total = plain_sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def build_phases(spec: Spec, batch: Arithmetic) -> tuple[PlanPhase, ...]:
    """The phases of a run in order. Shares are those of the datasets that any of them trains on."""
    declared = [_phase(spec, phase, start_of(phase.from_, batch)) for phase in spec.phases.values()]
    found = sorted(declared, key=lambda phase: (phase.first or 0, phase.fraction or 0.0, phase.epochs or 0.0))
    if not found or found[0].first or found[0].fraction or found[0].epochs:
        found.insert(0, _phase(spec, None, 0))
    names = trained_on(found)
    return tuple(
        evolve(
            phase,
            shares=_only(phase.shares, names),
            exact_rows=batch.rows if spec.mixture.exact and len(names) > 1 else None,
            passes=None if phase.passes is None else _only(phase.passes, names),
        )
        for phase in found
    )


def _only(found: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: found[name] for name in names if name in found}


def _phase(spec: Spec, phase: PhaseSpec | None, first: int | None) -> PlanPhase:
    in_tokens = spec.experiment.budget.unit == "tokens"
    start = phase.from_ if phase is not None else None
    waits = first is None
    in_passes, found = in_epochs(weights(spec, phase)), amounts(spec, phase)
    return PlanPhase(
        name=phase.name if phase is not None else _free_name(spec),
        first=first,
        fraction=start.fraction if start is not None and start.unit == "%" and (waits or in_tokens) else None,
        shares={} if in_passes else found,
        lr_scale=phase.lr_scale if phase is not None else 1.0,
        passes=found if in_passes else None,
        epochs=float(start.value) if start is not None and start.unit == "epochs" and waits else None,
        mtp_weight=phase.mtp_weight if phase is not None else None,
        tokens=ceil(start.value) if start is not None and start.unit == "tokens" else None,
    )


def _free_name(spec: Spec) -> str:
    """`train`, or what no phase of the spec is called: rows are sampled by names."""
    name = FIRST
    while name in spec.phases:
        name = f"{name}_0"
    return name


def start_of(start: Quantity, batch: Arithmetic) -> int | None:
    """The index of the first step of a phase: with tokens and epochs, the first before which so many are trained on.

    None for what is not known until the data is counted.
    """
    match start.unit:
        case "steps":
            return ceil(start.value)
        case "tokens":
            return batch.sizes.steps_of(ceil(start.value))
        case "epochs":
            return batch.step_behind(float(start.value))
    return batch.nearest_step(start.fraction)


def trained_on(phases: Sequence[PlanPhase]) -> tuple[str, ...]:
    """The datasets that any phase takes rows of, in the order of the spec."""
    return tuple(name for name in phases[0].amounts if any(phase.amounts[name] > 0 for phase in phases))
