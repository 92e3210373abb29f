"""Weights of `mixture` and of phases → shares of rows, and which datasets a run is trained on."""

from collections.abc import Mapping, Sequence
from math import ceil

from ..dsl.quantity import Quantity
from ..dsl.schema.data import Dataset
from ..dsl.schema.data import Phase as PhaseSpec
from ..dsl.spec import Spec
from .arithmetic import Arithmetic, steps_of
from .plan_timeline import Phase

FIRST = "train"  # what the stretch before the first declared phase is called


def trains(dataset: Dataset) -> bool:
    """Whether any of it is left to train on."""
    return dataset.holdout.fraction < 1


def trainable(spec: Spec) -> list[Dataset]:
    """The datasets that are not held out whole."""
    return [dataset for dataset in spec.datasets.values() if trains(dataset)]


def weights(spec: Spec, phase: PhaseSpec | None = None) -> dict[str, float]:
    """Dataset → weight, 0 where nothing gives it one; those of a phase, or of what comes before all phases.

    Without a mixture the only dataset that can be trained on has all the weight.
    """
    given = spec.mixture.weights
    if not given:
        sole = trainable(spec)
        given = {sole[0].name: 1.0} if len(sole) == 1 else {}
    given = {**given, **(phase.mix if phase is not None else {})}
    return {name: given.get(name, 0.0) for name in spec.datasets}


def shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """p ∝ w^(1 / temperature), where 0 stays 0; all 0 if every weight is."""
    largest = max(weights.values(), default=0.0)
    if largest <= 0:
        return dict.fromkeys(weights, 0.0)
    # The largest is taken out first: a power of what is left cannot overflow.
    powers = {name: (w / largest) ** (1 / temperature) if w > 0 else 0.0 for name, w in weights.items()}
    total = sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def lay_phases(spec: Spec, batch: Arithmetic) -> tuple[Phase, ...]:
    """The phases of a run in order. Shares are those of the datasets that any of them trains on."""
    declared = [_phase(spec, phase, start_of(phase.from_, batch)) for phase in spec.phases.values()]
    found = sorted(declared, key=lambda phase: (phase.first or 0, phase.fraction or 0.0))
    if not found or (found[0].first or found[0].fraction):
        found.insert(0, _phase(spec, None, 0))
    names = trained_on(found)
    return tuple(
        Phase(
            name=phase.name,
            first=phase.first,
            fraction=phase.fraction,
            shares={name: phase.shares[name] for name in names},
            lr_scale=phase.lr_scale,
        )
        for phase in found
    )


def _phase(spec: Spec, phase: PhaseSpec | None, first: int | None) -> Phase:
    return Phase(
        name=phase.name if phase is not None else _free_name(spec),
        first=first,
        fraction=phase.from_.fraction if phase is not None and first is None else None,
        shares=shares(weights(spec, phase), spec.mixture.temperature),
        lr_scale=phase.lr_scale if phase is not None else 1.0,
    )


def _free_name(spec: Spec) -> str:
    """`train`, or what no phase of the spec is called: the draw of rows goes by names."""
    name = FIRST
    while name in spec.phases:
        name = f"{name}_0"
    return name


def start_of(start: Quantity, batch: Arithmetic) -> int | None:
    """The index of the first step of a phase: with tokens, the first before which so many are trained on.

    None for a share of a budget whose steps are not known.
    """
    if start.unit == "tokens":
        return ceil(start.value / batch.tokens_per_step)
    return steps_of(start, batch.steps)


def trained_on(phases: Sequence[Phase]) -> tuple[str, ...]:
    """The datasets with a share in any phase, in the order of the spec."""
    return tuple(name for name in phases[0].shares if any(phase.shares[name] > 0 for phase in phases))
