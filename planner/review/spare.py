"""Uses of memory that a plan leaves free, each planned as a variant of the spec."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from xtrain.dsl.spec import Spec
from xtrain.plan.estimates import Remedy
from xtrain.plan.findings import Findings
from xtrain.plan.plan import Plan
from xtrain.plan.resolved import Resolved
from xtrain.plan.views import TIGHT
from xtrain.planner.compile import appraise, resolve
from xtrain.planner.rules.costs import Change, same_rows, tried
from xtrain.planner.rules.validate import validate

NOTICED: Final = 0.005  # share of a step
FACTORS: Final = (8, 4, 2)  # times the rows of a microbatch


def uses_of_memory(plan: Plan, spec: Spec, world: int | None = None) -> tuple[Remedy, ...]:
    """Return changes that need more memory and fit: less recomputation and parameters that fsdp gathers once if a step
    is planned to be faster, and the largest microbatch unless it is planned to be slower. world: as the plan was
    compiled for."""
    device, times = plan.cluster.memory_bytes, plan.estimates.times
    if device is None or times is None or plan.serves:
        return ()
    most = (1 - TIGHT) * device
    if plan.estimates.fullest.memory.total_bytes > most:
        return ()
    valid = validate(spec, world, Findings(spec))
    if valid is None:
        return ()
    found = []
    for changes in _uses(resolve(valid.elastic.spec, valid)):
        for change in changes:  # the one that uses the most memory first
            (use,) = tried(spec, [change], lambda other: appraise(other, plan.mesh.world_size).estimates) or (None,)
            if use is None or use.seconds is None or use.memory_bytes > most:
                continue
            grows = any(text.startswith("batch.micro=") for text in use.sets)
            if use.seconds <= times.step * (1 + NOTICED if grows else 1 - NOTICED):
                found.append(use)
                break
    return tuple(found)


def _uses(resolved: Resolved) -> Iterator[list[Change]]:
    mode, batch = resolved.spec.activation.mode, resolved.batch
    less = {"full": ("none", "selective"), "selective": ("none",)}.get(mode, ())
    yield [Change.of(activation__mode=each) for each in less]
    if resolved.dense_fsdp and resolved.reshard and resolved.size("pp") == 1:
        yield [Change.of(parallel__fsdp__reshard=False)]
    factors = [factor for factor in FACTORS if batch.accumulate % factor == 0]
    yield [
        Change.of(batch__micro=batch.micro * factor, **same_rows(resolved, Fraction(1, factor))) for factor in factors
    ]
