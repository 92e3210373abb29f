"""Slots: the places that a server has for adapters. Each is the adapter of a task, whose rows clients send."""

from typing import Any, Final

from attrs import evolve

from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.data import Batch
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.schema.tasks import AdapterTask
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.plan import Plan

TURNS: Final = 2  # microbatches that are computed in a row: then it is another client's turn
SCHEDULE: Final = "gpipe"  # all forwards, then all backwards: texts of any length, sends that wait for no other
UPDATES: Final = "adamw"  # what the protocol has, whose settings come with every request


def slot_names(count: int) -> tuple[str, ...]:
    """In the order in which plans have them, which is that of their names."""
    return tuple(f"slot_{number:03d}" for number in range(count))


def slots_of(plan: Plan) -> tuple[str, ...]:
    """The names of the slots of a server's plan; none where it trains the model itself."""
    adapter = plan.architecture.adapter
    return tuple(adapter.tasks) if isinstance(adapter, TaskAdapters) else ()


def microbatches(spec: Spec) -> int:
    """That are computed in a row; in a pipeline so many that most of its stages are busy most of the time."""
    pp = spec.parallel.pp.size
    return TURNS * pp if isinstance(pp, int) else TURNS


def as_training(spec: Spec) -> Spec:
    """The spec of a server as that of a training run whose microbatches and optimizer are those of the server."""
    serve = spec.serve
    assert serve is not None
    # Of several microbatches gradients of the one before are there while the next is computed.
    batch = Batch(sequence=serve.max_tokens, micro=serve.rows, accumulate=microbatches(spec))
    parallel = evolve(spec.parallel, pp=evolve(spec.parallel.pp, schedule=SCHEDULE))
    # How fast is what clients say with every update; what counts is what it keeps.
    chosen: Any = OPTIMIZERS[UPDATES]
    return evolve(spec, batch=batch, parallel=parallel, optimizer=chosen(lr=1e-4))


def with_slots(spec: Spec) -> Spec:
    """The same with an adapter in each slot, where it trains adapters."""
    assert spec.serve is not None
    if spec.adapter is None:
        return as_training(spec)
    names = slot_names(spec.serve.adapters)
    tasks = {name: AdapterTask(name=name, adapter=spec.adapter) for name in names}
    return evolve(as_training(spec), adapter=None, tasks=tasks)


def architecture_with_slots(arch: Architecture, count: int) -> Architecture:
    """A model with one adapter as one with as many of these as there are slots."""
    if arch.adapter is None:
        return arch
    return evolve(arch, adapter=TaskAdapters(tasks=dict.fromkeys(slot_names(count), arch.adapter)))
